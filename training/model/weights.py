"""Tensors of a checkpoint, read one at a time, whole or by rank, in the form that a parameter has."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from training.errors import ModelError
from training.model.experts import pack
from training.model.mxfp4 import dequantize, quantize


class InexactError(ModelError):
    """The model's experts cannot be packed as they are: none, or values that MXFP4 does not have."""


class WeightReader:
    """Tensors of a directory of safetensors shards, read one at a time, whole or by rank."""

    def __init__(self, directory: Path):
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(directory / "model.safetensors", framework="pt") as shard_file:
                files = dict.fromkeys(shard_file.keys(), "model.safetensors")
        self._directory = directory
        self._files = files
        self._open: dict[str, Any] = {}
        self._packed: tuple[str, slice, dict[str, Tensor]] | None = None
        self.unread = set(files)

    def parameter(self, name: str, like: nn.Parameter, dtype: torch.dtype, device: str) -> Tensor:
        """The value of parameter `name` in the form of `like` (plain or sharded, packed or not) on `device`.

        Raises:
            ModelError: it is not in the checkpoint, or of another shape.
        """
        if isinstance(like, DTensor):
            start, length = _own_rows(like)
            local = self._value(name, slice(start, start + length), like.shape, dtype, device).to(device)
            return DTensor.from_local(
                local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
        return self._value(name, slice(None), like.shape, dtype, device).to(device)

    def _value(self, name: str, rows: slice, shape: torch.Size, dtype: torch.dtype, device: str) -> Tensor:
        """Rows of a parameter `name` of full `shape`: experts are packed, or dequantised on `device`, as the name asks."""
        if name.endswith(("_blocks", "_scales")):
            value = pack(self._rows(name, rows) if name in self._files else self._quantized(name, rows))
        elif name in self._files:
            value = self._rows(name, rows).to(dtype)
        elif f"{name}_blocks" in self._files:
            blocks, scales = self._rows(f"{name}_blocks", rows), self._rows(f"{name}_scales", rows)
            if blocks.shape != (*scales.shape, 16):
                raise ModelError(
                    f"{self._directory}: {name} has blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)}"
                )
            value = _dequantized(blocks.to(device), scales.to(device), dtype)
        else:
            raise ModelError(f"{self._directory} lacks the weight {name}", hint="The checkpoint is incomplete.")
        if value.shape[1:] != shape[1:] or (rows == slice(None) and value.shape != shape):
            raise ModelError(f"{self._directory}: {name} has shape {tuple(value.shape)}, not {tuple(shape)}")
        return value

    def _quantized(self, name: str, rows: slice) -> Tensor:
        """Blocks or scales of an expert weight that is stored in bf16.

        Raises:
            InexactError: MXFP4 does not hold its values exactly.
        """
        stem, part = name[: -len("_blocks")], name[-len("blocks") :]
        if self._packed is None or self._packed[:2] != (stem, rows):  # the other half was asked for just before
            experts = [self._quantized_exactly(stem, weight.mT) for weight in self._rows(stem, rows)]
            blocks, scales = (torch.stack(part) for part in zip(*experts, strict=True))
            self._packed = (stem, rows, {"blocks": blocks, "scales": scales})
        return self._packed[2][part]

    def _quantized_exactly(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        blocks, scales = quantize(weight)
        if not torch.equal(dequantize(blocks, scales, dtype=weight.dtype), weight):
            raise InexactError(
                f"{self._directory}: {name} has values that MXFP4 does not hold exactly",
                hint="Set weights=bf16 for this model.",
                field="weights",
            )
        return blocks, scales

    def _rows(self, name: str, rows: slice) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._directory} lacks the weight {name}", hint="The checkpoint is incomplete.")
        if file not in self._open:
            self._open[file] = safe_open(self._directory / file, framework="pt")
        self.unread.discard(name)
        return self._open[file].get_slice(name)[rows]


def _dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[E, in, out]` from blocks `[E, out, in/32, 16]`, an expert at a time, since one takes several times its size on the way."""
    experts, out, groups, half = blocks.shape
    value = torch.empty(experts, groups * 2 * half, out, dtype=dtype, device=blocks.device)
    for expert in range(experts):
        value[expert] = dequantize(blocks[expert], scales[expert], dtype=dtype).mT
    return value


def _own_rows(parameter: DTensor) -> tuple[int, int]:
    """First row and number of rows of this rank's shard along dimension 0."""
    mesh, placements = parameter.device_mesh, parameter.placements
    start, length = 0, parameter.shape[0]
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size, rank = mesh.size(dimension), mesh.get_local_rank(dimension)
            chunk = -(-length // size)
            own_start = min(rank * chunk, length)
            start, length = start + own_start, min(chunk, length - own_start)
    return start, length
