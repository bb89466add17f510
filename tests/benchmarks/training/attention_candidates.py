"""Candidates for a layer's attention, each checked against fp32 and timed: `python -m tests.benchmarks.training.attention_candidates`.

What trains now, flex attention and in sliding layers kernels of our own, beside ones that know no sinks: torch's FlashAttention-2 and cuDNN's. `WithSinks` gives them some.
On a CPU (`--device cpu --rows 1 --length 256`) torch's own flash kernel stands in for them, which proves the arithmetic.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.benchmarks.training.kernels import _cpu_times_ms, _gpu_times_ms
from training.model.attention import attend, install_attention
from training.rows.packing import _masks

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 64, 8, 64, 128
TOLERANCE = 1e-2
"""Relative error, by norms, that bf16 is allowed."""

aten: Any = torch.ops.aten


class Kernel(NamedTuple):
    """Attention without sinks, causal. Tensors are `[B, heads, T, D]`, keys and values of all heads or of fewer; lse `[B, heads, T]`."""

    forward: Callable[..., tuple[Tensor, Tensor, tuple[Tensor | None, ...]]]
    """From query, key, value, scale and window: output, lse (natural, fp32), and what the backward wants besides."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """From the output's gradient, query, key, value, output, lse, that, scale and window: gradients of query, key and value."""


class WithSinks(torch.autograd.Function):
    """`kernel` with sinks `[heads]`, which get no gradient: `[B, heads, T, D]`.

    A sink takes `exp(sink - total)` of the softmax, where `total = logaddexp(lse, sink)`, and gives nothing: the output shrinks by
    `exp(lse - total)`. The kernel's backward makes probabilities as `exp(score - lse)` and, of output and its gradient, the sum over
    keys that a softmax's gradient subtracts. Given `total` and the shrunk output, both are right with the sink in them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        kernel: Kernel,
        scale: float,
        window: int | None,
    ) -> Tensor:
        output, lse, rest = kernel.forward(query, key, value, scale, window)
        total = torch.logaddexp(lse, sinks.float()[:, None])
        output = (output * torch.exp(lse - total)[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total, *rest)
        ctx.kernel, ctx.scale, ctx.window = kernel, scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total, *rest = ctx.saved_tensors
        found = ctx.kernel.backward(gradients[0], query, key, value, output, total, tuple(rest), ctx.scale, ctx.window)
        return *found, None, None, None, None


def _flash2_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Any:
    length, before = query.shape[2], None if window is None else window - 1
    rows = (x.transpose(1, 2) for x in (query, key, value))
    output, lse, *rest, _ = aten._flash_attention_forward(
        *rows, None, None, length, length, 0.0, True, False, scale=scale, window_size_left=before,
        window_size_right=None if window is None else 0,
    )  # fmt: skip
    return output.transpose(1, 2), lse, tuple(rest)


def _flash2_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, rest: Any, scale: float,
    window: int | None,
) -> Any:  # fmt: skip
    length, before = query.shape[2], None if window is None else window - 1
    rows = (x.transpose(1, 2) for x in (grad, query, key, value, output))
    found = aten._flash_attention_backward(
        *rows, lse, None, None, length, length, 0.0, True, *rest, scale=scale, window_size_left=before,
        window_size_right=None if window is None else 0,
    )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in found)


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Any:
    assert window is None, "torch does not hand a window to cuDNN"
    output, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return (
        output,
        lse.view(query.shape[:3]),
        (seed, offset, lse),
    )  # the last for its shape, which differs between versions


def _cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, rest: Any, scale: float,
    window: int | None,
) -> Any:  # fmt: skip
    (seed, offset, shaped), length = rest, query.shape[2]
    # torch keeps cuDNN's plans by the strides of query, key and value alone
    grad, output = (x if x.stride() == query.stride() else torch.empty_like(query).copy_(x) for x in (grad, output))
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, output, lse.view_as(shaped), seed, offset, None, None, None, length, length, 0.0, True,
        scale=scale,
    )  # fmt: skip


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Any:
    mask = _window_mask(query, window)
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return output, lse, ()


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, rest: Any, scale: float,
    window: int | None,
) -> Any:  # fmt: skip
    mask = _window_mask(query, window)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    if window is None:
        return None
    return _seen(query.shape[2], window, query.device).to(query.dtype).log()  # 0 where it sees, -inf elsewhere


FLASH2, CUDNN = Kernel(_flash2_forward, _flash2_backward), Kernel(_cudnn_forward, _cudnn_backward)
CPU = Kernel(_cpu_forward, _cpu_backward)


class Layer:
    """One layer's queries, keys and values after rotation, as its products leave them: `[B, T, heads, D]` in memory.

    Args:
        window: tokens that it sees; None is all before.
    """

    def __init__(self, rows: int, length: int, window: int | None, device: str):
        torch.manual_seed(0)
        self.window, self.scale = window, HEAD_DIM**-0.5
        self.query, self.key, self.value, self.grad = (
            torch.randn(rows, length, heads, HEAD_DIM, device=device, dtype=torch.bfloat16).transpose(1, 2)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        self.sinks = torch.randn(HEADS, device=device, dtype=torch.bfloat16) + 2
        for tensor in (self.query, self.key, self.value):
            tensor.requires_grad_()
        pairs = length * (length + 1) / 2 if window is None else window * length - window * (window - 1) / 2
        self.flops = 4.0 * rows * HEADS * HEAD_DIM * pairs

    def candidates(self) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """From query, key and value to `[B, heads, T, D]`."""
        if not self.query.is_cuda:
            return {"torch's flash on CPU, keys repeated": partial(self._by_kernel, CPU, True)}
        found: dict[str, Any] = {
            "ours: flex": self._ours(bare=False),
            "flash 2": partial(self._by_kernel, FLASH2, False),
            "flash 2, keys repeated": partial(self._by_kernel, FLASH2, True),
        }
        if self.window is not None:
            found["ours: windows"] = self._ours(bare=True)
        else:
            found |= {
                "cuDNN": partial(self._by_kernel, CUDNN, False),
                "cuDNN, keys repeated": partial(self._by_kernel, CUDNN, True),
            }
        return found

    def reference(self) -> list[Tensor]:
        """Of the first row, in fp32: output and gradients of query, key and value."""
        query, key, value = (x[:1].detach().float().requires_grad_() for x in (self.query, self.key, self.value))
        scores = query @ _repeated(key).mT * self.scale
        scores = scores.masked_fill(~_seen(scores.shape[-1], self.window, scores.device), float("-inf"))
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        output = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ _repeated(value)
        return [output.detach(), *torch.autograd.grad(output, (query, key, value), self.grad[:1].float())]

    def run(self, candidate: Callable[..., Tensor]) -> list[Tensor]:
        """Output and gradients of query, key and value."""
        output = candidate(self.query, self.key, self.value)
        return [output, *torch.autograd.grad(output, (self.query, self.key, self.value), self.grad)]

    def _ours(self, *, bare: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        install_attention()
        masks = _masks(self.query.shape[2], WINDOW, True, torch.bfloat16, self.query.device, None, bare)
        mask = masks["full_attention" if self.window is None else "sliding_attention"]

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            module: Any = None
            return attend(
                module, query, key, value, mask, scaling=self.scale, s_aux=self.sinks, sliding_window=self.window
            )[0].transpose(1, 2)

        return run

    def _by_kernel(self, kernel: Kernel, repeat: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (_repeated(key), _repeated(value)) if repeat else (key, value)
        output: Tensor = WithSinks.apply(query, key, value, self.sinks, kernel, self.scale, self.window)
        return output


def measure(layer: Layer, name: str, candidate: Callable[..., Tensor], reference: list[Tensor]) -> dict[str, Any]:
    """Errors and milliseconds of one candidate."""
    found = layer.run(candidate)
    errors = [
        ((one[:1].float() - other).norm() / other.norm()).item() for one, other in zip(found, reference, strict=True)
    ]
    times = _gpu_times_ms if layer.query.is_cuda else _cpu_times_ms
    forward_ms = median(times(lambda: candidate(layer.query, layer.key, layer.value)))
    backward_ms = median(times(lambda: layer.run(candidate))) - forward_ms
    return {
        "layer": "full" if layer.window is None else "sliding",
        "candidate": name,
        "right": all(error < TOLERANCE for error in errors),  # not so for one that is NaN
        "errors": dict(zip(("output", "query", "key", "value"), errors, strict=True)),
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_tflop_per_s": layer.flops / forward_ms / 1e9,
        "backward_tflop_per_s": 2.5 * layer.flops / backward_ms / 1e9,
    }


def compare(rows: int, length: int, device: str, ways: tuple[str, ...] = ("eager", "compiled")) -> list[dict[str, Any]]:
    """Every candidate of both kinds of layer, called as it is and compiled as layers are; one that fails is told and left out."""
    lines = []
    for window in (None, WINDOW):
        layer = Layer(rows, length, window, device)
        reference = layer.reference()
        for name, candidate in layer.candidates().items():
            for way in ways:
                torch.compiler.reset()  # past so many versions of one function dynamo would run it as it is
                try:
                    run = torch.compile(candidate) if way == "compiled" else candidate
                    lines.append(measure(layer, f"{name}, {way}", run, reference))
                except Exception as error:  # an op that this torch does not have, or refuses
                    print(f"FAILED: {name}, {way}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                print(_shown(lines[-1]), flush=True)
    return lines


def _shown(line: dict[str, Any]) -> str:
    errors = " ".join(f"{name} {error:.1e}" for name, error in line["errors"].items())
    return (
        f"{line['layer']:8}{line['candidate']:46}{'right' if line['right'] else 'WRONG':5}"
        f" forward {line['forward_ms']:8.3f} ms {line['forward_tflop_per_s']:6.0f} TFLOP/s"
        f"  backward {line['backward_ms']:8.3f} ms {line['backward_tflop_per_s']:6.0f} TFLOP/s  {errors}"
    )


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """`[T, T]` whether a query (first) sees a key."""
    apart = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (apart >= 0) & (apart < (window or length))


def _repeated(x: Tensor) -> Tensor:
    """Keys or values of every head."""
    return x.repeat_interleave(HEADS // x.shape[1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ways", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--out", type=Path, help="write the lines there as JSON")
    arguments = parser.parse_args()
    lines = compare(arguments.rows, arguments.length, arguments.device, tuple(arguments.ways))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
