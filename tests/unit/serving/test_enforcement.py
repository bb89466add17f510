"""Holding a model to a language: a scripted engine says what a model would, so that each course of events can be had."""

from pathlib import Path

import pytest

from serving.answers.answering import answer
from serving.answers.enforcement import MAX_ATTEMPTS, OPENERS, opener, opening_ids
from serving.answers.generation import GenerateAnswer, GenerateRequest, Started, TextDelta
from serving.engines.engine import Chunk
from serving.models.loading import ServedModel
from serving.models.names import ModelSource
from training.harmony import Renderer
from training.language import assess
from training.reasoning.language_names import NAMES

ENGLISH = "The user wants to know the capital of Australia, which is the city of Canberra."
GERMAN = "Der Nutzer möchte wissen, was die Hauptstadt von Australien ist, und das ist Canberra."


@pytest.fixture(scope="module")
def tokenizer(random_base):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(random_base)


class Scripted:
    """Says one prepared output per call, token by token."""

    context_length = 4096

    def __init__(self, tokenizer, *traces: str):
        self.tokenizer = tokenizer
        self.traces = list(traces)
        self.asked = []
        self.generated = 0

    async def generate(self, prompt_ids, sampling, adapter=None):
        self.asked.append(sampling)
        trace = self.traces[len(self.asked) - 1]
        text = f"<|channel|>analysis<|message|>{trace}<|end|><|start|>assistant<|channel|>final<|message|>Canberra.<|return|>"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in ids:
            self.generated += 1
            yield Chunk([token], "stop" if token == ids[-1] else None)

    def close(self):
        pass


async def run(tokenizer, *traces: str, **values):
    engine = Scripted(tokenizer, *traces)
    model = ServedModel("scripted", engine, Renderer(tokenizer), frozenset())
    request = GenerateRequest(prompt="Hi", reasoning_language="German", **values)
    events = [event async for event in answer(model, request, ModelSource("scripted", Path()))]
    assert isinstance(events[0], Started)
    assert not any(isinstance(event, Started) for event in events[1:])
    return engine, events[1:]


async def test_a_wrong_language_is_tried_again(tokenizer):
    engine, events = await run(tokenizer, ENGLISH, GERMAN, enforce="retry", seed=7, temperature=0)
    whole = events[-1]
    assert isinstance(whole, GenerateAnswer)
    assert whole.reasoning == GERMAN
    assert whole.reasoning_language.matches is True
    assert whole.enforcement.attempts == 2
    assert whole.usage.completion_tokens == engine.generated
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == GERMAN + "Canberra."
    assert [sampling.seed for sampling in engine.asked] == [7, 8]
    assert engine.asked[0].temperature == 0 < engine.asked[1].temperature


async def test_a_wrong_attempt_ends_before_its_answer(tokenizer):
    engine, _ = await run(tokenizer, ENGLISH, GERMAN, enforce="retry")
    alone, _ = await run(tokenizer, ENGLISH, enforce="none")
    also, _ = await run(tokenizer, GERMAN, enforce="none")
    assert engine.generated < alone.generated + also.generated


async def test_attempts_are_bounded_and_the_last_is_kept(tokenizer):
    engine, events = await run(tokenizer, *[ENGLISH] * 9, enforce="retry")
    assert len(engine.asked) == MAX_ATTEMPTS
    assert events[-1].reasoning == ENGLISH
    assert events[-1].reasoning_language.matches is False
    assert events[-1].answer == "Canberra."


async def test_a_right_language_is_asked_once(tokenizer):
    for trace in (GERMAN, "42"):  # too little to tell is not wrong
        engine, events = await run(tokenizer, trace, enforce="retry")
        assert len(engine.asked) == 1
        assert events[-1].enforcement.attempts == 1


async def test_without_enforcement_the_stream_is_not_held_back(tokenizer):
    _, events = await run(tokenizer, ENGLISH)
    assert len(events) > 20
    assert events[-1].reasoning == ENGLISH


@pytest.mark.parametrize("language", sorted(OPENERS))
def test_openers_are_in_their_language(language):
    assert assess(opener(language), language).matches is True


def test_every_language_has_an_opener():
    for code in NAMES:
        assert opener(code)


def test_an_opening_is_read_as_reasoning(tokenizer):
    parser = Renderer(tokenizer).parser()
    deltas = parser.feed(opening_ids(tokenizer, "de"))
    assert [(delta.channel, delta.text) for delta in deltas] == [("analysis", OPENERS["de"])]
