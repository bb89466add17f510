"""Carrying out a plan on disk: tensors are copied, hashed and read back, or computed anew, piece by piece.

The work is done in a hidden directory beside the target, which is renamed at the end. A journal in it names the finished
tensors, so that a rewrite that was killed is taken up by the next one of the same plan. One that failed leaves nothing.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from training.errors import MergeError
from training.merging.adapter import expert_dtype, expert_shape, expert_stem
from training.merging.layout import Plan
from training.merging.shards import DTYPES, Checkpoint, copy_checked, write_at
from training.merging.survival import Outcome, Survival, Written
from training.merging.workplace import JOURNAL, Journal, boot_id, work_directory
from training.model import mxfp4

CHUNK_VALUES = 1 << 20
"""fp32 values of a plain weight that a thread has in memory at once, a few times: small enough for the processor's cache."""

_THREADS = 2  # one computes while one waits for the disk; 4 spend twice the time in the kernel, on the lock of one file

Advance = Callable[[int], None]


def rewrite(
    plan: Plan,
    out: Path,
    identity: dict[str, Any],
    finish: Callable[[Path, Outcome], None],
    *,
    progress: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    durable: bool = True,
) -> None:
    """Writes the shards of `plan`, and puts the directory at `out`, whole or not at all.

    Args:
        plan: what to write.
        out: must not exist.
        identity: what the result is made from; only a rewrite of the same identity takes up a killed one's work.
        finish: called with the work directory and what was written, to add what else belongs there, or to refuse the
            result by raising.
        progress: draw a bar on the terminal.
        on_progress: called with bytes done and bytes in all.
        durable: wait until the bytes are on the disk, so that a power failure cannot leave a model with holes.

    Raises:
        MergeError: a value is not finite, or another rewrite to `out` is at work.
        StorageError: `out` exists, or the disk is full.
    """
    identity = {**identity, "sizes": plan.layout.sizes, "boot": boot_id()}
    with (
        work_directory(out, plan.size, identity) as work,
        _shown(progress, on_progress, plan.size, out.name) as advance,
    ):
        journal = Journal(work / JOURNAL, identity)
        with _open_files(plan, work) as files:
            advance(sum(len(header) for header in plan.layout.headers.values()))
            _write_all(plan, files, journal, advance)
        sync = _sync if durable else lambda directory: None
        sync(work)
        finish(work, Outcome.of(journal.done))
        sync(work)  # what `finish` added
        journal.path.unlink()


def _sync(directory: Path) -> None:
    """Waits until the files of `directory`, and their names, are on the disk."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(plan: Plan, files: dict[str, int], journal: Journal, advance: Advance) -> None:
    """Writes every tensor that the journal does not have, in the source's order: some are read while others are computed."""
    todo = [name for name in plan.steps if name not in journal.done]
    advance(sum(plan.size_of(name) for name in journal.done))
    failed = threading.Event()

    def advance_or_stop(count: int) -> None:
        if failed.is_set():
            raise CancelledError
        advance(count)

    def take(name: str) -> None:
        journal.add(name, _write_tensor(plan, name, files, advance_or_stop))

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for step in as_completed([pool.submit(take, name) for name in todo]):
                step.result()
        except BaseException:
            failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_tensor(plan: Plan, name: str, files: dict[str, int], advance: Advance) -> Written:
    if name in plan.rewritten:
        write = _write_plain if expert_stem(name) is None else _write_experts
        return Written(survival=write(plan, name, files, advance))
    entry, (file, offset) = plan.source.entries[name], plan.layout.places[name]
    with entry.path.open("rb") as source:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source.fileno(), entry.start, entry.size, os.POSIX_FADV_SEQUENTIAL)
        return Written(copy_checked(source.fileno(), files[file], entry.start, entry.size, offset, advance))


def _write_plain(plan: Plan, target: str, files: dict[str, int], advance: Advance) -> Survival:
    entry, update = plan.source.entries[target], plan.updates[target]
    file, offset = plan.layout.places[target]
    rows, columns = entry.shape
    at_once = max(1, CHUNK_VALUES // columns)
    survival = Survival()
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        before, delta = entry.read(first, count).float(), update.delta(first, count)
        after = (before + delta).to(DTYPES[entry.dtype])
        _check_finite(target, after)
        survival.add(before, delta, after.float())
        advance(_write(files[file], after, offset + first * columns * after.element_size()))
    return survival


def _write_experts(plan: Plan, stem: str, files: dict[str, int], advance: Advance) -> Survival:
    """Expert by expert, so that memory does not follow the number of experts."""
    update = plan.updates.get(stem)
    survival = Survival()
    for expert in range(expert_shape(plan.source, stem)[0]):
        before = read_expert(plan.source, stem, expert)
        delta = update.expert_delta(expert) if update else None
        wanted = before if delta is None else before + delta
        if plan.packed:
            _check_finite(stem, wanted)
            blocks, scales = mxfp4.quantize(wanted, search_scales=True)
            tensors = {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
        else:
            plain = wanted.to(DTYPES[expert_dtype(plan.source, stem)])
            _check_finite(stem, plain)
            tensors = {stem: plain.T.contiguous()}
        if delta is not None:
            after = mxfp4.dequantize(blocks, scales, torch.float32) if plan.packed else plain.float()
            survival.add(before, delta, after)
        for name, tensor in tensors.items():
            file, offset = plan.layout.places[name]
            advance(_write(files[file], tensor, offset + expert * tensor.numel() * tensor.element_size()))
    return survival


def read_expert(checkpoint: Checkpoint, stem: str, expert: int) -> Tensor:
    """One expert's weight as fp32 `[out, in]`, whatever form it is stored in."""
    if f"{stem}_blocks" not in checkpoint.entries:
        return checkpoint.entries[stem].read(expert, 1)[0].float().T
    blocks, scales = (checkpoint.entries[f"{stem}_{part}"].read(expert, 1)[0] for part in ("blocks", "scales"))
    return mxfp4.dequantize(blocks, scales, torch.float32)


def _check_finite(target: str, values: Tensor) -> None:
    low, high = torch.aminmax(values)  # both are NaN where any value is; isfinite takes twenty times as long
    if not (low.isfinite() and high.isfinite()):
        raise MergeError(f"{target} would hold values that are not finite", hint="The base or the adapter is broken.")


def _write(descriptor: int, tensor: Tensor, offset: int) -> int:
    return write_at(descriptor, tensor.contiguous().view(torch.uint8).numpy().data.cast("B"), offset)


@contextmanager
def _open_files(plan: Plan, work: Path) -> Iterator[dict[str, int]]:
    """Descriptors of the new shards at their full size, with headers: a disk too full says so before the work begins."""
    files: dict[str, int] = {}
    try:
        for file, size in plan.layout.sizes.items():
            files[file] = os.open(work / file, os.O_RDWR | os.O_CREAT, 0o644)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(files[file], 0, size)
            else:
                os.truncate(files[file], size)
            os.pwrite(files[file], plan.layout.headers[file], 0)
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


@contextmanager
def _shown(progress: bool, on_progress: Callable[[int, int], None] | None, total: int, name: str) -> Iterator[Advance]:
    """A function to call, from any thread, with every number of bytes done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    done, lock = 0, threading.Lock()
    with Progress(*columns, disable=not progress) as bar:
        task = bar.add_task(f"Writing {name}", total=total)

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                bar.advance(task, count)
                if on_progress:
                    on_progress(done, total)

        yield advance
