"""What Ray's job client is asked, and what is found without it."""

import importlib.metadata
import json
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ray_app.cluster.parts import ray_directory
from ray_app.queue.ray_jobs import RayJobs


@pytest.fixture
def new_head() -> Iterator[str]:
    """URL of the dashboard of a head that knows no job."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/version" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"ray_version": importlib.metadata.version("ray")}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_log_that_ray_has_lost_is_read_where_an_earlier_session_left_it(
    new_head: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = ray_directory() / "session_2026-12-01_10-00-00_000000_1" / "logs" / "job-driver-job-1.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"step 1\rstep 2\n\xff\n")
    ray_jobs = RayJobs(new_head)
    assert ray_jobs.logs("job-1") == "step 1\nstep 2\n\ufffd\n"  # line ends as Ray's own reading has them
    with pytest.raises(RuntimeError, match="404"):
        ray_jobs.logs("job-2")
