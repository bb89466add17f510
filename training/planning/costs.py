"""What a forward and backward pass costs in GPU memory and time: closed formulas with measured constants. Loads without torch.

Measured on one H200 (torch 2.11, transformers 5.17, true shapes with random weights, LoRA r 8 on attention, 2,048-token rows).
"""

from training.planning.sizes import BF16, MXFP4, Sizes

GIB = 2**30

GPUS: dict[str, tuple[float, float]] = {
    "A100-40G": (39.4, 0.32),
    "L40S": (44.4, 0.37),
    "A100-80G": (79.2, 0.32),
    "H100": (79.6, 1.0),
    "H200": (139.8, 1.0),
    "B200": (178.0, 2.2),
}
"""GiB that programs see, and matrix rate relative to an H200's (bf16 rates of the makers' data sheets)."""

LOSS_TOKENS = 1024  # whose logits exist at a time: training.model.loss.CHUNK_TOKENS
OPTIMIZER_BYTES = 8  # AdamW's two moments, fp32
ADAPTER_BYTES = 8  # fp32 weight and gradient

# Step time at 20b. Without recompute: 16 rows in 1.065 s, of which 0.033 s dequantise the experts twice; with full recompute, which
# dequantises three times: 16 rows in 1.40 s; selective: 8 rows in 0.634 s (tests/benchmarks/training/h200-*.json). 120b with full
# recompute, 8 rows in 1.314 s, agrees to 6 %. bf16 weights with transformers' grouped_mm: 8 rows in 1.55 s. Frozen ones in bf16 cost
# what packed ones do: what they save of dequantising, a card at its power limit loses elsewhere.
S_PER_EXPERT_GIB = {"mxfp4": 0.049 / 35.6, "bf16": 0.081 / 35.6}
"""Of a pass that computes everything twice: dequantising three times, or reading what is dense."""
S_PER_TOKEN_AND_PARAMETER = {
    ("mxfp4", "full"): 1.13e-14,
    ("mxfp4", "selective"): 0.99e-14,
    ("mxfp4", "none"): 0.87e-14,
    ("bf16", "full"): 2.4e-14,
    ("bf16", "selective"): 2.4e-14,  # as full: nothing is kept
    ("bf16", "none"): 1.8e-14,  # an estimate
}
MANY_ROWS, MANY_ROWS_TIME = 1024, 0.945  # the first is training.model.experts.MANY_ROWS
"""Rows an expert has from which products of its own and sliding windows' own kernels, measured together, take that part of the time:
20b, 24 rows without recompute in 1.479 s, 16 with full in 1.314 s."""
S_EAGER_PER_TOKEN_AND_PARAMETER = 3.2e-13  # the notebooks' eager attention and loop over experts: 777 to 915 tokens/s
FSDP2_RATE = 0.92  # of DDP's, 120b on two GPUs; 20b: 0.99
CPU_S_PER_TOKEN_AND_PARAMETER = 1.3e-10  # one core, fp32: about 4,000 tokens/s on the tiny base
DECODING_TOKENS_PER_S = {1: 24, 8: 192, 64: 320}  # by batch, 20b on one H200, transformers' generate
DECODING_PARAMETERS = 3.6e9
DECODING_TOKENS_PER_S_CPU = 300  # the tiny base in batches, one core


MATRIX_FLOPS = 790e12
"""bf16 matrix rate of an H200 on random data, measured."""


def mfu(sizes: Sizes | None, gpu: str | None, tokens_per_s: float) -> float | None:
    """Model FLOPs utilisation: forward, and gradients of inputs, of the parameters that a token passes through; none recomputed.

    Args:
        gpu: its name as CUDA says it, such as `NVIDIA H100 80GB HBM3`.

    Returns:
        Share of the card's measured matrix rate, or None for a card or model that is not known.
    """
    rate = next((rate for name, (_, rate) in GPUS.items() if gpu and name.partition("-")[0] in gpu), None)
    if rate is None or sizes is None:
        return None
    return 4 * sizes.active_parameters * tokens_per_s / (rate * MATRIX_FLOPS)


def gpu_memory(
    sizes: Sizes,
    *,
    tokens: int,
    weights: str,
    recompute: str,
    shards: int = 1,
    value_bytes: int = BF16,
    adapter_parameters: int = 0,
    expert_adapters: bool = False,
    loss_tokens: int = LOSS_TOKENS,
    bytes_per_logit: int | None = None,
    eager_length: int = 0,
) -> dict[str, float]:
    """Peak of one worker in GiB, by part, as PyTorch's allocator counts it.

    The peak is reached in the loss, or in the backward of a layer: the larger of the two is counted.

    Args:
        sizes: of the model.
        tokens: of one forward pass, padding included.
        weights: of the experts: `mxfp4`; `frozen`, bf16 in the layer that packed ones have; or `bf16`, in transformers'.
        recompute: `full` keeps a layer's input only; `selective` also our layer's first product; `none` what its backward reads.
        shards: workers that share the base (FSDP2).
        value_bytes: of what is computed in.
        adapter_parameters: trained, on every worker.
        expert_adapters: whether the experts are among what is trained.
        loss_tokens: whose logits exist at a time; `tokens` for a loss over whole logits.
        bytes_per_logit: with gradient and copies; None is our loss's, whose logits become their gradient in place.
        eager_length: row length where attention scores are held whole, else 0.
    """
    expert_bytes = MXFP4 if weights == "mxfp4" else value_bytes
    others = sizes.layers * sizes.other_weights + sizes.outside
    whole = sizes.layers * sizes.expert_weights * expert_bytes + others * value_bytes
    layer = sizes.expert_weights * expert_bytes + sizes.other_weights * value_bytes
    saved, at_work = _activations(sizes, weights, recompute, expert_adapters)
    at_work = (at_work + 4 * sizes.heads * eager_length) * tokens * value_bytes
    if weights == "mxfp4":
        at_work += sizes.expert_weights * 2 // 3 * value_bytes  # one layer's gate_up, dequantised
    loss = min(tokens, loss_tokens) * sizes.vocab * (bytes_per_logit or value_bytes)
    loss += 3 * tokens * sizes.hidden * value_bytes  # trained rows, their gradient, and that of all rows
    parts = {
        "weights": whole / shards,
        "gathered": 2 * layer + sizes.outside * value_bytes if shards > 1 else 0,  # a layer, the next one, and the head
        "activations": saved * sizes.layers * tokens * value_bytes,
        "loss_or_layer": max(loss, at_work),
        "adapter": adapter_parameters * ADAPTER_BYTES,
        "optimizer": adapter_parameters * OPTIMIZER_BYTES,
    }
    return {name: size / GIB for name, size in parts.items()}


def _activations(sizes: Sizes, weights: str, recompute: str, expert_adapters: bool) -> tuple[float, float]:
    """Values per token that a layer holds until its backward, and that the backward of one layer needs besides."""
    k, hidden, inner = sizes.experts_per_token, sizes.hidden, sizes.intermediate
    attention = (
        3 * hidden + 3.5 * sizes.queries
    )  # fitted: 46 KB a token and layer, from 8 and 16 rows without recompute
    gate_up = 2 * k * inner
    # transformers' grouped_mm also keeps the experts' input rows, their activation and their output
    experts = k * (2 * hidden + 3 * inner) if weights == "bf16" else gate_up
    held = {"full": hidden, "selective": hidden + gate_up, "none": attention + experts}[recompute]
    again = {"full": attention + experts, "selective": attention, "none": 0}[recompute]
    # of the rows after the second product and after the activation; in our layer gate_up's is written over it
    gradients = (
        k * (hidden + inner) + (gate_up if weights == "bf16" else 0) + (2 * k * hidden if expert_adapters else 0)
    )
    return held, again + gradients


def step_s(sizes: Sizes, *, tokens: float, weights: str, recompute: str, eager: bool, compute_rate: float) -> float:
    """Seconds of one forward and backward pass over `tokens` on a GPU of `compute_rate` times an H200's matrix rate."""
    if eager:
        return tokens * sizes.active_parameters * S_EAGER_PER_TOKEN_AND_PARAMETER / compute_rate
    weights = "mxfp4" if weights == "frozen" else weights
    experts_gib = sizes.layers * sizes.expert_weights * BF16 / GIB
    fixed = experts_gib * S_PER_EXPERT_GIB[weights] * (1 if recompute == "full" else 2 / 3)
    per_token = sizes.active_parameters * S_PER_TOKEN_AND_PARAMETER[weights, recompute]
    many = weights == "mxfp4" and tokens * sizes.experts_per_token >= MANY_ROWS * sizes.experts
    return (fixed + tokens * per_token * (MANY_ROWS_TIME if many else 1)) / compute_rate


def decoding_s(sizes: Sizes, *, tokens: int, batch: int, device: str) -> float:
    """Seconds to generate `tokens` in batches of `batch`."""
    if device == "cpu":
        return tokens / DECODING_TOKENS_PER_S_CPU
    size = max(known for known in DECODING_TOKENS_PER_S if known <= batch)
    return tokens / DECODING_TOKENS_PER_S[size] * max(1.0, sizes.active_parameters / DECODING_PARAMETERS)
