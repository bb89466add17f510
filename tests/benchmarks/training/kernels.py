"""Where an expert layer's time goes: each part alone, with its rate, at one forward pass's tokens; the candidates side by side."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.training.checkpoint import SHAPES
from training.model import kernels
from training.model.experts import Frozen, PackedExperts, Routing
from training.model.loss import cross_entropy

REPEATS = 20


def profile(shape: str, device: str, tokens: int) -> list[dict[str, Any]]:
    """Milliseconds of every part, with TFLOP/s of products and GB/s of the others."""
    layer = _Layer(shape, device, tokens)
    parts = layer.parts() | layer.products() | layer.passes() | {"loss: one pass, trained tokens": layer.loss()}
    lines = [_timed(name, *part, device) for name, part in parts.items()]
    return [*lines, *(layer.fused() if device == "cuda" else [])]


def profile_table(lines: list[dict[str, Any]]) -> str:
    """One line a part."""
    shown = [f"{'part':38}{'ms':>10}{'TFLOP/s':>10}{'GB/s':>10}"]
    for line in lines:
        rates = "".join(f"{line[key]:10.1f}" if key in line else " " * 10 for key in ("tflop_per_s", "gb_per_s"))
        shown.append(f"{line['part']:38}{line['ms']:10.3f}{rates}")
    return "\n".join(shown)


Part = tuple[Callable[[], Any], float, float]
"""What to run, its FLOPs, and the bytes it reads and writes; 0 where a rate says nothing."""


class _Layer:
    """One packed expert layer of random bytes, and rows on their way through it."""

    def __init__(self, shape: str, device: str, tokens: int):
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_experts_per_tok": 2, "vocab_size": 512} | SHAPES[
            shape
        ]
        self.experts = random_experts(SimpleNamespace(**sizes), device)
        self.dtype = torch.bfloat16
        self.k, self.vocab = sizes["num_experts_per_tok"], sizes["vocab_size"]
        H, F, E = self.experts.hidden_size, self.experts.intermediate_size, self.experts.num_experts
        self.hidden = torch.randn(tokens, H, device=device, dtype=self.dtype)
        scores, self.indices = torch.randn(tokens, E, device=device).topk(self.k, dim=-1)
        self.weights = scores.softmax(-1).to(self.dtype)
        self.routing = Routing.of(self.indices, E)
        self.up = Frozen(*(getattr(self.experts, f"gate_up_proj_{part}") for part in Frozen._fields))
        self.down = Frozen(*(getattr(self.experts, f"down_proj_{part}") for part in Frozen._fields))
        self.up_dense, self.down_dense = self.up.dense(H, self.dtype), self.down.dense(F, self.dtype)
        self.rows = kernels.dispatch(self.hidden, self.routing.place, self.k)
        self.gate_up = kernels.grouped_mm(self.rows, self.up_dense.mT, self.routing.offsets)
        self.activated = kernels.activate(self.gate_up, self.up.bias, self.routing.chosen, self.experts.limit)
        self.output = kernels.grouped_mm(self.activated, self.down_dense.mT, self.routing.offsets)
        self.up_flops, self.down_flops = 4.0 * len(self.rows) * H * F, 2.0 * len(self.rows) * H * F

    def parts(self) -> dict[str, Part]:
        routing, limit, k = self.routing, self.experts.limit, self.k
        row_weights = self.weights.flatten()[routing.order]
        size = self.rows.nbytes
        grad = (self.activated, self.gate_up.clone(), self.up.bias, routing.chosen, row_weights, limit)
        down_bias, slots = self.down.bias, self.indices.flatten()
        H, F = self.experts.hidden_size, self.experts.intermediate_size
        return {
            "sort and search": (lambda: Routing.of(self.indices, self.experts.num_experts), 0, 0),
            "dispatch": (lambda: kernels.dispatch(self.hidden, routing.place, k), 0, size * (1 + 1 / k)),
            "torch's own": (lambda: self.hidden[routing.order // k], 0, size * (1 + 1 / k)),
            "dequantise gate_up": (lambda: self.up.dense(H, self.dtype), 0, self.up_dense.nbytes * 1.27),
            "dequantise down": (lambda: self.down.dense(F, self.dtype), 0, self.down_dense.nbytes * 1.27),
            "activate": (lambda: kernels.activate(*grad[1:4], limit), 0, self.gate_up.nbytes * 1.5),
            "activate, backward": (lambda: kernels.activate_backward(*grad), 0, self.gate_up.nbytes * 2.5),
            "combine": (
                lambda: kernels.combine(self.output, routing.place, k, self.weights.flatten(), down_bias, slots),
                0,
                size * (1 + 1 / k),
            ),
            "combine, backward": (
                lambda: kernels.combine(self.output, routing.place, k, None, None, None), 0, size * (1 + 1 / k)
            ),
            "candidate A: dequantise, grouped_mm": (lambda: self._mm(self.rows, self.up.dense(H, self.dtype).mT), self.up_flops, 0),
        }  # fmt: skip

    def products(self) -> dict[str, Part]:
        """Of all experts at once, and of each by itself."""
        cases = {
            "gate_up": (self.rows, self.up_dense.mT, self.up_flops),
            "down": (self.activated, self.down_dense.mT, self.down_flops),
            "gate_up, backward": (self.gate_up, self.up_dense, self.up_flops),
            "down, backward": (self.rows, self.down_dense, self.down_flops),
        }
        ways = {"grouped_mm": None, "apart": self.routing.offsets.tolist()}
        return {
            f"{way} {name}": (partial(kernels.grouped_mm, x, weight, self.routing.offsets, ends), flops, 0)
            for way, ends in ways.items()
            for name, (x, weight, flops) in cases.items()
        }

    def passes(self) -> dict[str, Part]:
        """The layer as it trains."""
        flops = self.up_flops + self.down_flops
        hidden, grad = self.hidden.clone().requires_grad_(), torch.randn_like(self.hidden)

        def forward() -> Tensor:
            return self.experts(hidden, self.indices, self.weights)

        return {
            "layer, forward": (torch.no_grad()(forward), flops, 0),
            "layer, forward and backward": (lambda: torch.autograd.grad(forward(), hidden, grad), 2 * flops, 0),
        }

    def loss(self) -> Part:
        head = torch.randn(self.vocab, self.experts.hidden_size, device=self.hidden.device, dtype=self.dtype)
        hidden = self.hidden.clone().requires_grad_()
        positions = torch.arange(len(hidden), device=head.device)
        targets = torch.randint(self.vocab, (len(hidden),), device=head.device)
        flops = 4.0 * hidden.numel() * self.vocab

        def run() -> Any:
            return torch.autograd.grad(cross_entropy(hidden, head, positions, targets).loss, hidden)

        return run, flops, 0

    def fused(self) -> list[dict[str, Any]]:
        """The candidate that reads MXFP4 itself, with its best tile, checked before it is timed."""
        from tests.benchmarks.training.fused import TILES, fused_mm

        offsets, H, F = self.routing.offsets, self.experts.hidden_size, self.experts.intermediate_size
        cases = {
            "gate_up": (self.rows, self.up, H, True, self.gate_up, self.up_flops),
            "down": (self.activated, self.down, F, True, self.output, self.down_flops),
            "gate_up, backward": (self.gate_up, self.up, H, False, self._mm(self.gate_up, self.up_dense), self.up_flops),
            "down, backward": (self.rows, self.down, F, False, self._mm(self.rows, self.down_dense), self.down_flops),
        }  # fmt: skip
        lines = []
        for name, (x, weight, columns, transposed, expected, flops) in cases.items():
            found: list[dict[str, Any]] = []
            for tile in TILES:
                run = partial(fused_mm, x, weight, columns, offsets, transposed=transposed, tile=tile)
                try:
                    wrong = (run() - expected).float().norm() / expected.float().norm()
                    found.append(_timed(f"candidate B: fused {name}", run, flops, 0, "cuda"))
                except Exception as error:  # a tile that does not fit the card; Triton has a class for each reason
                    print(f"candidate B: {name}, {tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    continue
                found[-1] |= {"tile": tile._asdict(), "error": wrong.item()}
            lines += sorted(found, key=lambda line: line["ms"])[:1]
        return lines

    def _mm(self, x: Tensor, weight: Tensor) -> Tensor:
        return kernels.grouped_mm(x, weight, self.routing.offsets)


def random_experts(
    sizes: Any, device: str, scales: tuple[int, int] = (117, 121), bias_std: float = 0.1
) -> PackedExperts:
    """A packed layer of random bytes, its scale bytes from `scales` (127 is 1; these are near 1 / 512), the last excluded."""
    with torch.device(device):
        experts = PackedExperts(sizes)
    for name, parameter in experts.named_parameters():
        if name.endswith("_blocks"):
            parameter.data.view(torch.uint8).random_(0, 256)
        elif name.endswith("_scales"):
            parameter.data.view(torch.uint8).random_(*scales)
        else:
            parameter.data.normal_(std=bias_std)
    return experts


def _timed(name: str, run: Callable[[], Any], flops: float, moved: float, device: str) -> dict[str, Any]:
    for _ in range(3):
        run()
    ms = median(_gpu_times_ms(run) if device == "cuda" else _cpu_times_ms(run))
    line: dict[str, Any] = {"part": name, "ms": ms}
    if flops:
        line["tflop_per_s"] = flops / ms / 1e9
    if moved:
        line["gb_per_s"] = moved / ms / 1e6
    return line


def _gpu_times_ms(run: Callable[[], Any]) -> list[float]:
    """Between events on the GPU, the L2 cache emptied before each."""
    cache = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in events:
        cache.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _cpu_times_ms(run: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return times
