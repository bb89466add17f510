"""A run whose storage root is an S3 bucket: its machine is lost while it trains, and it goes on from the bucket."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.drivers import driving, wait_until, write_job
from tests.integration.test_driver import assert_equals_one_worker
from tests.unit.training.object_store import bucket
from training.durable.run_mirror import RunMirror
from training.durable.storage import VARIABLE, open_url
from training.run_dir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_run_goes_on_from_the_bucket_when_its_directory_is_gone(
    home: Path, tmp_path: Path, random_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_url.cache_clear()
    job = write_job(tmp_path, random_base, optim={"max_steps": 60})
    with bucket(monkeypatch) as url:
        monkeypatch.setenv(VARIABLE, url)
        with driving(home, job) as driver:
            driver.wait_for_step(10)
            run_dir = driver.run_dir
            mirror = RunMirror(run_dir, url)
            wait_until(mirror.checkpoints, "a checkpoint in the bucket")
            driver.process.send_signal(signal.SIGKILL)
            driver.process.wait()
        shutil.rmtree(run_dir.root)

        with driving(home, run_dir.root) as driver:
            assert driver.wait() == 0, driver.text()
        found = RunDir.open(run_dir.root)
        assert found.progress()["attempt"] == 2
        steps = [line["step"] for line in found.metrics()]
        assert set(steps) == set(range(1, 61))
        assert steps.count(1) == 1, "it resumed from a checkpoint, not from the start"
        assert mirror.copy.read(run_dir.result_path) == run_dir.result_path.read_bytes()
        shutil.rmtree(found.adapter)
        mirror.copy.pull(found.adapter)
        monkeypatch.delenv(VARIABLE)
        assert_equals_one_worker(found, random_base, tmp_path)
