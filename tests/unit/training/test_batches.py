"""Dealing: any number of workers takes the same rows in the same steps, each row once an epoch, with the same dropout."""

from collections import Counter

import pytest
import torch

from training.config import OptimConfig
from training.rows.batches import EMPTY, Collator, DealtBatches, Rows, row_seed


def steps(rows: int, world: int, *, batch: int = 16, per_device: int = 1, epoch: int = 0) -> list[list[list[int]]]:
    """Of each optimizer step, its groups in the order of their numbers, as `world` workers together have them."""
    optim = OptimConfig(global_batch_size=batch, per_device_batch_size=per_device, seed=3)
    workers = [DealtBatches(rows, optim, rank, world) for rank in range(world)]
    for worker in workers:
        worker.set_epoch(epoch)
    dealt = [list(worker) for worker in workers]
    assert {len(groups) for groups in dealt} == {len(workers[0])}, "every worker takes as many forward passes"
    accumulation = optim.accumulation_steps(world)
    in_order = [group for groups in zip(*dealt, strict=True) for group in groups]
    size = accumulation * world
    return [in_order[start : start + size] for start in range(0, len(in_order), size)]


def filled(step: list[list[int]]) -> list[list[int]]:
    """Groups without their empty slots, without empty groups."""
    return [rows for group in step if (rows := [row for row in group if row != EMPTY])]


@pytest.mark.parametrize("world", range(1, 18))
@pytest.mark.parametrize(("rows", "per_device"), [(100, 1), (100, 3), (5, 1), (16, 2), (33, 4)])
def test_every_size_takes_the_same_groups_in_the_same_steps(rows: int, per_device: int, world: int) -> None:
    alone = steps(rows, 1, per_device=per_device)
    together = steps(rows, world, per_device=per_device)
    assert [filled(step) for step in together] == [filled(step) for step in alone]


@pytest.mark.parametrize("world", [1, 3, 8, 16])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
def test_each_row_once_an_epoch(rows: int, world: int) -> None:
    seen = Counter(row for step in steps(rows, world) for group in step for row in group)
    del seen[EMPTY]
    assert seen == Counter(range(rows))


def test_the_last_step_is_partial_not_left_out() -> None:
    assert [sum(map(len, filled(step))) for step in steps(37, 4)] == [16, 16, 5]


def test_epochs_differ_and_repeat_exactly() -> None:
    assert steps(40, 2, epoch=0) != steps(40, 2, epoch=1)
    assert steps(40, 2, epoch=1) == steps(40, 2, epoch=1)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_groups_number_does_not_depend_on_the_world(world: int) -> None:
    """`trainer` seeds dropout by `accumulated * world + rank`: the same rows must get the same number."""
    numbers = {tuple(group): number for number, group in enumerate(steps(32, world)[1]) if group != [EMPTY]}
    assert numbers == {tuple(group): number for number, group in enumerate(steps(32, 1)[1])}


def test_row_seeds_differ() -> None:
    seeds = [row_seed(42, step, group) for step in range(300) for group in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in [*seeds, row_seed(2**32 - 1, 10**6, 10**4)])


class TestCollator:
    def test_pads_at_the_end(self) -> None:
        batch = Collator(9)([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}])
        assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
        assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]
        assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]

    def test_length_is_a_multiple(self) -> None:
        assert Collator(0, multiple=8)([{"input_ids": [1] * 9, "labels": [1] * 9}])["input_ids"].shape == (1, 16)

    def test_padding_of_a_packed_row_is_a_document_of_its_own(self) -> None:
        packed = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "position_ids": [0, 1, 0]}
        batch = Collator(0, multiple=8)([packed])
        assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2, 3, 4]]

    def test_an_empty_slot_trains_nothing(self) -> None:
        rows = Rows([{"input_ids": [1, 2], "labels": [1, 2]}], pad_token_id=9)
        batch = Collator(9)([rows[0], rows[EMPTY]])
        assert batch["labels"][1].eq(-100).all()
        assert batch["input_ids"].dtype == torch.int64
