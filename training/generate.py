"""Answers of a loaded model to many conversations, in batches, by plain `generate`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel

from training.errors import DataError
from training.harmony import Message, Parsed, Renderer

STOP_TOKENS = ("<|return|>", "<|call|>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>")
"""Ends of a turn by name, beside those that the model's generation config lists."""

SCORES_PER_BATCH = 1 << 25
"""Positions times positions of a batch, of which eager attention holds a score in every head: 4 GiB in bf16 at 64 heads."""

Progress = Callable[[int, int], None]
"""Called with conversations done and conversations in all."""


@dataclass(frozen=True)
class Generation:
    """What a model answered: parsed, in numbers, and as `ids`, the stop token included."""

    parsed: Parsed
    prompt_tokens: int
    completion_tokens: int
    ids: list[int]


def generate(
    model: PreTrainedModel,
    renderer: Renderer,
    conversations: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    batch_size: int = 16,
    use_cache: bool = True,
    on_progress: Progress | None = None,
) -> list[Generation]:
    """The answers, in the order of `conversations`.

    Long prompts are batched with long ones, padded on the left and masked, fewer at a time than short ones. With temperature 0 an answer does not depend on its
    batch, but for rounding; with a seed the same call gives the same answers.

    Args:
        batch_size: of prompts that are short enough for `SCORES_PER_BATCH`.
        use_cache: whether keys and values are kept from token to token; without, every token costs a whole forward pass.

    Raises:
        DataError: a conversation that cannot be rendered, or does not fit in the model's context.
    """
    prompts = [renderer.prompt_ids(messages) for messages in conversations]
    _check_context(model, prompts, max_new_tokens)
    config = _generation_config(model, renderer, max_new_tokens, temperature, top_p)
    config.use_cache = use_cache
    answers: dict[int, Generation] = {}
    with _seeded(seed, model.device):
        for batch in _batches([len(prompt) for prompt in prompts], batch_size):
            ids = _complete(model, [prompts[index] for index in batch], config)
            for index, answer in zip(batch, ids, strict=True):
                answers[index] = _parse(renderer, prompts[index], answer, config)
            if on_progress:
                on_progress(len(answers), len(prompts))
    return [answers[index] for index in range(len(prompts))]


def stop_ids(model: PreTrainedModel, renderer: Renderer) -> list[int]:
    """Token ids that end a turn: the generation config's, and the tokenizer's known ends of a turn."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(configured if isinstance(configured, list) else [] if configured is None else [configured])
    named = {token.content: id for id, token in renderer.tokenizer.added_tokens_decoder.items()}
    ids |= {named[name] for name in STOP_TOKENS if name in named}
    if renderer.tokenizer.eos_token_id is not None:
        ids.add(renderer.tokenizer.eos_token_id)
    return sorted(ids)


def _batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices of prompts, the longest first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while order:
        count = max(1, min(batch_size, SCORES_PER_BATCH // lengths[order[0]] ** 2))
        yield order[:count]
        order = order[count:]


def _check_context(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int) -> None:
    context = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, prompts), default=0)
    if context and longest + max_new_tokens > context:
        raise DataError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the model's context of {context} tokens",
            hint="Shorten the prompt, or lower max_new_tokens.",
            field="max_new_tokens",
        )


def _generation_config(
    model: PreTrainedModel, renderer: Renderer, max_new_tokens: int, temperature: float, top_p: float
) -> GenerationConfig:
    stops = stop_ids(model, renderer)
    pad = renderer.tokenizer.pad_token_id
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=stops[0] if pad is None else pad,
        **sampling,
    )


def _complete(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """New ids for each prompt, up to and including the first stop token."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), config.pad_token_id, dtype=torch.long)  # [B, T]
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    generator: Any = model
    output = generator.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=config,
        synced_gpus=any(isinstance(module, FSDPModule) for module in model.modules()),  # ranks gather in step
    )
    stops = set(config.eos_token_id)
    answers = []
    for row in output[:, width:].tolist():
        end = next((position + 1 for position, id in enumerate(row) if id in stops), len(row))
        answers.append(row[:end])
    return answers


def _parse(renderer: Renderer, prompt: list[int], answer: list[int], config: GenerationConfig) -> Generation:
    parser = renderer.parser(prompt)
    parser.feed(answer)
    stopped = bool(answer) and answer[-1] in config.eos_token_id
    return Generation(parser.finish("stop" if stopped else "length"), len(prompt), len(answer), answer)


@contextlib.contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """torch's random numbers from `seed` on; afterwards they go on as if nothing had been drawn. None leaves them alone."""
    if seed is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
