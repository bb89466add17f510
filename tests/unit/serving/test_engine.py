"""The built-in engine: the contract of all engines, and what is its own."""

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from serving.engines import recorded
from serving.engines.attention import use_grouped_attention
from serving.engines.batch import Batch, RunningSequence, attention_masks, prefill_width
from serving.engines.engine import EngineError, Sampling
from serving.engines.kv_cache import KeyValueCache, bytes_per_token
from serving.engines.recorded import RecordedSteps
from serving.engines.transformers_engine import SICK_AFTER, TransformersEngine
from tests.unit.serving.engine_contract import NO_STOP, PROMPTS, EngineContract, collect
from training.model import load as models


@pytest.fixture(scope="module")
def model(random_base: Path):
    return models.load(random_base)


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    """What plain `generate` says."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return whole[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def reference(model):
    return lambda prompt, tokens: greedy(model, prompt, tokens)


@pytest.fixture(scope="module")
def engine(random_base: Path):
    model = models.load(random_base)
    use_grouped_attention(model)
    engine = TransformersEngine(model, max_sequences=8, context_length=4096)
    yield engine
    engine.close()


@pytest.fixture
def crowded_engine(model):
    engine = TransformersEngine(model, max_sequences=1, max_waiting=2)
    yield engine
    engine.close()


@pytest.fixture
def closable_engine(model):
    return TransformersEngine(model)


class BuiltIn(EngineContract):
    places = 3

    async def idle(self, engine):
        while engine._batch.size:
            await asyncio.sleep(0.01)


class TestTransformersEngine(BuiltIn):
    async def test_long_prompts_are_read_in_pieces_beside_short_ones(self, engine, reference):
        long = [(5 * step) % 400 for step in range(1100)]
        prompts = [long, PROMPTS[0], long[:500], PROMPTS[1]]
        together = await asyncio.gather(*(collect(engine, prompt) for prompt in prompts))
        assert [ids for ids, _ in together] == [reference(prompt, 24) for prompt in prompts]

    async def test_a_failure_of_the_model_reaches_the_callers_and_passes(self, engine, reference):
        with pytest.raises(EngineError, match="the model failed"):
            await collect(engine, [10**9])
        assert (await collect(engine, PROMPTS[0]))[0] == reference(PROMPTS[0], 24)

    async def test_an_engine_whose_rounds_all_fail_is_sick(self, engine):
        for _ in range(SICK_AFTER):
            engine.check_health()
            with pytest.raises(EngineError):
                await collect(engine, [10**9])
        with pytest.raises(EngineError, match="each of its last 3 rounds"):
            engine.check_health()
        await collect(engine, PROMPTS[0])
        engine.check_health()


class TestStepsOfFewShapes(BuiltIn):
    """As on CUDA, where they are recorded: rows and visible positions in powers of two."""

    @pytest.fixture
    def engine(self, model):
        engine = TransformersEngine(model, max_sequences=8, context_length=4096)
        engine._batch.record()
        yield engine
        engine.close()


@pytest.mark.parametrize(
    ("fault", "tried"), [(torch.OutOfMemoryError("full"), 2), (RuntimeError("the model waits for the device"), 1)]
)
async def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    model, reference, monkeypatch, fault: Exception, tried: int
):
    """Once; and where memory was short, again when the cache has become another."""
    tries = []

    def fail(*_: object) -> None:
        tries.append(1)
        raise fault

    monkeypatch.setattr(recorded, "_Place", lambda device: None)
    monkeypatch.setattr(recorded, "_Recording", fail)
    batch = Batch(model, cache_tokens=16 * 256)
    steps = RecordedSteps(batch._next_logits, batch._cache, batch.device, record=True)
    batch.add(RunningSequence([3, 4], Sampling(max_new_tokens=9, stop_ids=NO_STOP), batch.device))
    with torch.inference_mode():
        found = [steps([5], [2], [0]).clone() for _ in range(4)]
        assert len(tries) == 1
        batch._cache.reserve(2, 256)
        found += [steps([5], [2], [0]).clone() for _ in range(4)]
    assert len(tries) == tried
    torch.testing.assert_close(found, found[:1] * 8)


async def test_a_prompt_that_joins_pads_the_others_within_the_cache(model, reference):
    """Six prompts are read up to 170; with a seventh the pieces are 146 wide, and 170 + 146 is beyond the cache's 256."""
    prompts = [[(7 * index + 3 * step) % 400 for step in range(190)] for index in range(7)]
    batch = Batch(model, cache_tokens=16 * 256)
    rows = [RunningSequence(prompt, Sampling(64, NO_STOP), model.device) for prompt in prompts]
    for row in rows[:6]:
        batch.add(row)
    batch.step()
    batch.add(rows[6])
    while batch.size:
        batch.step()
    assert [(await row.next_chunk()).ids for row in rows] == [reference(prompt, 64) for prompt in prompts]


async def test_sequences_wait_for_memory_not_for_places(model, reference):
    """Room for 500 tokens: one long sequence, or several short ones, but never both."""
    engine = TransformersEngine(model, cache_bytes=500 * bytes_per_token(model.config, model.dtype))
    assert engine.context_length == 500
    lengths = [400, 30, 40, 450, 20, 100]
    answers = await asyncio.gather(*(collect(engine, PROMPTS[0], max_new_tokens=length) for length in lengths))
    assert [len(ids) for ids, _ in answers] == lengths
    assert all(ids[:20] == reference(PROMPTS[0], 20) for ids, _ in answers)
    engine.close()


@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (8, 64), (32, 64), (64, 128)])
def test_pieces_of_prompts_get_narrower_as_the_context_grows(rows, heads):
    widths = [prefill_width(rows, read, heads) for read in (0, 2**12, 2**15, 2**17)]
    assert widths[0] == max(32, 1024 // rows)
    assert widths == sorted(widths, reverse=True)
    for read, width in zip((0, 2**12, 2**15, 2**17), widths, strict=True):
        assert width == 1 or rows * heads * width * (read + width) <= 2**28


async def test_narrow_pieces_give_the_same_answer(engine, model, reference, monkeypatch):
    heads = model.config.num_attention_heads
    monkeypatch.setattr("serving.engines.batch._PREFILL_SCORES", heads * 2**14)
    seen, forward = [], Batch._forward

    def watched(batch, first_row, pieces, starts):
        seen.append(len(pieces[0]) * (starts[0] + len(pieces[0])))
        return forward(batch, first_row, pieces, starts)

    monkeypatch.setattr(Batch, "_forward", watched)
    long = [(5 * step) % 400 for step in range(1100)]
    assert (await collect(engine, long))[0] == reference(long, 24)
    assert max(seen) <= 2**14


async def test_memory_that_runs_out_while_the_cache_grows_passes(model, reference, monkeypatch):
    """Layers that have grown and layers that have not are of no use to anyone."""
    engine = TransformersEngine(model)
    await collect(engine, PROMPTS[0])
    new_zeros, calls = torch.Tensor.new_zeros, itertools.count(1)

    def new_zeros_once(tensor, *size):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return new_zeros(tensor, *size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", new_zeros_once)
        with pytest.raises(EngineError, match="out of memory"):
            await collect(engine, PROMPTS[3], max_new_tokens=300)
    assert (await collect(engine, PROMPTS[3], max_new_tokens=200))[0] == reference(PROMPTS[3], 200)
    engine.close()


async def test_closing_ends_what_waits(model):
    engine = TransformersEngine(model, max_sequences=1)
    tasks = [asyncio.create_task(collect(engine, PROMPTS[0], max_new_tokens=2000)) for _ in range(4)]
    await asyncio.sleep(0.1)
    engine.close()
    for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=10):
        assert isinstance(result, EngineError)


def test_masks_hide_the_future_and_what_the_window_has_passed(model):
    positions = torch.tensor([[4, 5], [0, 1]])
    config = type("Config", (), {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]})
    masks = attention_masks(config, positions, 6, torch.float32)
    seen = {kind: (mask[:, 0] == 0).int().tolist() for kind, mask in masks.items()}
    assert seen["full_attention"] == [
        [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
        [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]],
    ]
    assert seen["sliding_attention"] == [
        [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]],
        [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]],
    ]


async def test_a_model_of_another_architecture():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=512, initializer_range=0.3)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    engine = TransformersEngine(model)
    answers = await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS))
    assert [ids for ids, _ in answers] == [greedy(model, prompt, 24) for prompt in PROMPTS]
    engine.close()


def test_the_cache_keeps_what_it_holds_when_it_grows(model):
    cache = KeyValueCache(model.config, torch.float32, torch.device("cpu"), max_tokens=8192)
    cache.reserve(1, 3)
    cache.focus(0, torch.tensor([[0, 1, 2]]), visible=3)
    heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    keys = torch.randn(1, heads, 3, head_dim)
    cache.update(keys, -keys, 0)
    cache.reserve(5, 1000)
    assert cache.rows >= 5
    assert cache.length >= 1000
    assert cache.fits(cache.rows, cache.length)
    cache.copy_row(0, 4)
    cache.focus(4, torch.tensor([[3]]), visible=4)
    new = torch.randn(1, heads, 1, head_dim)
    seen, values = cache.update(new, -new, 0)
    assert torch.equal(seen, torch.cat([keys, new], dim=2))
    assert torch.equal(values, -seen)


def test_sampling_follows_the_distribution(model):
    from serving.engines.sampling import Sampler, sample

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(4000, 1)
    samplers = [Sampler(Sampling(1, NO_STOP, temperature=0.7, seed=seed), torch.device("cpu")) for seed in range(4000)]
    counts = torch.bincount(torch.tensor(sample(logits, samplers)), minlength=4) / 4000
    assert torch.allclose(counts, (logits[0] / 0.7).softmax(-1), atol=0.03)
