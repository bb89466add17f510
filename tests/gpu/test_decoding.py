"""The built-in engine's decoding at gpt-oss-20b's layer shapes: the product that reads MXFP4 itself, and recorded steps."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from serving.engines.adapters import AdapterBank
from serving.engines.attention import use_grouped_attention
from serving.engines.batch import Batch, RunningSequence
from serving.engines.engine import Sampling
from serving.engines.kv_cache import KeyValueCache
from serving.engines.norms import use_fused_norms
from serving.engines.recorded import RecordedSteps
from serving.engines.transformers_engine import TransformersEngine
from tests.benchmarks.training.checkpoint import write_random_base
from tests.gpu.shapes import DEVICE, ON_GPU, SIZES, error, marks, poison, random_experts, routed
from tests.gpu.test_experts import dense, reference
from training.model import fused
from training.model import load as models
from training.model.experts import WEIGHTS

pytestmark = marks

PROMPTS = [[(7 * row + 3 * step) % 400 for step in range(5 + 11 * row)] for row in range(5)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of gpt-oss-20b's shapes, one of each kind of attention."""
    directory = tmp_path_factory.mktemp("base") / "base"
    write_random_base(directory, "20b" if ON_GPU else "tiny", 2)
    return directory


@pytest.fixture(scope="module")
def model(base: Path):
    return models.load(base, weights="mxfp4", precision="bf16", device=DEVICE)


@pytest.mark.skipif(not ON_GPU, reason="the kernel is CUDA's; test_kernels.py runs it in Triton's interpreter")
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("counts", [[1], [0, 3, 0, 1], [16] * 32, [0] * 31 + [1000], [17, 0, 33]])
def test_fused_product(name: str, counts: list[int]) -> None:
    """Single rows, whole and ragged tiles, experts without rows; nothing is left unwritten."""
    experts = random_experts()
    rows = torch.tensor(counts + [0] * (experts.num_experts - len(counts)))
    expert = torch.arange(experts.num_experts).repeat_interleave(rows).to(DEVICE)
    _, width, out = experts.shape(name)
    x = torch.randn(len(expert), width, device=DEVICE, dtype=torch.bfloat16)
    blocks, scales = (getattr(experts, f"{name}_{part}") for part in ("blocks", "scales"))
    poison()
    assert fused.suits(x, len(rows))
    product = fused.fused_mm(x, blocks, scales, out, rows.cumsum(0).int().to(DEVICE))
    weight = dense(experts, name, None)
    expected = torch.stack([row.double() @ weight[e] for row, e in zip(x, expert, strict=True)])
    assert error(product, expected) < 5e-3


@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_expert_layer_without_gradients(tokens: int) -> None:
    experts = random_experts()
    hidden, indices, weights = routed(tokens)
    poison()
    with torch.inference_mode():
        output = experts(hidden, indices, weights)
    assert error(output, reference(experts, hidden.double(), indices, weights.double())) < 1e-2


def test_fused_norms(base: Path, model) -> None:
    fast = models.load(base, weights="mxfp4", precision="bf16", device=DEVICE)
    use_fused_norms(fast)
    hidden = torch.randn(3, 5, SIZES.hidden_size if ON_GPU else 64, device=DEVICE, dtype=torch.bfloat16) * 40
    with torch.inference_mode():
        assert error(fast.model.norm(hidden), model.model.norm(hidden)) < 5e-3


def running(batch: Batch) -> None:
    """Reads the prompts of `PROMPTS` and leaves them decoding."""
    for prompt in PROMPTS:
        batch.add(RunningSequence(prompt, Sampling(max_new_tokens=100, stop_ids=frozenset()), batch.device))
    while batch._decoding < len(PROMPTS):
        batch.step()


@pytest.mark.parametrize("adapted", [False, True])
def test_recorded_steps_equal_those_run_as_they_are(model, adapted: bool) -> None:
    """The same tokens at the same places: as it is, recorded and replayed; then others, through the same recording."""

    def random_adapter(_: Path) -> dict[str, tuple[Tensor, Tensor]]:
        layer = model.model.layers[0].self_attn.q_proj
        wide = getattr(layer, "linear", layer).weight.shape
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(*shape, generator=generator) for shape in ((4, wide[1]), (wide[0], 4)))
        return {"model.layers.0.self_attn.q_proj": (a, 0.01 * b)}

    bank = AdapterBank(model, random_adapter)
    slots = [bank.take(Path("adapter")) if adapted else 0, 0, 0, 0, 0]

    async def play() -> None:
        use_grouped_attention(model)
        batch = Batch(model, cache_tokens=16 * 256, adapters=bank)
        batch.record()
        running(batch)
        steps, positions = batch._recorded, [row.position for row in batch._rows]
        assert steps is not None
        before = None
        for tokens in ([5, 6, 7, 8, 9], [15, 16, 17, 18, 19]):
            tries = [steps(tokens, positions, slots).clone() for _ in range(3)]
            assert tries[0].isfinite().all()
            assert torch.equal(tries[1], tries[0])
            assert torch.equal(tries[2], tries[0])
            assert before is None or not torch.equal(tries[0], before)
            before = tries[0]
            plain = batch._forward(0, [[token] for token in tokens], positions)
            if not adapted:
                assert error(tries[0], plain) < 2e-2
        assert steps._record == ON_GPU  # nothing made it give up
        assert any(recording for recording in steps._recorded.values()) == ON_GPU

    with torch.inference_mode():
        asyncio.run(play())
    for layer in model.model.layers:  # take the bank out again
        for name, module in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, getattr(module, "linear", module))


@pytest.mark.skipif(not ON_GPU, reason="records nothing")
def test_a_step_that_waits_for_the_device_runs_as_it_is() -> None:
    """After which the stream is the one it was, memory can be had and given back, and random numbers drawn."""
    cache = KeyValueCache(
        SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1, head_dim=64),
        torch.bfloat16,
        torch.device(DEVICE),
        4096,
    )
    cache.reserve(2, 256)

    def step(tokens: Tensor, positions: Tensor, visible: int, adapters: Tensor | None) -> Tensor:
        return torch.full((len(tokens), 7), float(tokens.sum().item()), device=DEVICE)

    steps, stream = RecordedSteps(step, cache, torch.device(DEVICE), record=True), torch.cuda.current_stream()
    for _ in range(4):
        assert (steps([2, 3], [0, 0], [0, 0]) == 5).all()
    assert not steps._record
    assert torch.cuda.current_stream() == stream
    assert torch.empty(2**28, device=DEVICE).normal_().isfinite().all()
    torch.cuda.empty_cache()


def test_answers_of_a_recorded_engine_are_the_models_own(base: Path, model) -> None:
    """Nearly each token is the likeliest by a forward pass over all before it, or as likely within bf16, which now and then makes
    a router choose another expert."""
    served = models.load(base, weights="mxfp4", precision="bf16", device=DEVICE)
    use_grouped_attention(served)
    use_fused_norms(served)
    engine = TransformersEngine(served, max_sequences=8, context_length=1024)

    async def ask(prompt: list[int]) -> list[int]:
        ids: list[int] = []
        async for chunk in engine.generate(prompt, Sampling(max_new_tokens=40, stop_ids=frozenset())):
            ids += chunk.ids
        return ids

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(ask, PROMPTS * 2))

    answers = asyncio.run(ask_all())
    assert engine._batch._recorded is None or engine._batch._recorded._record
    engine.close()
    model.set_attn_implementation("eager")
    for prompt, answer in zip(PROMPTS * 2, answers, strict=True):
        assert len(answer) == 40
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer], device=DEVICE)).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
        assert (logits.amax(1) - chosen < 0.05 * logits.std()).float().mean() > 0.9
