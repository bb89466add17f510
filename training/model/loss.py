"""Cross-entropy over a frozen head: loss and the hidden states' gradient in one pass, a chunk of logits at a time.

Logits are T x 201,088 and never exist whole. Since the head takes no gradient, everything that the backward needs is known
in the forward: a chunk's logits become their own gradient in place, are multiplied back into a gradient of hidden states, and
are gone. Two products per token, where recomputing the logits in the backward takes three (Liger kernels, arXiv:2410.10989).
"""

import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.model.kernels import triton

if triton is not None:
    import triton.language as tl

    LOWEST = tl.constexpr(-1e30)

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time: 0.4 GiB in bf16 at gpt-oss's vocabulary."""

_RESCALED = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


class Sums(NamedTuple):
    """Over the trained tokens of a forward pass, fp32; only `loss` has a gradient."""

    loss: Tensor
    """Negative log-likelihood, in nats."""
    entropy: Tensor
    """Of the predicted distributions, in nats."""
    correct: Tensor
    """How many were the likeliest token."""


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether `model`'s logits are its hidden states times one frozen matrix."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    rescaled = any(getattr(config, name, None) not in (None, 1.0) for name in _RESCALED)
    return type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad and not rescaled


def install_loss(model: PreTrainedModel) -> None:
    """Lets `model(..., labels=labels, trained=positions)` return `Sums` and no logits; other calls are as they were."""
    original = model.forward

    def forward(self: Any, *args: Any, labels: Tensor | None = None, trained: Tensor | None = None, **more: Any) -> Any:
        if trained is None:
            return original(*args, **({} if labels is None else {"labels": labels}), **more)
        assert labels is not None
        hidden = self.base_model(*args, **more).last_hidden_state
        head = self.get_output_embeddings().weight
        return cross_entropy(hidden.flatten(0, 1), head, trained, labels.flatten()[trained + 1])

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]


def trained_positions(labels: Tensor) -> Tensor:
    """Where the next token is trained: flat positions into `[B, T]`, from labels that are -100 elsewhere."""
    following = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return (following != -100).flatten().nonzero().squeeze(1)


def cross_entropy(hidden: Tensor, head: Tensor, positions: Tensor, targets: Tensor) -> Sums:
    """Sums over `positions` of the cross-entropy between `hidden @ head.T` and `targets`.

    Args:
        hidden: `[T, H]`.
        head: `[V, H]`, frozen.
        positions: `[M]` rows of `hidden`, each at most once.
        targets: `[M]` token ids.
    """
    return Sums(*_CrossEntropy.apply(hidden, head, positions, targets))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, positions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        chosen = hidden[positions]
        differentiable = ctx.needs_input_grad[0]
        grad = torch.empty_like(chosen) if differentiable else None
        sums = torch.zeros(3, dtype=torch.float32, device=hidden.device)
        for start in range(0, len(chosen), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            logits = chosen[rows] @ head.T
            sums += _logits_to_gradient(logits, targets[rows], differentiable)
            if grad is not None:
                torch.mm(logits, head, out=grad[rows])
            del logits  # before the next chunk's exist
        ctx.save_for_backward(grad, positions)
        ctx.shape = hidden.shape
        loss, entropy, correct = sums.unbind()
        ctx.mark_non_differentiable(entropy, correct)
        return loss, entropy, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad, positions = ctx.saved_tensors
        hidden_grad = grad.new_zeros(ctx.shape)
        # in fp32: the factor rounded to bf16 would put all gradients off by up to 0.2 %
        hidden_grad[positions] = (grad.float() * gradients[0]).to(grad.dtype)
        return hidden_grad, None, None, None


def _logits_to_gradient(logits: Tensor, targets: Tensor, differentiable: bool) -> Tensor:
    """Turns `logits` `[C, V]` into the gradient of their summed cross-entropy in place; returns `Sums` as `[3]`."""
    if logits.is_cuda:
        sums = torch.empty(len(logits), 3, dtype=torch.float32, device=logits.device)
        _cross_entropy_kernel[(len(logits),)](
            logits, targets, sums, logits.shape[1], BACKWARD=differentiable, COLUMNS=4096, num_warps=16
        )
        return sums.sum(0)
    log_p = logits.float().log_softmax(-1)
    p = log_p.exp()
    target = log_p.gather(1, targets[:, None])
    correct = (target[:, 0] >= log_p.amax(1)).sum()
    if differentiable:
        logits.copy_(p.scatter_add(1, targets[:, None], torch.full_like(target, -1)))
    return torch.stack([-target.sum(), -(p * log_p).sum(), correct.float()])


if triton is not None:

    @triton.jit
    def _cross_entropy_kernel(logits, targets, sums, width, BACKWARD: tl.constexpr, COLUMNS: tl.constexpr):
        """One row: maximum, normaliser and entropy in a pass, the gradient in another; both in fp32."""
        row = tl.program_id(0).to(tl.int64)
        start_of_row = logits + row * width
        target = tl.load(targets + row)
        target_x = tl.load(start_of_row + target).to(tl.float32)  # before another warp has the gradient there
        # by column of a tile, so that nothing is exchanged between threads until the end
        largest = tl.full((COLUMNS,), LOWEST, dtype=tl.float32)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)  # of exp(x - largest)
        moment = tl.zeros((COLUMNS,), dtype=tl.float32)  # of x * exp(x - largest)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            x = tl.load(start_of_row + column, mask=inside, other=-float("inf")).to(tl.float32)
            grows = x > largest
            e = tl.exp(-tl.abs(x - largest))  # of the smaller of both, as the other's is 1
            shrink = tl.where(grows, e, 1.0)
            e = tl.where(grows, 1.0, e)
            total = total * shrink + e
            moment = moment * shrink + tl.where(e > 0, x * e, 0.0)  # 0 and not NaN where x is -inf
            largest = tl.maximum(largest, x)
        by_column, largest = largest, tl.max(largest, 0)
        shrink = tl.exp(by_column - largest)
        total, moment = tl.sum(total * shrink, 0), tl.sum(moment * shrink, 0)
        log_z = largest + tl.log(total)
        tl.store(sums + row * 3, log_z - target_x)
        tl.store(sums + row * 3 + 1, log_z - moment / total)
        tl.store(sums + row * 3 + 2, (target_x >= largest).to(tl.float32))
        if BACKWARD:
            for start in range(0, width, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                inside = column < width
                x = tl.load(start_of_row + column, mask=inside, other=0.0).to(tl.float32)
                p = tl.exp(x - log_z) - (column == target).to(tl.float32)
                tl.store(start_of_row + column, p.to(logits.dtype.element_ty), mask=inside)
