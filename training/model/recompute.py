"""Activation checkpointing of decoder layers: `full` keeps a layer's input, `selective` also what `keep` names, `none` all.

`selective` is torch's selective checkpointing without its dispatch mode, under which compiled code would run uncompiled: the
contexts of `torch.utils.checkpoint` hand kept tensors from a layer's forward to its recomputation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

from torch import Tensor, nn


def checkpoint_arguments(recompute: str) -> dict[str, Any] | None:
    """Arguments of `torch.utils.checkpoint.checkpoint` for `recompute`; None for `none`."""
    return {
        "none": None,
        "full": {"use_reentrant": False},
        "selective": {"use_reentrant": False, "context_fn": _contexts},
    }[recompute]


def recompute_of(model: nn.Module) -> str:
    """What `model`'s layers were set up to do."""
    functions = {
        getattr(module, "_gradient_checkpointing_func", None)
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
    }
    if not functions:
        return "none"
    selective = all(function and function.keywords.get("context_fn") is _contexts for function in functions)
    return "selective" if selective else "full"


def keep(compute: Callable[[], Tensor]) -> Tensor:
    """`compute()`; inside a selectively checkpointed layer its result is kept, and the recomputation takes it from there."""
    layer = _LAYER.get()
    if layer is None:
        return compute()
    if layer.again:
        return layer.kept.pop(0)
    value = compute()
    layer.kept.append(value)
    return value


class _Layer(AbstractContextManager["_Layer"]):
    """One pass of one layer: its forward, or, with `again`, its recomputation."""

    def __init__(self, kept: list[Tensor], again: bool):
        self.kept = kept
        self.again = again

    def __enter__(self) -> "_Layer":
        self._token: Token[_Layer | None] = _LAYER.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LAYER.reset(self._token)


_LAYER: ContextVar[_Layer | None] = ContextVar("layer", default=None)


def _contexts() -> tuple[_Layer, _Layer]:
    kept: list[Tensor] = []
    return _Layer(kept, again=False), _Layer(kept, again=True)
