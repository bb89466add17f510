"""Proof that a merged directory is the base plus the adapter, from the files and from what the model does.

Files (`training.merging.proof_files`): each adapted tensor must equal `cast(W + scale * B @ A)` computed anew in fp32, bit for bit;
every other tensor must have the base's bytes. Behaviour: the merged directory loaded anew by plain transformers, the base,
and the base with the adapter applied by PEFT read the same rows; merged must equal base + adapter, must differ from the
base, and must still answer in harmony. Models too large to be held are read a layer at a time (`training.merging.layerwise`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from training.errors import MergeError
from training.merging.adapter import Adapter
from training.merging.layerwise import adapted_weights, layerwise_logits, plain_weights
from training.merging.proof_files import check_adapted, check_copied, check_record
from training.merging.routing import Routing
from training.merging.shards import DTYPES, Checkpoint
from training.merging.smoke import Smoke, answer_prompt, form_positions, read_along

Precision = Literal["fp32", "bf16"]

MAX_KL = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest mean over tokens of KL(base + adapter || merged), in nats, both sending each token to the same experts.

In fp32 the one difference is the merge's rounding of `W + scale * B @ A` to bf16, 2**-9 relative per weight with
independent signs: 2e-5 on the tiny base under random adapters, whatever their size.

In bf16 each of the two models also rounds its activations by itself, since one has the adapter beside the weight and one
within. The roundings of a layer add up as independent errors do, so the KL, which goes with the error's square, goes with the
number of layers: 4e-4 to 6e-4 at the tiny base's 4, thus about 3e-3 at 20b's 24 and 5e-3 at 120b's 36. The limit leaves a
factor of 4 for larger activations, and is below the 3e-2 by which even a weak adapter moved the tiny base.

The experts are held (`training.merging.routing`) because a router's near-tie turns under either rounding and sends the token to another
expert: without, the mean in fp32 was 2e-5 for some adapters and 2e-3 for others, all merged right. `Proof.routing_changed`
says how many choices turned: 6e-4 to 1e-3 in fp32, 3e-3 in bf16.
"""

ROW_TOKENS = 2048
"""What is read of a row: eager attention, the one that every model has, holds `heads * tokens ** 2` scores."""

_POSITIONS = 512  # tokens whose whole distribution is compared: 201,088 values each, 400 MB in fp32


@dataclass
class Divergence:
    """KL(base + adapter || other) over tokens, in nats, and how often both put the same token first."""

    kl_mean: float
    kl_median: float
    kl_max: float
    top1: float

    @classmethod
    def between(cls, reference: Tensor, other: Tensor) -> "Divergence":
        """Of two logit matrices `[tokens, vocab]`."""
        p, q = reference.log_softmax(-1), other.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
        same = (reference.argmax(-1) == other.argmax(-1)).float().mean()
        return cls(kl.mean().item(), kl.median().item(), kl.max().item(), same.item())


@dataclass
class Proof:
    """The numbers of a proof that held."""

    adapted_exact: int
    """Tensors equal to their recomputed values, bit for bit."""
    copied_identical: int
    copied_xxh128: str
    """Over all copied tensors, as `MergeReport.copied_xxh128`."""
    tokens: int
    merged: Divergence
    base: Divergence
    routing_changed: float | None
    """Share of the tokens' experts, over all layers, that base + adapter was given by the merged model against its own choice;
    None for a model without experts, and when experts were quantised again: those are compared as they choose."""
    smoke: Smoke | None
    precision: Precision
    max_kl: float | None
    """The limit that was applied to `merged.kl_mean`; None when experts were quantised again."""
    layerwise: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Reading:
    """What the models read, and where it is listened to."""

    rows_ids: list[list[int]]
    positions: list[list[int]]
    smoke_ids: list[int]
    device: str
    precision: Precision


@dataclass
class _Answers:
    """fp32 logits `[tokens, vocab]` of the three models, and what merged and base made of the smoke prompt."""

    merged: Tensor
    base: Tensor
    adapted: Tensor
    smoke: Smoke | None
    base_smoke: Smoke | None


_Watch = Callable[[nn.Module], AbstractContextManager[Any]]


def prove(
    base: Path,
    adapter: Path,
    merged: Path,
    rows_ids: list[list[int]],
    smoke_ids: list[int],
    *,
    device: str | None = None,
    precision: Precision | None = None,
    layerwise: bool | None = None,
) -> Proof:
    """Compares `merged` with `base` + `adapter`.

    Args:
        base: model directory.
        adapter: PEFT directory.
        merged: what `merge` made of the two.
        rows_ids: token ids of held-out rows, of which the first `ROW_TOKENS` are read.
        smoke_ids: a rendered prompt, ending where the assistant starts; empty for no smoke test, as is one over `ROW_TOKENS`.
            Layer by layer the first row must begin with it: its answer is read along.
        device: None is CUDA where there is one.
        precision: of the computation; None is fp32 on CPU, and bf16 on CUDA. Layer by layer it is always fp32.
        layerwise: hold one layer at a time; None decides by the memory that is free.

    Raises:
        MergeError: the proof failed; the message says where and by how much.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    precision = precision or ("bf16" if device.startswith("cuda") else "fp32")
    rows_ids = [ids[:ROW_TOKENS] for ids in rows_ids if ids]
    smoke_ids = smoke_ids if len(smoke_ids) <= ROW_TOKENS else []
    if not rows_ids:
        raise MergeError("the proof has no rows to compare on", hint="Give at least one held-out row.")
    source, result = Checkpoint.open(base), Checkpoint.open(merged)
    source_adapter = Adapter.open(adapter, source)
    exact = check_adapted(source, source_adapter, result)
    identical, digest = check_copied(source, source_adapter, result)
    check_record(merged, digest)

    if layerwise is None:
        layerwise = not _fits(source, device, precision)
    reading = _Reading(rows_ids, _positions(rows_ids), smoke_ids, device, "fp32" if layerwise else precision)
    requantised = any(
        update.experts and f"{name}_blocks" in result.entries for name, update in source_adapter.updates.items()
    )
    limit, routing = None if requantised else MAX_KL[reading.precision], Routing()
    follow: _Watch = nullcontext if requantised else routing.repeated
    read = _read_by_layers if layerwise else _read_whole
    answers = read(base, adapter, merged, reading, routing.noted, follow)
    _judge_smoke(answers.smoke, answers.base_smoke)
    to_merged, to_base = (Divergence.between(answers.adapted, other) for other in (answers.merged, answers.base))
    _judge(to_merged, to_base, limit, differs=not torch.equal(answers.merged, answers.base))
    return Proof(
        exact,
        identical,
        digest,
        len(answers.merged),
        to_merged,
        to_base,
        routing.changed_share,
        answers.smoke,
        reading.precision,
        limit,
        layerwise,
    )


def _positions(rows_ids: list[list[int]]) -> list[list[int]]:
    """Which tokens of each row are compared: all, or `_POSITIONS` spread evenly."""
    every = max(1, -(-sum(map(len, rows_ids)) // _POSITIONS))
    return [list(range((len(ids) - 1) % every, len(ids), every)) for ids in rows_ids]


def _fits(base: Checkpoint, device: str, precision: Precision) -> bool:
    """Whether the dequantised model leaves a fifth of the free memory."""
    values = sum(
        2 * e.size if e.name.endswith("_blocks") else e.size // DTYPES[e.dtype].itemsize for e in base.entries.values()
    )
    if device.startswith("cuda"):
        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        free = psutil.virtual_memory().available
    return values * (4 if precision == "fp32" else 2) < 0.8 * free


def _read_whole(base: Path, adapter: Path, merged: Path, reading: _Reading, note: _Watch, follow: _Watch) -> _Answers:
    """One model in memory at a time."""
    from peft import PeftModel

    device, smoke_ids = reading.device, reading.smoke_ids
    model = load_plain(merged, device, reading.precision)
    with note(model):
        merged_logits = _logits(model, reading)
    smoke = answer_prompt(model, merged, smoke_ids, device)
    del model
    model = load_plain(base, device, reading.precision)
    base_logits, base_smoke = _logits(model, reading), answer_prompt(model, base, smoke_ids, device)
    adapted = PeftModel.from_pretrained(model, str(adapter), torch_device=device).eval()
    with follow(adapted):
        return _Answers(merged_logits, base_logits, _logits(adapted, reading), smoke, base_smoke)


def _read_by_layers(
    base: Path, adapter: Path, merged: Path, reading: _Reading, note: _Watch, follow: _Watch
) -> _Answers:
    """One layer in memory at a time. The smoke prompt's known answer is read along."""
    source, result = Checkpoint.open(base), Checkpoint.open(merged)
    form = form_positions(base, reading.rows_ids[0], reading.smoke_ids)
    first = sorted({*reading.positions[0], *form})
    positions = [first, *reading.positions[1:]]
    merged_logits, base_logits, adapted = (
        layerwise_logits(directory, weights, reading.rows_ids, positions, reading.device, watch)
        for directory, weights, watch in (
            (merged, plain_weights(result), note),
            (base, plain_weights(source), nullcontext),
            (base, adapted_weights(source, Adapter.open(adapter, source)), follow),
        )
    )
    places = [first.index(position) for position in form]
    smoke = read_along(base, merged_logits[places], base_logits[places], reading.rows_ids[0], form)
    return _Answers(merged_logits, base_logits, adapted, smoke, None)


def load_plain(directory: Path, device: str, precision: Precision) -> Any:
    """The model by plain transformers, experts dequantised.

    Raises:
        MergeError: transformers found weights missing or unexpected.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": None, "output_loading_info": True}
    if getattr(AutoConfig.from_pretrained(directory), "quantization_config", None):
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **options)
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise MergeError(f"plain transformers reports {kind} for {directory}: {sorted(info[kind])[:3]}")
    return model.to(device=device, dtype=torch.float32 if precision == "fp32" else torch.bfloat16).eval()


@torch.no_grad()
def _logits(model: nn.Module, reading: _Reading) -> Tensor:
    """fp32 `[tokens, vocab]` on the CPU, at the chosen positions of all rows."""
    rows, device = [], reading.device
    for ids, chosen in zip(reading.rows_ids, reading.positions, strict=True):
        keep = torch.tensor(chosen, device=device)
        rows.append(model(input_ids=torch.tensor([ids], device=device), logits_to_keep=keep).logits[0].float().cpu())
    return torch.cat(rows)


def _judge_smoke(smoke: Smoke | None, base: Smoke | None) -> None:
    """A merged model that no longer answers in harmony fails; unless its base does not either."""
    if smoke and not smoke.well_formed and (base is None or base.well_formed):
        raise MergeError(
            f"the proof failed: the merged model answers {smoke.text[:200]!r}, which is not well-formed harmony",
            hint="Lower the learning rate, or train fewer steps; the base answers in harmony.",
        )


def _judge(merged: Divergence, base: Divergence, limit: float | None, *, differs: bool) -> None:
    if not differs:
        raise MergeError("the proof failed: the merged model answers exactly as the base does")
    if limit is not None and not merged.kl_mean <= limit:
        raise MergeError(
            f"the proof failed: the merged model is not base + adapter: mean KL {merged.kl_mean:.2e}, "
            f"allowed {limit:.0e}; top-1 agreement {merged.top1:.1%}"
        )
    if limit is None and not merged.kl_median < base.kl_median:
        raise MergeError(
            f"the proof failed: quantising the experts again lost the training: median KL to base + adapter is "
            f"{merged.kl_median:.2e}, and the base's own is {base.kl_median:.2e}",
            hint="Merge with --format bf16.",
        )
