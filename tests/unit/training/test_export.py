"""What leaves the house: adapters for other tools, other forms of a model, uploads to a stand-in of the hub."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest

from tests.unit.training.adapters import load, logits, make_adapter, with_adapter
from training.errors import ConfigError, MergeError, StorageError
from training.export import export, push
from training.merging.adapter import write_provenance
from training.merging.shards import Checkpoint


def test_adapter_names_its_base_by_the_hubs_id_and_loads_with_peft(random_base, tmp_path):
    adapter = make_adapter(random_base, tmp_path / "adapter")
    write_provenance(adapter, random_base, model="openai/gpt-oss-20b", revision="main")
    (adapter / "optimizer.pt").write_bytes(b"not for others")
    export(adapter, tmp_path / "out", "adapter")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "openai/gpt-oss-20b"
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    exported = logits(with_adapter(random_base, tmp_path / "out"))
    assert exported.equal(logits(with_adapter(random_base, adapter)))


def test_model_in_bf16(random_base, tmp_path):
    report = export(random_base, tmp_path / "out", "bf16", progress=False)
    assert report is not None
    assert report.format == "bf16"
    assert not any(name.endswith("_blocks") for name in Checkpoint.open(tmp_path / "out").entries)
    assert logits(load(tmp_path / "out")).equal(logits(load(random_base)))


def test_wrong_sources_and_existing_targets_are_refused(random_base, tmp_path):
    with pytest.raises(MergeError, match="is not an adapter"):
        export(random_base, tmp_path / "out", "adapter")
    (tmp_path / "out").mkdir()
    for kind in ("adapter", "bf16"):
        with pytest.raises(StorageError, match="already exists"):
            export(random_base, tmp_path / "out", kind)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="neither a model nor an adapter"):
        push(tmp_path / "out", "me/model")


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that an upload of small files uses; keeps what was committed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files: dict[str, bytes] = {}
        self.created: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.reply({"siblings": [], "sha": "0" * 40, "id": "me/model"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer good":
            return self.reply({"error": "unauthorized"}, 401)
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            return self.reply({"url": f"{self.server.url}/me/model"})
        if self.path == "/api/validate-yaml":  # of the model card
            return self.reply({"errors": [], "warnings": []})
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            return self.reply({"files": answer})
        if self.path.endswith("/commit/main"):
            for line in body.decode().splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    self.server.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            return self.reply({"commitUrl": f"{self.server.url}/me/model/commit/1", "commitOid": "1" * 40})
        return self.reply({"error": f"unknown {self.path}"}, 404)

    def reply(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "good")
    hub = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    thread = Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


def test_push_uploads_every_file_but_hidden_ones(hub, random_base, tmp_path):
    adapter = make_adapter(random_base, tmp_path / "adapter")
    (adapter / ".secret").write_text("mine")
    assert push(adapter, "me/model").endswith("me/model")
    assert hub.created["visibility"] == "private"
    assert set(hub.files) == {path.name for path in adapter.iterdir()} - {".secret"}
    for name, content in hub.files.items():
        assert content == (adapter / name).read_bytes()


def test_push_says_what_is_missing(hub, random_base, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "bad")
    with pytest.raises(ConfigError, match="the hub refuses me/model"):
        push(random_base, "me/model")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="no hub token"):
        push(random_base, "me/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        push(random_base, "me/model")
