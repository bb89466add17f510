"""One prompt that a merged model must still answer in harmony: what the text says is not judged, only its form."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TOKENS = 64


@dataclass
class Smoke:
    """What the model answered."""

    text: str
    well_formed: bool
    """Whether harmony's channels were opened and closed as they should."""
    finish_reason: str
    """`stop` or `length`; `read along` where a known answer was read and only its form was the model's to choose."""


def answer_prompt(model: Any, directory: Path, prompt_ids: list[int], device: str) -> Smoke | None:
    """A greedy answer, read by the harmony parser; None for a model without harmony, or without a prompt."""
    from training.harmony import HarmonyParser

    tokenizer, controls = _tokenizer(directory)
    if not prompt_ids or "<|channel|>" not in controls:
        return None
    prompt = torch.tensor([prompt_ids], device=device)
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=_TOKENS)
    ids = output[0, len(prompt_ids) :].tolist()
    stops = {controls[name] for name in ("<|return|>", "<|call|>", "<|endoftext|>") if name in controls}
    finish_reason = "stop" if ids[-1] in stops else "length"
    parser = HarmonyParser(tokenizer)
    parser.feed(ids)
    parsed = parser.finish(finish_reason)
    cut_short = finish_reason == "length" and bool(parsed.reasoning)
    # An answer cut short has one warning more: that there is no final message.
    well_formed = ids[0] == controls["<|channel|>"] and len(parsed.warnings) <= cut_short
    return Smoke(tokenizer.decode(ids), well_formed, finish_reason)


def form_positions(directory: Path, row_ids: list[int], prompt_ids: list[int]) -> list[int]:
    """Where in a row the next token is harmony's to say: in the headers of the answer's messages.

    Layer by layer, a generated token costs a pass over all weights. Reading along costs nothing: one pass says what the
    model would have written at each of these places.

    Args:
        row_ids: a prompt and its answer.
        prompt_ids: the prompt, up to where the assistant starts.

    Returns:
        positions in `row_ids`; none for a model without harmony, or a row that does not begin with the prompt.
    """
    _, controls = _tokenizer(directory)
    known = {name: controls.get(f"<|{name}|>") for name in ("start", "channel", "message")}
    start = len(prompt_ids)
    if None in known.values() or not prompt_ids or row_ids[:start] != prompt_ids:
        return []
    in_header, positions = True, []
    for position in range(start - 1, len(row_ids) - 1):
        following = row_ids[position + 1]
        in_header |= following == known["start"]
        if in_header:
            positions.append(position)
        in_header &= following != known["message"]
    return positions


def read_along(directory: Path, merged: Tensor, base: Tensor, row_ids: list[int], positions: list[int]) -> Smoke | None:
    """Whether the merged model keeps to harmony at each of `form_positions` at which the base does.

    Args:
        merged, base: logits `[positions, vocab]` of the two models.

    Returns:
        None where the base keeps to it nowhere.
    """
    wanted = torch.tensor([row_ids[position + 1] for position in positions])
    likeliest, kept = merged.argmax(-1), base.argmax(-1) == wanted
    if not kept.any():
        return None
    tokenizer, _ = _tokenizer(directory)
    return Smoke(tokenizer.decode(likeliest), bool((likeliest == wanted)[kept].all()), "read along")


def _tokenizer(directory: Path) -> tuple[Any, dict[str, int]]:
    """The tokenizer, and its control tokens' ids by name."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    return tokenizer, {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
