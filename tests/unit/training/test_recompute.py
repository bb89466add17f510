"""What a checkpointed layer keeps, also when its forward is compiled."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.config import LoraConfig
from training.model.load import decoder_layers, load
from training.model.lora import attach
from training.model.recompute import checkpoint_arguments, keep

IDS = torch.arange(40).view(2, 20) * 7 % 500


class Counting(nn.Module):
    """Computes something dear, and something on top of it; counts both."""

    def __init__(self) -> None:
        super().__init__()
        self.dear, self.rest = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        def compute() -> Tensor:
            self.dear += 1
            return 3 * x.detach()

        factor = keep(compute)
        self.rest += 1
        return (x * factor).sin()


@pytest.mark.parametrize(("recompute", "dear"), [("full", 2), ("selective", 1)])
def test_what_is_kept_is_computed_once(recompute: str, dear: int) -> None:
    layers = [Counting(), Counting()]
    x = torch.randn(5, requires_grad=True)
    y = x
    for layer in layers:
        y = checkpoint(layer, y, **checkpoint_arguments(recompute))
    y.sum().backward()
    assert [(layer.dear, layer.rest) for layer in layers] == [(dear, 2)] * 2
    plain = x.detach().requires_grad_()
    Counting()(Counting()(plain)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain.grad)


def test_outside_of_a_checkpoint_nothing_is_kept() -> None:
    layer = Counting()
    layer(torch.ones(1))
    layer(torch.ones(1))
    assert layer.dear == 2
    assert checkpoint_arguments("none") is None


def gradients(base: Path, recompute: str, compiled: bool) -> Tensor:
    torch.manual_seed(0)
    model = attach(load(base, weights="mxfp4"), LoraConfig(r=4, targets="attention+experts"), "base").train()
    for value in model.parameters():
        if value.requires_grad:
            value.data.normal_(std=0.05)
    if compiled:
        for layer in decoder_layers(model):
            layer.forward = torch.compile(layer.forward, dynamic=False, backend="aot_eager")  # type: ignore[method-assign]
    if recompute != "none":
        model.gradient_checkpointing_enable(checkpoint_arguments(recompute))
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])


# torch looks at `.grad` while it compiles, and hides its own warning in a way that "error" precedes
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_all_modes_are_equal_compiled_or_not(random_base: Path) -> None:
    expected = gradients(random_base, "none", compiled=False)
    for recompute in ("none", "full", "selective"):
        for compiled in (False, True):
            found = gradients(random_base, recompute, compiled)
            assert (found - expected).norm() < 1e-6 * expected.norm(), (recompute, compiled)
    torch._dynamo.reset()
