"""Batched generation on a gpt-oss of random weights: what one conversation gets must not depend on the others."""

from datetime import date

import pytest
import torch
from transformers import AutoTokenizer

from training import generate as generate_module
from training.errors import DataError
from training.generate import generate, stop_ids
from training.harmony import Renderer
from training.model.load import load

torch.set_num_threads(1)

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "reasoning language: German"},
        {"role": "user", "content": "Quanto fa due più tre?"},
    ],
    [{"role": "user", "content": "¿Qué día viene después del lunes? " * 20}],
]


@pytest.fixture(scope="module")
def model(random_base):
    return load(random_base)


@pytest.fixture(scope="module")
def renderer(random_base):
    return Renderer(AutoTokenizer.from_pretrained(random_base), date(2025, 8, 5))


def ids(generations):
    return [generation.ids for generation in generations]


def test_one_at_a_time_equals_a_batch(model, renderer):
    together = generate(model, renderer, CONVERSATIONS, max_new_tokens=12)
    alone = [generate(model, renderer, [conversation], max_new_tokens=12)[0] for conversation in CONVERSATIONS]
    assert ids(together) == ids(alone)


def test_greedy_is_the_argmax_of_the_plain_forward(model, renderer):
    prompt = renderer.prompt_ids(CONVERSATIONS[0])
    found = generate(model, renderer, CONVERSATIONS[:1], max_new_tokens=4)[0].ids
    for position, token in enumerate(found):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + found[:position]])).logits
        assert logits[0, -1].argmax() == token


def test_a_seed_repeats_the_samples_and_leaves_other_random_numbers_alone(model, renderer):
    def sample(seed):
        return ids(generate(model, renderer, CONVERSATIONS, max_new_tokens=12, temperature=1.0, seed=seed))

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = sample(1)
    assert torch.equal(torch.rand(3), expected)
    assert first == sample(1)
    assert first != sample(2)


def test_the_limit_is_said_and_counted(model, renderer):
    for generation, conversation in zip(
        generate(model, renderer, CONVERSATIONS, max_new_tokens=5), CONVERSATIONS, strict=True
    ):
        assert generation.completion_tokens == len(generation.ids) <= 5
        assert generation.prompt_tokens == len(renderer.prompt_ids(conversation))
        stopped = generation.ids[-1] in stop_ids(model, renderer)
        assert generation.parsed.finish_reason == ("stop" if stopped else "length")


def test_it_stops_at_each_stop_token(model, renderer, random_base):
    stops = stop_ids(model, renderer)
    named = renderer.tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>", "<|endoftext|>"])
    assert set(named) <= set(stops)
    for stop in stops:
        eager = load(random_base)
        with torch.no_grad():  # embeddings of one token are all there is to see, and the head answers it
            eager.model.norm.weight.zero_()
        eager.lm_head.bias = torch.nn.Parameter(torch.eye(eager.config.vocab_size)[stop] * 10)
        generation = generate(eager, renderer, CONVERSATIONS[:1], max_new_tokens=5)[0]
        assert (generation.ids, generation.parsed.finish_reason) == ([stop], "stop")


def test_progress_counts_to_the_end(model, renderer):
    seen = []
    generate(
        model, renderer, CONVERSATIONS, max_new_tokens=2, batch_size=2, on_progress=lambda *done: seen.append(done)
    )
    assert seen == [(2, 3), (3, 3)]


def test_long_prompts_are_asked_fewer_at_a_time(model, renderer, monkeypatch):
    asked, complete = [], generate_module._complete

    def count(model, prompts, config):
        asked.append([len(prompt) for prompt in prompts])
        return complete(model, prompts, config)

    monkeypatch.setattr(generate_module, "_complete", count)
    long, short = (len(renderer.prompt_ids(CONVERSATIONS[index])) for index in (2, 0))
    monkeypatch.setattr(generate_module, "SCORES_PER_BATCH", 2 * long**2)
    generate(model, renderer, [CONVERSATIONS[0], *CONVERSATIONS[2:] * 3, CONVERSATIONS[0]], max_new_tokens=2)
    assert asked == [[long, long], [long, short], [short]]
    assert 1 << 25 >= 16 * 1024**2  # the default batch at a usual length


def test_no_conversations_no_answers(model, renderer):
    assert generate(model, renderer, [], max_new_tokens=2) == []


def test_what_does_not_fit_the_context_is_refused(model, renderer):
    with pytest.raises(DataError, match="context") as caught:
        generate(model, renderer, CONVERSATIONS, max_new_tokens=model.config.max_position_embeddings)
    assert caught.value.field == "max_new_tokens"
