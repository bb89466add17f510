"""The driver, with workers that write down which rows they train on: `python -m tests.integration.counting RUN_DIR_OR_CONFIG`.

Each worker adds lines to `rows-RANK.jsonl` in the run directory: the optimizer step, the attempt it belongs to, and a digest
of each row that was not padding.
"""

import hashlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from training import launch
from training.__main__ import main
from training.run_dir import RunDir
from training.worker import load_examples, train_loop


def counting_loop(settings: dict[str, Any]) -> None:
    """`train_loop`, and the journal of it."""
    import torch.distributed as dist

    from training.trainer import Trainer

    distributed = dist.is_initialized()
    started = [time.time()]
    if distributed:
        dist.broadcast_object_list(started, src=0)
    journal = Path(settings["run_dir"]) / f"rows-{dist.get_rank() if distributed else 0}.jsonl"
    plain = Trainer.training_step

    def training_step(self: Trainer, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        rows = [digest(ids.tolist()) for ids in _unpadded(inputs)]
        with journal.open("a") as file:
            file.write(json.dumps({"step": self.state.global_step + 1, "attempt": started[0], "rows": rows}) + "\n")
        return plain(self, model, inputs, *rest)

    Trainer.training_step = training_step  # type: ignore[method-assign]
    train_loop(settings)


def _unpadded(inputs: dict[str, Any]) -> list[Any]:
    """Rows with trained tokens, up to the last of them: what is padded has none after it."""
    trained = [
        (row, (labels != -100).nonzero()) for row, labels in zip(inputs["input_ids"], inputs["labels"], strict=True)
    ]
    return [row[: int(positions[-1]) + 1] for row, positions in trained if len(positions)]


def digest(ids: list[int]) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def rows_of_epochs(run_dir: RunDir) -> list[Counter[str]]:
    """How often each row was trained on, epoch by epoch; of a step that was done again, the last time counts."""
    lines = [json.loads(line) for path in run_dir.root.glob("rows-*.jsonl") for line in path.read_text().splitlines()]
    last: dict[int, float] = {}
    for line in lines:
        last[line["step"]] = max(last.get(line["step"], 0.0), line["attempt"])
    batch = run_dir.config().optim.global_batch_size
    steps_per_epoch = -(-len(load_examples(run_dir)) // batch)
    epochs = [Counter[str]() for _ in range(-(-max(last) // steps_per_epoch))]
    for line in lines:
        if line["attempt"] == last[line["step"]]:
            epochs[(line["step"] - 1) // steps_per_epoch].update(line["rows"])
    return epochs


def all_rows(run_dir: RunDir) -> Counter[str]:
    """Each row of the data once."""
    rows = Counter[str]()
    for example in load_examples(run_dir):
        trained = [position for position, label in enumerate(example["labels"]) if label != -100]
        rows[digest(example["input_ids"][: trained[-1] + 1])] += 1
    return rows


if __name__ == "__main__":
    launch.train_loop = counting_loop
    sys.exit(main(sys.argv[1:]))
