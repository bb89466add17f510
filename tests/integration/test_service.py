"""The service's path with every part real: POST /jobs and `ray job submit` to a merged, registered model that answers."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ray_app.cluster.processes import environment
from ray_app.queue.ray_jobs import RayJobs
from tests.integration.service import running
from training.config import PRESETS


@pytest.mark.timeout(900)
def test_jobs_by_http_and_by_ray_end_as_models_that_answer(tmp_path: Path, rows_file: Path) -> None:
    few = {"optim.max_steps": 2, "optim.global_batch_size": 4, "evaluation": None, "scaling.workers": 1}
    with running(tmp_path / "home") as service:
        rows = rows_file.read_text(encoding="utf-8") * 5  # a tenth of so few prompts would leave none to train on
        file = service.http.post("/files", content=rows).raise_for_status().json()
        assert file["rows"] == 20
        overrides = {**few, "data": {"path": f"file:{file['id']}", "held_out_path": None}}
        posted = service.submit(preset="tiny", overrides=overrides, name="posted")
        by_hand = [f"{key}={'null' if value is None else value}" for key, value in few.items()]
        command = [
            "job",
            "submit",
            "--no-wait",
            "--submission-id",
            "by-hand",
            "--address",
            service.cluster.dashboard_url,
        ]
        driver = [sys.executable, "-m", "training", str(PRESETS / "tiny.yaml"), *by_hand, "name=by-hand"]
        ray = str(Path(sys.executable).parent / "ray")
        subprocess.run([ray, *command, "--", *driver], check=True, capture_output=True, env=environment(), timeout=120)

        job = service.succeeded(posted)
        assert job["progress"]["step"] == 2
        assert job["result"]["registered_model"] == "posted/1"
        assert Path(job["result"]["model"], "model.safetensors.index.json").is_file()
        assert "Run directory" in service.http.get(f"/jobs/{posted}/logs").text
        metrics = service.http.get(f"/jobs/{posted}/metrics").json()["metrics"]
        assert [line["step"] for line in metrics if "loss" in line][-1] == 2
        with zipfile.ZipFile(io.BytesIO(service.http.get(f"/jobs/{posted}/adapter").content)) as archive:
            assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.namelist())

        adopted = service.succeeded("by-hand")
        assert adopted["name"] == "by-hand"
        assert {model["job"] for model in service.http.get("/models").json()["models"]} == {posted, "by-hand"}
        both = RayJobs(service.cluster.dashboard_url).jobs()
        assert {posted, "by-hand"} <= set(both)

        request = {"prompt": "¿Cuál es la capital de Australia?", "reasoning_language": "German", "max_new_tokens": 8}
        answer = service.http.post("/generate", json={**request, "model": f"job:{posted}"}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["reasoning_language"]["requested"] == "German"
