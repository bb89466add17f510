"""Where every byte of a rewritten model comes from: the plan of a merge or an export, made before anything is written."""

from dataclasses import dataclass
from typing import Literal

from training.errors import MergeError
from training.merging.adapter import Update, expert_dtype, expert_shape, expert_stem
from training.merging.shards import DTYPES, Checkpoint, header_bytes
from training.model import mxfp4

Format = Literal["original", "bf16", "mxfp4"]

SHARD_BYTES = 4_900_000_000
"""Size of new shards: object stores take at most 5 GB in one request."""

Tensors = dict[str, tuple[str, tuple[int, ...], int]]
"""Name → dtype, shape, bytes."""


@dataclass(frozen=True)
class Layout:
    """The files of a model's weights."""

    headers: dict[str, bytes]
    """File → its first bytes."""
    places: dict[str, tuple[str, int]]
    """Tensor → file and offset in it, in the order of the bytes."""
    sizes: dict[str, int]
    """File → bytes."""

    @classmethod
    def of(cls, source: Checkpoint) -> "Layout":
        """The one that `source` has."""
        headers, sizes = {}, {}
        places: dict[str, tuple[str, int]] = {}
        for shard in source.shards:
            entries = source.shard_entries(shard)
            with (source.directory / shard).open("rb") as file:
                headers[shard] = file.read(entries[0].start)
            sizes[shard] = entries[-1].end
            places |= {entry.name: (shard, entry.start) for entry in entries}
        return cls(headers, places, sizes)

    @classmethod
    def new(cls, tensors: Tensors) -> "Layout":
        """Shards of at most `SHARD_BYTES`, in the order of `tensors`; a larger tensor gets a shard of its own."""
        groups: list[Tensors] = [{}]
        filled = 0
        for name, tensor in tensors.items():
            if groups[-1] and filled + tensor[2] > SHARD_BYTES:
                groups.append({})
                filled = 0
            groups[-1][name] = tensor
            filled += tensor[2]
        headers, sizes = {}, {}
        places: dict[str, tuple[str, int]] = {}
        for number, group in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            headers[file] = header_bytes(group)
            offset = len(headers[file])
            for name, (_, _, size) in group.items():
                places[name] = (file, offset)
                offset += size
            sizes[file] = offset
        return cls(headers, places, sizes)


@dataclass(frozen=True)
class Plan:
    """A new model: `source` with `updates` added, experts packed as MXFP4 or plain."""

    source: Checkpoint
    updates: dict[str, Update]
    packed: bool
    layout: Layout
    rewritten: frozenset[str]
    """Plain weights and expert stems whose values or form change."""

    @classmethod
    def make(cls, source: Checkpoint, updates: dict[str, Update], format: Format) -> "Plan":
        """Lays out the new model.

        Raises:
            MergeError: an unknown format, one that the model's shapes do not allow, or `original` for an adapter of
                MXFP4 experts.
        """
        was_packed = any(name.endswith("_blocks") for name in source.entries)
        if format not in ("original", "bf16", "mxfp4"):
            raise MergeError(f"format={format!r}: use original, bf16 or mxfp4", field="format")
        packed = {"original": was_packed, "bf16": False, "mxfp4": True}[format]
        adapted_experts = sum(update.experts is not None for update in updates.values())
        if format == "original" and was_packed and adapted_experts:
            raise MergeError(
                f"the adapter changes {adapted_experts} MXFP4 expert weights, which format=original would have to keep",
                hint="Merge with --format bf16 (nothing lost, 3.5 times as large) or --format mxfp4 (quantised again).",
                field="format",
            )
        same_form = packed == was_packed
        stems = {stem for name in source.entries if (stem := expert_stem(name))}
        if format == "mxfp4" and not stems:
            raise MergeError(f"{source.directory} has no gpt-oss experts to quantise", field="format")
        layout = Layout.of(source) if same_form else Layout.new(_tensors(source, packed))
        return cls(source, updates, packed, layout, frozenset(updates) | (set() if same_form else stems))

    @property
    def size(self) -> int:
        """Bytes of all new shards."""
        return sum(self.layout.sizes.values())

    @property
    def same_shards(self) -> bool:
        """Whether the new shards hold the same tensors at the same places as the source's."""
        return (
            tuple(self.layout.sizes) == self.source.shards and self.layout.places.keys() == self.source.entries.keys()
        )

    @property
    def copied(self) -> list[str]:
        """The tensors that are copied byte for byte."""
        return [name for name in self.layout.places if (expert_stem(name) or name) not in self.rewritten]

    @property
    def steps(self) -> list[str]:
        """Copied tensors and `rewritten`, in the order of the source's bytes."""
        entries = self.source.entries

        def position(name: str) -> tuple[str, int]:
            entry = entries[name] if name in entries else entries[f"{name}_blocks"]
            return entry.path.name, entry.start

        return sorted({*self.copied, *self.rewritten}, key=position)

    def size_of(self, step: str) -> int:
        """Bytes of a step's tensors in the new model."""
        if step not in self.rewritten or expert_stem(step) is None:
            return self.source.entries[step].size
        experts, out, inputs = expert_shape(self.source, step)
        plain = DTYPES[expert_dtype(self.source, step)].itemsize * inputs
        return experts * out * (inputs // 2 + inputs // mxfp4.BLOCK if self.packed else plain)


def _tensors(source: Checkpoint, packed: bool) -> Tensors:
    """The tensors of `source` in their order, with experts in the other form."""
    tensors: Tensors = {}
    for entry in (entry for shard in source.shards for entry in source.shard_entries(shard)):
        stem = expert_stem(entry.name)
        if stem is None:
            tensors[entry.name] = (entry.dtype, entry.shape, entry.size)
            continue
        experts, out, inputs = expert_shape(source, stem)
        if not packed:
            tensors[stem] = ("BF16", (experts, inputs, out), 2 * experts * out * inputs)
            continue
        if inputs % mxfp4.BLOCK:
            raise MergeError(f"{stem} has {inputs} inputs, which MXFP4's blocks of {mxfp4.BLOCK} do not divide")
        groups = inputs // mxfp4.BLOCK
        tensors[f"{stem}_blocks"] = ("U8", (experts, out, groups, mxfp4.BLOCK // 2), experts * out * inputs // 2)
        tensors[f"{stem}_scales"] = ("U8", (experts, out, groups), experts * out * groups)
    return tensors
