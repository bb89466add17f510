"""gpt-oss's experts while the adapters train: kept in MXFP4, or dense.

The base is frozen, so an expert layer needs no weight gradient: forward and backward each take a weight as it is, or dequantise it
into a scratch tensor, multiply, and drop that. Between them autograd holds the rows before the activation (`gate_up`), and nothing
else of size: the routing weights' gradient is `<W2ᵀ dy, activated>`, which the backward has at hand, instead of `<dy, output>`.

The layer is two autograd functions. All that the backward needs is known once `gate_up` is, so the first one saves it and the
second one computes the rest: a checkpointed layer, whose recomputation ends with the last saved tensor, leaves the rest out.

Shapes: T tokens, k experts per token, N = T * k rows sorted by expert, E experts, H hidden, F intermediate, r rank.
"""

from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from training.model import fused
from training.model.kernels import (
    activate,
    activate_backward,
    combine,
    dispatch,
    grouped_mm,
    grouped_outer,
    is_hopper,
    route,
    unpack,
)
from training.model.mxfp4 import BLOCK
from training.model.recompute import keep

WEIGHTS = ("gate_up_proj", "down_proj")
APART_FROM = 1.6e10
"""Multiplications an expert has on average from which a product of its own (cuBLAS) beats its part of a grouped one (CUTLASS) on an
H200: 1,024 rows by gpt-oss's `gate_up_proj`, 2,048 by `down_proj`. At 4,096 rows all four take 707 TFLOP/s, grouped 616; at 512 445 and 557."""
MANY_ROWS = 1024
"""Rows an expert has on average from which that may be so."""


class LowRank(NamedTuple):
    """An adapter of one expert weight: it adds `x @ a @ b` to the expert's product."""

    a: Tensor
    """`[E, in, r]`"""
    b: Tensor
    """`[E, r, out]`, scaled"""

    def of(self, experts: Tensor) -> Self:
        """The part of `experts` alone."""
        return type(self)(*(part[experts] for part in self))


class Frozen(NamedTuple):
    """A packed weight `[E, out, in]` and its bias `[E, out]`."""

    blocks: Tensor
    scales: Tensor
    bias: Tensor

    def of(self, experts: Tensor) -> Self:
        """The part of `experts` alone."""
        return type(self)(*(part[experts] for part in self))

    def dense(self, columns: int, dtype: torch.dtype) -> Tensor:
        """The weight dequantised, `columns` being its `in`."""
        return unpack(self.blocks, self.scales, columns, dtype)

    def product(self, x: Tensor, routing: "Routing") -> Tensor:
        """Each row of `x` `[N, in]` times its expert's weight: `[N, out]`."""
        if fused.suits(x, len(self.bias)):
            return fused.fused_mm(x, self.blocks, self.scales, self.bias.shape[1], routing.offsets)
        return routing.mm(x, self.dense(x.shape[1], x.dtype).mT)


class Dense(NamedTuple):
    """What `Frozen` is for a weight `[E, in, out]` that is not packed, with its bias `[E, out]`."""

    weight: Tensor
    bias: Tensor

    def of(self, experts: Tensor) -> Self:
        """The part of `experts` alone."""
        return type(self)(*(part[experts] for part in self))

    def dense(self, columns: int, dtype: torch.dtype) -> Tensor:
        """The weight as `[E, out, in]`."""
        return self.weight.mT.to(dtype)

    def product(self, x: Tensor, routing: "Routing") -> Tensor:
        """Each row of `x` `[N, in]` times its expert's weight: `[N, out]`."""
        return routing.mm(x, self.weight.to(x.dtype))


class Routing(NamedTuple):
    """Which row belongs to which token and expert."""

    order: Tensor
    """`[N]` slot `t * k + j` of each row"""
    place: Tensor
    """`[N]` row of each slot"""
    chosen: Tensor
    """`[N]` expert of each row, ascending"""
    offsets: Tensor
    """`[E]` int32, where each expert's rows end"""
    ends: "OnHost | None" = None
    """`offsets` on the host, where experts have many rows"""

    @classmethod
    def of(cls, indices: Tensor, experts: int) -> Self:
        """From the router's choice `[T, k]`."""
        routing = cls(*route(indices.flatten(), experts))
        many = indices.numel() >= MANY_ROWS * experts and is_hopper(indices.device)
        return routing._replace(ends=OnHost(routing.offsets)) if many else routing

    def mm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows `[N, in]` times their expert's `weight` `[E, in, out]`: `[N, out]`."""
        ends = self.ends if x.numel() * weight.shape[2] >= APART_FROM * len(weight) else None
        return grouped_mm(x, weight, self.offsets, ends.read() if ends else None)


class OnHost:
    """A CUDA tensor of integers on its way to the host: nothing waits for it before it is read, so what is launched until then runs."""

    def __init__(self, tensor: Tensor):
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        self._values: list[int] | None = None

    def read(self) -> list[int]:
        if self._values is None:
            self._copied.synchronize()
            self._values = self._copy.tolist()
        return self._values


class FrozenExperts(nn.Module):
    """Drop-in for transformers' `GptOssExperts`, whose weights take no gradient; subclasses hold them."""

    is_transposed = True  # transformers' word for weights that count as [E, in, out]; PEFT lays adapters out by it
    held: ClassVar[str]
    """Its name in the record of what really runs."""

    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(self, config: Any):
        super().__init__()
        self.num_experts: int = config.num_local_experts
        self.hidden_size: int = config.hidden_size
        self.intermediate_size: int = config.intermediate_size
        self.limit: float = getattr(config, "swiglu_limit", 7.0)
        for name in WEIGHTS:
            for part, shape in self._parts(*self.shape(name)).items():
                empty = torch.empty(*shape, dtype=torch.bfloat16)
                self.register_parameter(f"{name}{part}", nn.Parameter(empty, requires_grad=False))

    def shape(self, name: str) -> tuple[int, int, int]:
        """`(E, in, out)` of `gate_up_proj` or `down_proj`."""
        if name == "gate_up_proj":
            return self.num_experts, self.hidden_size, 2 * self.intermediate_size
        return self.num_experts, self.intermediate_size, self.hidden_size

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """The dequantised weight of `gate_up_proj` `[E, 2F, H]` or `down_proj` `[E, H, F]`."""
        return self._frozen(name).dense(self.shape(name)[1], dtype)

    @torch.compiler.disable
    def forward(
        self,
        hidden_states: Tensor,
        router_indices: Tensor,
        routing_weights: Tensor,
        gate_up_proj: LowRank | None = None,
        down_proj: LowRank | None = None,
    ) -> Tensor:
        """Mixes each token's k experts.

        Args:
            hidden_states: `[T, H]`.
            router_indices: `[T, k]`.
            routing_weights: `[T, k]`.
            gate_up_proj: adapter of that weight.
            down_proj: adapter of that weight.

        Returns:
            `[T, H]`.
        """
        up, down = self._frozen("gate_up_proj"), self._frozen("down_proj")
        decoding = not torch.is_grad_enabled() and router_indices.numel() < self.num_experts
        if decoding and not fused.suits(hidden_states, self.num_experts):
            # Most experts have no row, and to unpack them would take most of the time.
            used, router_indices = router_indices.unique(return_inverse=True)
            up, down = up.of(used), down.of(used)
            gate_up_proj, down_proj = gate_up_proj and gate_up_proj.of(used), down_proj and down_proj.of(used)
        routing = Routing.of(router_indices, len(up.bias))
        with torch.no_grad():
            gate_up = keep(lambda: _gate_up(hidden_states, routing, up, gate_up_proj))
        adapters = (*(gate_up_proj or (None, None)), *(down_proj or (None, None)))
        pledge = _Backward.apply(hidden_states, routing_weights, *adapters, gate_up, routing, up, down, self.limit)
        return _Output.apply(pledge, routing_weights, gate_up, router_indices, routing, up, down, down_proj, self.limit)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.hidden_size} -> {self.intermediate_size}, {self.held}"

    def _parts(self, experts: int, columns: int, rows: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what is held of a weight of that `shape`, by what its name ends in."""
        raise NotImplementedError

    def _frozen(self, name: str) -> Frozen | Dense:
        raise NotImplementedError


class PackedExperts(FrozenExperts):
    """Holds blocks and scales instead of weights.

    They are stored as bf16 views of their bytes: FSDP2 in torch 2.11 takes floating-point parameters only, and an all-gather
    moves bytes as they are.
    """

    held = "packed"

    gate_up_proj_blocks: nn.Parameter
    gate_up_proj_scales: nn.Parameter
    down_proj_blocks: nn.Parameter
    down_proj_scales: nn.Parameter

    def _parts(self, experts: int, columns: int, rows: int) -> dict[str, tuple[int, ...]]:
        groups = rows * columns // BLOCK
        return {"_blocks": (experts, groups * BLOCK // 4), "_scales": (experts, groups // 2), "_bias": (experts, rows)}

    def _frozen(self, name: str) -> Frozen:
        return Frozen(*(getattr(self, f"{name}_{part}") for part in Frozen._fields))


class DenseExperts(FrozenExperts):
    """Holds weights as transformers does, `[E, in, out]`: nothing to dequantise, in 3.8 times the memory."""

    held = "frozen"

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def _parts(self, experts: int, columns: int, rows: int) -> dict[str, tuple[int, ...]]:
        return {"": (experts, columns, rows), "_bias": (experts, rows)}

    def _frozen(self, name: str) -> Dense:
        return Dense(getattr(self, name), getattr(self, f"{name}_bias"))


def pack(stored: Tensor) -> Tensor:
    """A checkpoint's uint8 blocks `[E, out, in/32, 16]` or scales `[E, out, in/32]` as the bf16 view `PackedExperts` holds."""
    return stored.contiguous().flatten(1).view(torch.bfloat16)


class _Backward(torch.autograd.Function):
    """Saves what the layer's backward needs, and does it; gradients for hidden states, routing weights and adapters.

    Its output is a zero of the layer's output's shape, which takes no memory: the place where the gradient comes in. The backward
    writes over `gate_up`, which nothing needs after it: 46 KB a token at gpt-oss's shapes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        up_a: Tensor | None,
        up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        gate_up: Tensor,
        routing: Routing,
        up: Frozen | Dense,
        down: Frozen | Dense,
        limit: float,
    ) -> Tensor:
        ctx.limit, ctx.kind, ctx.ends, ctx.done = limit, type(up), routing.ends, False
        adapted = hidden if up_a is not None else None
        ctx.save_for_backward(adapted, weights, up_a, up_b, down_a, down_b, gate_up, *routing[:4], *up, *down)
        return hidden.new_zeros(()).expand_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.done:
            raise RuntimeError("an expert layer's backward ran twice; it runs once per forward, also with retain_graph")
        ctx.done = True
        hidden, weights, up_a, up_b, down_a, down_b, gate_up, *rest = ctx.saved_tensors
        # `ends` are the first forward's, so that nothing waits here: a recomputation routes each token as that did
        routing, parts = Routing(*rest[:4])._replace(ends=ctx.ends), rest[4:]
        up, down = ctx.kind(*parts[: len(parts) // 2]), ctx.kind(*parts[len(parts) // 2 :])
        grad, k = gradients[0].contiguous(), weights.shape[1]
        row_weights = weights.flatten()[routing.order]
        rows = dispatch(grad, routing.place, k)  # the gradient of each row's output before it is weighted
        activated_grad = routing.mm(rows, down.dense(gate_up.shape[1] // 2, grad.dtype))
        down_grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if down_a is not None:
            activated = activate(gate_up, up.bias, routing.chosen, ctx.limit)
            adapter = LowRank(down_a, down_b)
            down_grads = _adapter_backward(activated, rows, activated_grad, adapter, routing.offsets, row_weights)
            del activated
        del rows
        gate_up_grad, weight_grad = activate_backward(
            activated_grad, gate_up, up.bias, routing.chosen, row_weights, ctx.limit
        )
        del activated_grad
        hidden_rows = routing.mm(gate_up_grad, up.dense(grad.shape[1], grad.dtype))
        up_grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if up_a is not None:
            x, adapter = dispatch(hidden, routing.place, k), LowRank(up_a, up_b)
            up_grads = _adapter_backward(x, gate_up_grad, hidden_rows, adapter, routing.offsets, None)
        hidden_grad = combine(hidden_rows, routing.place, k, None, None, None)

        # the routing weight also scales the expert's bias: <dy, bias of each of the token's experts>
        chosen = routing.chosen[routing.place].view(-1, k)
        bias_part = (grad @ down.bias.to(grad.dtype).T).gather(1, chosen)
        weights_grad = (weight_grad[routing.place].view(-1, k) + bias_part).to(weights.dtype)
        return hidden_grad, weights_grad, *up_grads, *down_grads, None, None, None, None, None


class _Output(torch.autograd.Function):
    """The layer's output; its gradient goes to `_Backward` as it is."""

    @staticmethod
    def forward(
        ctx: Any,
        pledge: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        indices: Tensor,
        routing: Routing,
        up: Frozen | Dense,
        down: Frozen | Dense,
        adapter: LowRank | None,
        limit: float,
    ) -> Tensor:
        activated = activate(gate_up, up.bias, routing.chosen, limit)
        output = _product(activated, down, adapter, routing)
        k = indices.shape[1]
        return combine(output, routing.place, k, weights.flatten(), down.bias, indices.flatten())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None, None, None, None, None, None, None


def _gate_up(hidden: Tensor, routing: Routing, up: Frozen | Dense, adapter: LowRank | None) -> Tensor:
    """`[N, 2F]` without the bias."""
    rows = dispatch(hidden, routing.place, len(routing.place) // len(hidden))
    return _product(rows, up, adapter, routing)


def _product(x: Tensor, frozen: Frozen | Dense, adapter: LowRank | None, routing: Routing) -> Tensor:
    """Each row times its expert's weight, with the adapter's addition: `[N, in]` → `[N, out]`."""
    output = frozen.product(x, routing)
    if adapter is not None:
        output += grouped_mm(grouped_mm(x, adapter.a, routing.offsets), adapter.b, routing.offsets)
    return output


def _adapter_backward(
    x: Tensor, grad: Tensor, x_grad: Tensor, adapter: LowRank, offsets: Tensor, row_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Adds the adapter's part to `x_grad` `[N, in]` in place; returns the gradients of `a` and `b`.

    Args:
        grad: `[N, out]` of the product; rows count `row_weights` times in the gradients of `a` and `b`.
    """
    inner, inner_grad = grouped_mm(x, adapter.a, offsets), grouped_mm(grad, adapter.b.mT, offsets)
    x_grad += grouped_mm(inner_grad, adapter.a.mT, offsets)
    if row_weights is not None:
        scale = row_weights.unsqueeze(1).to(inner.dtype)
        inner, inner_grad = inner * scale, inner_grad * scale
    return grouped_outer(x, inner_grad, offsets), grouped_outer(inner, grad, offsets)
