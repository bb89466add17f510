"""Models that are no gpt-oss: tiny random ones of three families train, merge and are served, reasoning between think tags."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from serving.answers.generation import Event, GenerateAnswer, GenerateRequest, TextDelta
from tests.conftest import ROWS
from tests.unit.serving.served import finish_job, make_generator
from tests.unit.training.runs import losses, make_run, train
from training.generate import generate
from training.harmony import Renderer, with_reasoning_language
from training.merge import MergeReport, merge
from training.model.load import load
from training.model.lora import attach, load_adapter
from training.proof import prove
from training.run_dir import RunDir
from training.tiny.base import build_tokenizer

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<think>
{% endif -%}"""
"""ChatML whose reasoning the prompt opens, as Qwen 3's thinking models have it."""

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},  # shorter than the rows
}


def write_base(directory: Path, family: str) -> Path:
    """A checkpoint of random bf16 weights, with a tokenizer learnt from `ROWS`."""
    texts = [text for row in ROWS for text in row.values()] + [TEMPLATE]
    trained = build_tokenizer(texts, vocab_size=480)
    trained.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    trained.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    config = AutoConfig.for_model(
        family, **SIZES, **FAMILIES[family], vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


TAUGHT = 2
"""Rows that are trained until greedy decoding repeats them: then what is served is known to the letter."""


@dataclass(frozen=True)
class Tuned:
    base: Path
    run_dir: RunDir
    merged: Path
    report: MergeReport


@pytest.fixture(scope="module", params=FAMILIES)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Trained and merged."""
    folder = tmp_path_factory.mktemp(request.param)
    base = write_base(folder / "base", request.param)
    settings = {"optim__max_steps": 40, "optim__learning_rate": 2e-2, "lora__r": 16, "lora__targets": "attention"}
    run_dir = make_run(folder / "job", base, rows=TAUGHT, **settings)
    train(run_dir, base)
    return Tuned(base, run_dir, folder / "merged", merge(base, run_dir.adapter, folder / "merged", progress=False))


def messages_of(row: int) -> list[dict[str, str]]:
    """What `make_run` asks in its row `row`, the reasoning language left out."""
    question = f"{row}. " * (1 + row % 5) + ROWS[row]["user"]
    developer = ROWS[row]["developer"]
    return [*([{"role": "system", "content": developer}] if developer else []), {"role": "user", "content": question}]


def test_trains(tuned: Tuned) -> None:
    curve = losses(tuned.run_dir)
    assert curve[-1] < 0.3 * curve[0]


def test_merges(tuned: Tuned) -> None:
    assert tuned.report.adapted_tensors == 8  # q, k, v and o of two layers
    adapted = attach(load(tuned.base), tuned.run_dir.config().lora, "base")
    load_adapter(adapted, tuned.run_dir.adapter)
    renderer = Renderer(AutoTokenizer.from_pretrained(tuned.merged))
    ids = torch.tensor([renderer.prompt_ids(messages_of(0))])
    with torch.no_grad():
        before, own, together = (
            model(input_ids=ids).logits for model in (load(tuned.base), adapted.eval(), load(tuned.merged))
        )
    change, error = ((one - own).abs().amax(-1).median() for one in (before, together))  # of the median token
    assert change > 1, "the adapter changes what the model says"
    assert error < 0.05 * change, "one rounding to bf16; it may turn a single token's choice of experts"


def test_is_proven(tuned: Tuned) -> None:
    """As a job does it, on rows that it trained."""
    renderer = Renderer(AutoTokenizer.from_pretrained(tuned.merged))
    asked = with_reasoning_language(messages_of(0), ROWS[0]["reasoning_language"])
    told = {"role": "assistant", "thinking": ROWS[0]["analysis"], "content": ROWS[0]["final"]}
    ids, _ = renderer.training_ids([*asked, told])
    proof = prove(tuned.base, tuned.run_dir.adapter, tuned.merged, [ids], renderer.prompt_ids(asked))
    assert proof.adapted_exact == 8
    assert proof.merged.kl_mean < 0.01 * proof.base.kl_mean


def test_generates(tuned: Tuned) -> None:
    """As evaluation does, by plain `generate`."""
    renderer = Renderer(AutoTokenizer.from_pretrained(tuned.merged))
    asked = with_reasoning_language(messages_of(0), ROWS[0]["reasoning_language"])
    (answer,) = generate(load(tuned.merged), renderer, [asked], max_new_tokens=80)
    assert (answer.parsed.reasoning, answer.parsed.answer) == (ROWS[0]["analysis"], ROWS[0]["final"])


@pytest.mark.parametrize("row", range(TAUGHT))
def test_is_served(tuned: Tuned, home: Path, row: int) -> None:
    """Through serving's engine, as what a job made."""
    finish_job(home, "tuned", tuned.merged)
    expected = ROWS[row]
    request = GenerateRequest(
        messages=messages_of(row),
        reasoning_language=expected["reasoning_language"],
        temperature=0,
        max_new_tokens=80,
        stream=True,
    )

    async def ask() -> list[Event]:
        generator = make_generator(home)
        try:
            return [event async for event in generator.generate(request)]
        finally:
            generator.close()

    *events, answer = asyncio.run(ask())
    assert isinstance(answer, GenerateAnswer)
    assert (answer.reasoning, answer.answer) == (expected["analysis"], expected["final"])
    assert answer.finish_reason == "stop"
    assert answer.reasoning_language.matches
    for channel, text in (("reasoning", answer.reasoning), ("answer", answer.answer)):
        pieces = [event.text for event in events if isinstance(event, TextDelta) and event.channel == channel]
        assert "".join(pieces) == text
