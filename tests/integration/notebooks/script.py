"""A script as people bring it: `__main__` functions and closures, written for torchrun. Run by test_distributed.py."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ray_app import distributed

OFFSET = 10
RESULTS = Path(sys.argv[1])


class Diverged(Exception):
    """An error type that only this script knows."""


@distributed(gpus=8, gpu_type="H100")
def train(scale, fail_on=None):
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend="nccl")  # as under torchrun; the group is there already
    rank = dist.get_rank()
    print(f"hello from {rank}")
    total = torch.tensor([scale * (rank + OFFSET)])
    dist.all_reduce(total)
    if rank == fail_on:
        raise Diverged(f"loss is nan on rank {rank}")
    dist.barrier()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    return {"rank": rank, "sum": int(total), "cwd": os.getcwd(), "env": {name: os.environ.get(name) for name in names}}


def closure(folder):
    @distributed(gpus=0, workers=2)
    def wait():
        (folder / f"started-{os.environ['RANK']}").touch()
        time.sleep(300)

    return wait


def interrupt_when_started():
    while len(list(RESULTS.glob("started-*"))) < 2:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background commands with it ignored
    results = {"values": train.distributed(2)}
    try:
        train.distributed(scale=2, fail_on=1)
    except Diverged as error:
        results["error"] = {"text": str(error), "notes": error.__notes__}
    threading.Thread(target=interrupt_when_started, daemon=True).start()
    start = time.monotonic()
    try:
        closure(RESULTS).distributed()
    except KeyboardInterrupt:
        results["interrupted_after_s"] = time.monotonic() - start
    results["sigint_is_default"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (RESULTS / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
