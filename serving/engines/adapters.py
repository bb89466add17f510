"""Many LoRA adapters on one model: each row of a batch goes through the adapter of its own request, unmerged."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from serving.engines.engine import OverloadedError
from training.errors import ModelError

AdapterReader = Callable[[Path], dict[str, tuple[Tensor, Tensor]]]
"""From an adapter's directory to (A [r, in], scale * B [out, r]) by the name of the module it belongs to."""

NO_ADAPTER = 0
"""Slot whose adapter adds nothing."""


class AdapterBank:
    """Slots for adapters, stacked so that a batch picks one per row. The least recently used one leaves for a new one.

    Slots are taken and given back from any thread; the decoding thread reads only slots that are held.

    Args:
        model: its Linears in attention are wrapped, once.
        read: reads an adapter.
        capacity: adapters in memory.
        max_rank: largest rank; smaller ones are padded with zeros.
    """

    def __init__(self, model: PreTrainedModel, read: AdapterReader, *, capacity: int = 8, max_rank: int = 64):
        self._read = read
        self._max_rank = max_rank
        self._lock = threading.Lock()
        self._slots: OrderedDict[Path, int] = OrderedDict()  # least recently used first
        self._users = [0] * (capacity + 1)
        self._rows: Tensor | None = None
        self._modules = {
            name: AdaptedLinear(module, self)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".self_attn." in name
        }
        for name, module in self._modules.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module)

    @property
    def capacity(self) -> int:
        return len(self._users) - 1

    @property
    def rows(self) -> Tensor | None:
        """See `select`."""
        return self._rows

    def select(self, rows: Tensor | None) -> None:
        """The next forward pass is over rows whose adapters are in these slots, [B]; None when no row has one."""
        self._rows = rows

    def take(self, adapter: Path | None) -> int:
        """The slot of `adapter`, which stays there until it is given back. Blocks while an adapter is read.

        Raises:
            ModelError: not an adapter of this model, or of too large a rank.
            OverloadedError: every slot is in use.
        """
        if adapter is None:
            return NO_ADAPTER
        with self._lock:
            if adapter not in self._slots:
                slot = self._free_slot()
                self._load(adapter, slot)
                self._slots[adapter] = slot
            self._slots.move_to_end(adapter)
            self._users[self._slots[adapter]] += 1
            return self._slots[adapter]

    def give_back(self, slot: int) -> None:
        if slot != NO_ADAPTER:
            with self._lock:
                self._users[slot] -= 1

    def _free_slot(self) -> int:
        taken = set(self._slots.values())
        for slot in range(1, self.capacity + 1):
            if slot not in taken:
                return slot
        for adapter, slot in self._slots.items():
            if not self._users[slot]:
                del self._slots[adapter]
                return slot
        raise OverloadedError(f"all {self.capacity} places for adapters answer requests", hint="Try again shortly.")

    def _load(self, adapter: Path, slot: int) -> None:
        updates = self._read(adapter)
        strange = sorted(set(updates) - set(self._modules))
        if strange:
            raise served_merged_only(strange[0])
        rank = max(a.shape[0] for a, _ in updates.values())
        if rank > self._max_rank:
            raise ModelError(
                f"the adapter's rank of {rank} is over the {self._max_rank} served unmerged",
                hint="Ask for job:ID, its merged model, or raise generator.max_adapter_rank.",
                field="model",
            )
        for name, module in self._modules.items():
            module.set(slot, updates.get(name), self.capacity + 1, self._max_rank)


class AdaptedLinear(nn.Module):
    """A Linear with an adapter per row of the batch: `x W^T + b + (x A^T) B^T`, with A and B of the row's slot."""

    def __init__(self, linear: nn.Linear, bank: AdapterBank):
        super().__init__()
        self.linear = linear
        self._bank = [bank]  # in a list: not a submodule
        self._a: Tensor | None = None  # [slots, rank, in]
        self._b: Tensor | None = None  # [slots, out, rank], times the adapter's scale

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in] → [B, T, out]."""
        y = self.linear(x)
        rows = self._bank[0].rows
        if rows is None or self._a is None or self._b is None:
            return y
        return y + (x @ self._a[rows].transpose(1, 2)) @ self._b[rows].transpose(1, 2)

    def set(self, slot: int, update: tuple[Tensor, Tensor] | None, slots: int, max_rank: int) -> None:
        """Puts an adapter's A and B into `slot`; None, for a module that the adapter leaves as it is, zeros."""
        weight = self.linear.weight
        if self._a is None or self._b is None:
            self._a = weight.new_zeros(slots, max_rank, weight.shape[1])
            self._b = weight.new_zeros(slots, weight.shape[0], max_rank)
        self._a[slot] = 0
        self._b[slot] = 0
        if update:
            a, b = update
            self._a[slot, : a.shape[0]] = a
            self._b[slot, :, : b.shape[1]] = b


def served_merged_only(module: str) -> ModelError:
    return ModelError(
        f"the adapter changes {module}, which can only be served merged",
        hint="Ask for job:ID, its merged model.",
        field="model",
    )
