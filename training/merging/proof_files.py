"""The part of a proof that reads files: adapted tensors are what they must be bit for bit, all others are the base's bytes."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from training.errors import MergeError
from training.merge import RECORD
from training.merging.adapter import Adapter, Update, expert_dtype, expert_shape, expert_stem
from training.merging.rewrite import read_expert
from training.merging.shards import DTYPES, Checkpoint, Entry, joint_xxh128
from training.model import mxfp4
from training.run_dir import read_json


def check_adapted(base: Checkpoint, adapter: Adapter, merged: Checkpoint) -> int:
    """How many adapted tensors were checked; all equal their values computed anew.

    Raises:
        MergeError: the first tensor that does not.
    """
    for target, update in adapter.updates.items():
        for place, expected, found in _expected_and_found(base, target, merged, update):
            if not torch.equal(expected, found):
                wrong = int((expected != found).sum())
                raise MergeError(
                    f"the proof failed: {place} of the merged model differs from W + scale * B @ A in {wrong:,} of "
                    f"{found.numel():,} values",
                    hint="Merge again; if it stays, the disk or the memory of this machine is at fault.",
                )
    return len(adapter.updates)


def _expected_and_found(
    base: Checkpoint, target: str, merged: Checkpoint, update: Update
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(place, what must be there, what is there) for pieces of one adapted weight."""
    if update.experts is None:
        _require(merged, base.entries[target])
        weight = base.entries[target]
        rows, columns = weight.shape
        at_once = max(1, (16 << 20) // columns)
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            product = update.b[first : first + count].double() @ update.a.double() * update.scale
            expected = (weight.read(first, count).float() + product.float()).to(DTYPES[weight.dtype])
            yield target, expected, merged.entries[target].read(first, count)
        return
    packed = f"{target}_blocks" in merged.entries
    if not packed and target not in merged.entries:
        raise MergeError(f"the proof failed: the merged model has no {target}")
    dtype = expert_dtype(base, target)
    if not packed and merged.entries[target].dtype != dtype:
        raise MergeError(
            f"the proof failed: {target} is {merged.entries[target].dtype} in the merged model, not {dtype}"
        )
    for expert in range(update.experts):
        product = update.b[expert].double() @ update.a[expert].double() * update.scale
        wanted = read_expert(base, target, expert) + product.float()
        place = f"expert {expert} of {target}"
        if packed:
            found = [merged.entries[f"{target}_{part}"].read(expert, 1)[0] for part in ("blocks", "scales")]
            for expected, part in zip(mxfp4.quantize(wanted, search_scales=True), found, strict=True):
                yield place, expected, part
        else:
            yield place, wanted.T.to(DTYPES[dtype]), merged.entries[target].read(expert, 1)[0]


def check_copied(base: Checkpoint, adapter: Adapter, merged: Checkpoint) -> tuple[int, str]:
    """How many tensors were compared byte by byte with the base's, and the XXH3 over them.

    Experts that a merge into bf16 dequantised are compared by value.

    Raises:
        MergeError: a tensor is missing, of another shape, too many, or has another byte.
    """
    digests: dict[str, str] = {}
    known = set()
    for name in sorted(base.entries):
        stem = expert_stem(name)
        known |= {name, stem, f"{stem}_blocks", f"{stem}_scales"}
        if (stem or name) in adapter.updates:
            continue
        if stem and name not in merged.entries:
            if name.endswith("_blocks"):
                _compare_values(base, stem, merged)
            continue
        _require(merged, base.entries[name])
        digests[name] = merged.entries[name].xxh128()
        if digests[name] != base.entries[name].xxh128():
            raise MergeError(f"the proof failed: {name} of the merged model is not the base's, byte for byte")
    extra = sorted(set(merged.entries) - known)
    if extra:
        raise MergeError(f"the proof failed: the merged model holds {extra[0]}, which the base does not")
    return len(digests), joint_xxh128(digests)


def check_record(merged: Path, digest: str) -> None:
    """
    Raises:
        MergeError: the copied tensors' hash is not the one that the merge noted when it read them.
    """
    recorded = (read_json(Path(merged) / RECORD) or {}).get("copied_xxh128")
    if recorded not in (None, digest):
        raise MergeError(
            f"the proof failed: the copied tensors have XXH3 {digest[:16]}…, and the merge read {recorded[:16]}…",
            hint="The base was changed while, or after, it was merged. Merge again.",
        )


def _compare_values(base: Checkpoint, stem: str, merged: Checkpoint) -> None:
    if stem not in merged.entries:
        raise MergeError(f"the proof failed: the merged model lacks {stem}")
    for expert in range(expert_shape(base, stem)[0]):
        if not torch.equal(read_expert(base, stem, expert), read_expert(merged, stem, expert)):
            raise MergeError(f"the proof failed: expert {expert} of {stem} has other values than the base's")


def _require(merged: Checkpoint, entry: Entry) -> None:
    found = merged.entries.get(entry.name)
    if found is None:
        raise MergeError(f"the proof failed: the merged model lacks {entry.name}")
    if (found.dtype, found.shape) != (entry.dtype, entry.shape):
        raise MergeError(
            f"the proof failed: {entry.name} is {found.dtype} {list(found.shape)} in the merged model, "
            f"{entry.dtype} {list(entry.shape)} in the base"
        )
