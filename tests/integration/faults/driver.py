"""A driver that keeps the run directory's contract and trains nothing: `python driver.py RUN_DIR`.

It takes `optim.max_steps` steps of 0.2 s, writes a checkpoint after each second one, goes on from it, and keeps a journal
of what it did, by which the harness sees whether anything was lost or done twice. Runs whose name starts with `tracked`
have a real MLflow run.
"""

import fcntl
import json
import os
import signal
import sys
import time
from typing import Any

from training.run_dir import Phase, RunDir, read_json, write_json

STEP_S = 0.2
PHASE_S = 1.5


def journal(run_dir: RunDir, **entry: Any) -> None:
    line = json.dumps({"pid": os.getpid(), "time": time.time(), **entry}) + "\n"
    descriptor = os.open(run_dir.root / "journal.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode())  # one write: lines of two processes never mix
    os.close(descriptor)


def main(root: str) -> int:
    run_dir = RunDir.open(root)
    with run_dir.lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        journal(run_dir, event="start")
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
        config = run_dir.config()
        attempt = int(run_dir.progress().get("attempt", 0)) + 1
        run_dir.result_path.unlink(missing_ok=True)
        run_dir.write_progress(Phase.STARTING, attempt=attempt)
        tracking = None
        if config.name.startswith("tracked"):
            from training.driver import start_tracking

            tracking = start_tracking(config, run_dir)
        time.sleep(PHASE_S)
        train(run_dir, config.optim.max_steps or 10)
        for phase in (Phase.MERGING, Phase.EVALUATING):
            run_dir.write_progress(phase)
            print(f"{phase} in attempt {attempt}", flush=True)
            time.sleep(PHASE_S)
        if tracking:
            tracking.end("FINISHED")
        journal(run_dir, event="end")
        run_dir.write_result(Phase.SUCCEEDED, model=str(run_dir.root / "model"))
    return 0


def train(run_dir: RunDir, total: int) -> None:
    checkpoint = run_dir.checkpoints / "step.json"
    done = (read_json(checkpoint) or {"step": 0})["step"]
    for step in range(done + 1, total + 1):
        time.sleep(STEP_S)
        journal(run_dir, event="step", step=step)
        run_dir.write_progress(Phase.RUNNING, step=step, total_steps=total)
        print(f"step {step}", flush=True)
        if step % 2 == 0:
            write_json(checkpoint, {"step": step})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
