"""How rows are dealt to workers: the same rows in the same optimizer step, however many workers there are.

Each epoch is a seeded permutation. Optimizer step s takes the next `global_batch_size` rows, cut into groups of
`per_device_batch_size`; group g goes to worker `g % world` as its accumulation step `g // world`. What is left empty is filled
with masked rows. Groups do not depend on the world size, and neither does the random state that `row_seed` gives them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from training.config import OptimConfig

EMPTY = -1
"""Index of a slot without a row."""


class DealtBatches(Sampler[list[int]]):
    """The groups of one worker, in order: `accumulation_steps` of them per optimizer step.

    Args:
        rows: number of rows in the data.
        optim: batch sizes and seed.
        rank: this worker.
        world_size: number of workers.
    """

    def __init__(self, rows: int, optim: OptimConfig, rank: int, world_size: int):
        self.rows = rows
        self.optim = optim
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows / self.optim.global_batch_size)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.optim.accumulation_steps(self.world_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.optim.seed + self.epoch)
        order = torch.randperm(self.rows, generator=generator).tolist()
        size, groups = self.optim.per_device_batch_size, self.optim.accumulation_steps(self.world_size)
        for start in range(0, self.rows, self.optim.global_batch_size):
            step = order[start : start + self.optim.global_batch_size]
            for accumulated in range(groups):
                first = (accumulated * self.world_size + self.rank) * size
                group = step[first : first + size]
                yield group + [EMPTY] * (size - len(group))


class Rows(Dataset[dict[str, Any]]):
    """Examples by index, with a fully masked one for EMPTY."""

    def __init__(self, examples: Sequence[dict[str, list[int]]], pad_token_id: int):
        self._examples = examples
        self._empty = {"input_ids": [pad_token_id, pad_token_id], "labels": [-100, -100]}

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._empty if index == EMPTY else self._examples[index]


class Collator:
    """Pads a group at the end into `input_ids`, `labels` and `position_ids`, each `[B, T]`.

    Args:
        pad_token_id: fills `input_ids`.
        multiple: T is a multiple of this, so that compiled kernels see few lengths.
    """

    def __init__(self, pad_token_id: int, multiple: int = 1):
        self.pad_token_id = pad_token_id
        self.multiple = multiple

    def __call__(self, examples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        length = math.ceil(longest / self.multiple) * self.multiple
        batch = {
            "input_ids": torch.full((len(examples), length), self.pad_token_id),
            "labels": torch.full((len(examples), length), -100),
            "position_ids": torch.arange(length).expand(len(examples), length).clone(),
        }
        for row, example in enumerate(examples):
            size = len(example["input_ids"])
            for key, values in example.items():
                batch[key][row, :size] = torch.tensor(values)
            if "position_ids" in example and size < length:
                batch["position_ids"][row, size:] = torch.arange(length - size)  # padding is a document of its own
        return batch


def row_seed(seed: int, step: int, group: int) -> int:
    """Seed of the dropout of group `group` in optimizer step `step`: what resumes and what is resized draws the same masks."""
    return (seed * 1_000_003 + step * 65_537 + group) % 2**63
