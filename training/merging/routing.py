"""Which experts each token went to: noted in one pass over a model, repeated in another.

Two models that differ by rounding alone send a token whose router is nearly tied to different experts. Their answers then
differ a thousand times more than rounding makes them elsewhere, and neither is wrong. With the choices held, rounding is
all that is left to compare.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROUTER = "mlp.router"  # gpt-oss's; models without one have no choices to hold


class Routing:
    """The choices of one pass: for each layer the experts `[tokens, k]` of every call, in the order of the calls."""

    def __init__(self) -> None:
        self._calls: dict[str, deque[Tensor]] = defaultdict(deque)
        self._choices = self._changed = 0

    @contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Keeps what `model` chooses meanwhile."""

        def note(layer: str, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._calls[layer].append(output[2])

        with _hooked(model, note):
            yield

    @contextmanager
    def repeated(self, model: nn.Module) -> Iterator[None]:
        """Gives the tokens of `model` the noted experts, weighted by its own router; the calls must be the same."""

        def repeat(layer: str, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, own = output
            experts = self._calls[layer].popleft()
            self._choices += len(own)
            self._changed += int((own.sort(-1).values != experts.sort(-1).values).any(-1).sum())
            return logits, torch.softmax(logits.gather(-1, experts), -1, dtype=logits.dtype), experts

        with _hooked(model, repeat):
            yield

    @property
    def changed_share(self) -> float | None:
        """Of the repeated choices, those that the model itself would have made otherwise; None for a model without routers."""
        return self._changed / self._choices if self._choices else None


@contextmanager
def _hooked(model: nn.Module, hook: Callable[[str, Any], Any]) -> Iterator[None]:
    routers = [module for name, module in model.named_modules() if name.endswith(_ROUTER)]
    handles = [
        router.register_forward_hook(lambda _, __, output, layer=str(layer): hook(layer, output))
        for layer, router in enumerate(routers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
