"""safetensors checkpoints as byte ranges: headers, single tensors, checked copies. No file is ever loaded whole.

A shard is `<u64 header length><JSON header><tensor bytes>`; the header gives each tensor's dtype, shape and offsets.
Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from training.errors import ModelError, StorageError

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
"""The dtypes of gpt-oss checkpoints; others are copied, never read as tensors."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

COPY_BYTES = 1 << 18
"""Bytes copied at once: small enough to stay in the processor's cache while they are hashed, written and read back."""

_STEP_BYTES = 16 << 20  # between two calls of `advance`, which cost as much as a copy
_SAMPLE_BYTES = 4096
_LARGEST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: bytes `start` to `end` of `path`, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """Rows `first` to `first + count` along the first dimension; all by default. Only these bytes are read.

        Returns:
            `[count, *shape[1:]]` in the tensor's own dtype, in memory of its own.

        Raises:
            ModelError: a dtype that gpt-oss checkpoints do not have.
        """
        if self.dtype not in DTYPES:
            raise ModelError(f"{self.name} in {self.path} has dtype {self.dtype}; known are {', '.join(DTYPES)}")
        rows = self.shape[0] if self.shape else 1
        count = rows - first if count is None else count
        row_bytes = self.size // rows if rows else 0
        data = bytearray(count * row_bytes)
        with self.path.open("rb") as file:
            file.seek(self.start + first * row_bytes)
            file.readinto(data)
        shape = (count, *self.shape[1:]) if self.shape else ()
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).view(shape) if data else torch.empty(shape)

    def xxh128(self) -> str:
        """XXH3 of the tensor's bytes, 128 bits: it finds damage as surely as SHA-256 does, at fourteen times the speed."""
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                piece = file.read(min(left, COPY_BYTES))
                digest.update(piece)
                left -= len(piece)
        return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors shards, seen through its headers."""

    directory: Path
    entries: dict[str, Entry]
    shards: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Reads the headers of all shards.

        Raises:
            ModelError: no weights, a missing or truncated shard, or an index that does not say what the shards hold.
        """
        directory = Path(directory)
        weight_map = _weight_map(directory)
        shards = tuple(sorted(set(weight_map.values()))) if weight_map is not None else (SINGLE,)
        entries: dict[str, Entry] = {}
        for shard in shards:
            entries |= {entry.name: entry for entry in read_header(directory / shard)}
        if weight_map is not None:
            found = {name: entry.path.name for name, entry in entries.items()}
            wrong = sorted(name for name in weight_map | found if weight_map.get(name) != found.get(name))
            if wrong:
                raise ModelError(
                    f"{directory / INDEX} and its shards disagree about {len(wrong)} tensors, such as {wrong[0]}",
                    hint="The download is incomplete or mixed; fetch the model again.",
                )
        return cls(directory, entries, shards)

    def shard_entries(self, shard: str) -> list[Entry]:
        """The tensors of one shard, in the order of their bytes."""
        return sorted((e for e in self.entries.values() if e.path.name == shard), key=lambda entry: entry.start)

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum((self.directory / shard).stat().st_size for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every tensor's name, dtype, shape and a sample of its bytes: tells a base from its fine-tuned
        siblings in a second, however large. Independent of sharding and of the directory's name."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            with entry.path.open("rb") as file:
                file.seek(entry.start + max(0, entry.size - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(entry.size, _SAMPLE_BYTES)))
        return digest.hexdigest()


def _weight_map(directory: Path) -> dict[str, str] | None:
    """The index's tensor → shard mapping, or None for an unsharded checkpoint."""
    if (directory / INDEX).is_file():
        try:
            weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{directory / INDEX} is not a safetensors index: {error!r}") from None
        outside = [shard for shard in weight_map.values() if Path(shard).name != shard]
        if outside:
            raise ModelError(f"{directory / INDEX} names {outside[0]!r}, which is not a file of the same directory")
        return weight_map
    if (directory / SINGLE).is_file():
        return None
    raise ModelError(
        f"{directory} holds no safetensors weights: neither {INDEX} nor {SINGLE} is there",
        hint="Give the directory of the model itself, with config.json and *.safetensors.",
    )


def read_header(path: Path) -> list[Entry]:
    """The tensors of one safetensors file.

    Raises:
        ModelError: the file is missing, not safetensors, or shorter or longer than its header says.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        entries = [
            Entry(
                name,
                item["dtype"],
                tuple(item["shape"]),
                path,
                *(8 + length + offset for offset in item["data_offsets"]),
            )
            for name, item in header.items()
            if name != "__metadata__"
        ]
    except FileNotFoundError:
        raise ModelError(f"shard {path} is missing", hint="Fetch the model again.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from None
    end = max((entry.end for entry in entries), default=8 + length)
    if size != end:
        raise ModelError(f"{path} has {size:,} bytes where its header says {end:,}", hint="Fetch the model again.")
    return entries


def header_bytes(tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The start of a safetensors file that holds `tensors` (name → dtype, shape, bytes) in that order, 8-byte aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_checked(source: int, target: int, start: int, size: int, to: int, advance: Callable[[int], None]) -> str:
    """Copies `size` bytes at `start` of file descriptor `source` to offset `to` of `target`, and reads each piece back.

    Args:
        advance: called with the bytes copied since, every few MB.

    Returns:
        their XXH3, as `Entry.xxh128`.

    Raises:
        ModelError: the source became shorter.
        StorageError: the target's file system gives back other bytes than it was given.
    """
    digest = xxhash.xxh3_128()
    piece, back = bytearray(COPY_BYTES), bytearray(COPY_BYTES)
    told = 0
    for done in range(0, size, COPY_BYTES):
        count = min(COPY_BYTES, size - done)
        if count < COPY_BYTES:
            piece, back = bytearray(count), bytearray(count)
        if os.preadv(source, [piece], start + done) != count:
            raise ModelError("a shard became shorter while it was being copied", hint="Fetch the model again.")
        digest.update(piece)
        write_at(target, piece, to + done)
        if os.preadv(target, [back], to + done) != count or back != piece:
            raise StorageError("the disk gives back other bytes than were written", hint="Merge to another disk.")
        if done + count - told >= _STEP_BYTES or done + count == size:
            advance(done + count - told)
            forget(source, start + told, done + count - told)
            told = done + count
    return digest.hexdigest()


def forget(descriptor: int, start: int, size: int) -> None:
    """Bytes that are not needed again leave the page cache: a fifth of the time of a merge that is larger than memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def joint_xxh128(digests: dict[str, str]) -> str:
    """One XXH3 for many tensors, each given by name and XXH3: of the lines `NAME XXH128`, sorted."""
    return xxhash.xxh3_128("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def write_at(descriptor: int, data: bytearray | memoryview, offset: int) -> int:
    """All of `data` to `offset` of `descriptor`; one call of the kernel writes 2 GB at most."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
    return done
