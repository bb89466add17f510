"""Keys and values of the sequences that run: one row each, rows without holes, written at each row's own position."""

from typing import Any

import torch
from torch import Tensor

LENGTH_STEP = 256  # the cache grows by doubling, from this many positions


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Memory of one position of one sequence, all layers together."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * _head_dim(config) * dtype.itemsize


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class KeyValueCache:
    """Stands in for transformers' `Cache` in a forward pass over a slice of rows.

    Shapes: R rows, H key-value heads, L positions, D head dimension, B rows of one forward, T new tokens per row.
    Padding tokens write at positions that no query sees before a real token has overwritten them.

    Args:
        max_tokens: most positions of all rows together.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, max_tokens: int):
        self._max_tokens = max_tokens
        empty = torch.empty(0, config.num_key_value_heads, 0, _head_dim(config), dtype=dtype, device=device)
        self._empty = [empty] * config.num_hidden_layers
        self.version = 0
        """Changes when keys and values move to other memory."""
        self.drop()

    def drop(self) -> None:
        """Forgets everything and gives the memory back. Allocates nothing: it is called where memory ran out."""
        self._keys, self._values = list(self._empty), list(self._empty)
        self.version += 1

    @property
    def rows(self) -> int:
        return self._keys[0].shape[0]

    @property
    def length(self) -> int:
        return self._keys[0].shape[2]

    def fits(self, rows: int, length: int) -> bool:
        return rows * length <= self._max_tokens

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` rows of `length` positions, which must fit; what is there stays."""
        if rows <= self.rows and length <= self.length:
            return
        rows, length = max(rows, self.rows), max(length, self.length)
        grown = doubled(rows, 1), doubled(length, LENGTH_STEP)
        if self.fits(*grown):
            rows, length = grown
        self._resize(rows, length)

    def trim(self, rows: int, length: int) -> None:
        """Gives room back: to rows that are many and short after one that was long, or the reverse."""
        if not self.fits(max(rows, self.rows), max(length, self.length)):
            self._resize(rows, length)

    def _resize(self, rows: int, length: int) -> None:
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                new = old.new_zeros(rows, old.shape[1], length, old.shape[3])  # zeros: 0 times a stray NaN is NaN
                kept = old[:rows, :, :length]
                new[: kept.shape[0], :, : kept.shape[2]] = kept
                store[layer] = new
        self.version += 1

    def focus(self, first_row: int, positions: Tensor, visible: int) -> None:
        """The next forward is over rows from `first_row` on, at `positions` [B, T], and sees `visible` positions."""
        self._rows = slice(first_row, first_row + positions.shape[0])
        self._row_index = torch.arange(first_row, self._rows.stop, device=positions.device)[:, None]  # [B, 1]
        self._positions = positions
        self._visible = visible

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new [B, H, T, D] and returns all that the rows may see, [B, H, visible, D]."""
        seen = []
        for store, new in ((self._keys[layer], keys), (self._values[layer], values)):
            store[self._row_index, :, self._positions] = new.transpose(1, 2)
            seen.append(store[self._rows, :, : self._visible])
        return seen[0], seen[1]

    def copy_row(self, source: int, target: int) -> None:
        for store in (*self._keys, *self._values):
            store[target] = store[source]

    def swap_rows(self, one: int, other: int) -> None:
        if one == other:
            return
        for store in (*self._keys, *self._values):
            store[[one, other]] = store[[other, one]]


def doubled(need: int, smallest: int) -> int:
    """The power of two times `smallest` that holds `need`."""
    size = smallest
    while size < need:
        size *= 2
    return size
