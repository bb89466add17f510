"""What every engine must do. A test module of an engine subclasses `EngineContract` and gives it the fixture `engine`."""

import asyncio
from collections.abc import Sequence

import pytest

from serving.engines.engine import Engine, EngineError, OverloadedError, Sampling
from serving.errors import RequestError

VOCABULARY = 400  # ids below this are ordinary tokens of the random base's tokenizer
PROMPTS = [
    [(7 * index + 3 * step) % VOCABULARY for step in range(length)] for index, length in enumerate((3, 40, 1, 150, 17))
]
NO_STOP: frozenset[int] = frozenset()


async def collect(engine: Engine, prompt: Sequence[int], **settings) -> tuple[list[int], str | None]:
    """All ids and the finish reason."""
    ids: list[int] = []
    reason = None
    async for chunk in engine.generate(prompt, Sampling(**({"max_new_tokens": 24, "stop_ids": NO_STOP} | settings))):
        assert reason is None, "nothing comes after the finish reason"
        assert chunk.ids, "no empty chunks"
        ids += chunk.ids
        reason = chunk.finish_reason
    return ids, reason


class EngineContract:
    """Fixtures of the subclass: `engine`, `crowded_engine`, `closable_engine`, and `reference`.

    `reference` (prompt, tokens) gives the greedy ids of plain `generate`.
    """

    places: int
    """Sequences that run or wait in `crowded_engine`, at most."""

    async def test_greedy_equals_plain_generate(self, engine, reference):
        for prompt in PROMPTS:
            assert await collect(engine, prompt) == (reference(prompt, 24), "length")

    async def test_a_batch_of_many_equals_batches_of_one(self, engine, reference):
        together = await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS * 3))
        assert [ids for ids, _ in together] == [reference(prompt, 24) for prompt in PROMPTS] * 3

    async def test_sequences_join_and_leave_a_running_batch(self, engine, reference):
        async def later(index: int):
            await asyncio.sleep(0.02 * index)
            length = 4 + 9 * index
            return await collect(engine, PROMPTS[index], max_new_tokens=length), length

        for index, ((ids, _), length) in enumerate(await asyncio.gather(*map(later, range(len(PROMPTS))))):
            assert ids == reference(PROMPTS[index], length)

    async def test_stops_at_a_stop_id_and_delivers_it(self, engine, reference):
        expected = reference(PROMPTS[0], 24)
        stop = expected[5]
        first = expected.index(stop)
        assert await collect(engine, PROMPTS[0], stop_ids=frozenset({stop})) == (expected[: first + 1], "stop")

    async def test_one_token_is_one_token(self, engine, reference):
        assert await collect(engine, PROMPTS[1], max_new_tokens=1) == (reference(PROMPTS[1], 1), "length")

    async def test_a_seed_repeats_whatever_else_runs(self, engine):
        async def drawn(seed: int):
            return (await collect(engine, PROMPTS[4], temperature=1.2, top_p=0.95, seed=seed))[0]

        alone = await drawn(11)
        together = await asyncio.gather(*(drawn(seed) for seed in (5, 11, 17, 11)))
        assert together[1] == together[3] == alone
        assert len({tuple(ids) for ids in together}) == 3

    async def test_without_a_seed_samples_differ(self, engine):
        samples = await asyncio.gather(*(collect(engine, PROMPTS[4], temperature=1.5) for _ in range(3)))
        assert len({tuple(ids) for ids, _ in samples}) == 3

    async def test_a_tiny_nucleus_is_greedy(self, engine, reference):
        ids, _ = await collect(engine, PROMPTS[3], temperature=1.0, top_p=1e-6, seed=1)
        assert ids == reference(PROMPTS[3], 24)

    async def test_logprobs_are_of_the_chosen_and_the_likeliest(self, engine):
        settings = Sampling(max_new_tokens=6, stop_ids=NO_STOP, top_logprobs=3)
        ids, scores = [], []
        async for chunk in engine.generate(PROMPTS[0], settings):
            assert len(chunk.logprobs) == len(chunk.ids)
            ids += chunk.ids
            scores += chunk.logprobs
        for token, score in zip(ids, scores, strict=True):
            assert len(score.top) == 3
            assert score.top[0][0] == token, "greedy takes the likeliest"
            assert score.logprob == pytest.approx(score.top[0][1], abs=1e-4)
            assert 0 >= score.top[0][1] >= score.top[1][1] >= score.top[2][1]

    async def test_a_sequence_nobody_reads_gives_up_its_place(self, engine):
        stream = engine.generate(PROMPTS[0], Sampling(max_new_tokens=engine.context_length - 8, stop_ids=NO_STOP))
        await anext(stream)
        await stream.aclose()
        await asyncio.wait_for(self.idle(engine), timeout=2)

    async def test_a_cancelled_reader_gives_up_its_place(self, engine):
        task = asyncio.create_task(collect(engine, PROMPTS[0], max_new_tokens=engine.context_length - 8))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(self.idle(engine), timeout=2)

    async def idle(self, engine: Engine) -> None:
        """Returns when no sequence runs in `engine`."""
        raise NotImplementedError

    async def test_refuses_what_cannot_fit(self, engine):
        with pytest.raises(RequestError, match="context") as caught:
            await collect(engine, PROMPTS[0], max_new_tokens=engine.context_length)
        assert caught.value.field == "max_new_tokens"
        with pytest.raises(RequestError, match="empty"):
            await collect(engine, [])

    async def test_refuses_more_than_may_wait(self, crowded_engine):
        count = self.places + 9
        running = [collect(crowded_engine, PROMPTS[0], max_new_tokens=200) for _ in range(count)]
        done = await asyncio.gather(*running, return_exceptions=True)
        refused = [item for item in done if isinstance(item, OverloadedError)]
        answered = [item for item in done if isinstance(item, tuple)]
        assert refused
        assert answered
        assert len(refused) + len(answered) == count

    async def test_the_event_loop_is_free_meanwhile(self, engine):
        task = asyncio.create_task(collect(engine, PROMPTS[3], max_new_tokens=100))
        worst, loop = 0.0, asyncio.get_running_loop()
        while not task.done():
            before = loop.time()
            await asyncio.sleep(0.001)
            worst = max(worst, loop.time() - before)
        assert worst < 0.5

    async def test_closing_ends_what_runs(self, closable_engine):
        task = asyncio.create_task(collect(closable_engine, PROMPTS[0], max_new_tokens=1000))
        await asyncio.sleep(0.05)
        closable_engine.close()
        with pytest.raises(EngineError):
            await asyncio.wait_for(task, timeout=30)
        with pytest.raises(EngineError):
            await collect(closable_engine, PROMPTS[0])
