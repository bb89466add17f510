"""Pre-trains the tiny base on conversations of `training.tiny.corpus`: minutes on two CPU cores, the same result every time.

Plain language modelling in two parts, with system texts of known sentences and then of any words. From the end of the first one
on, experts are seen through MXFP4 (straight-through gradients), so that the packed weights are the trained ones.
`python -m training.tiny.pretrain OUT` makes `configs/tiny/base`.
"""

import argparse
import datetime
import itertools
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.quantization_config import Mxfp4Config

from training.model import mxfp4
from training.tiny.base import build_tokenizer, chat_template, model_config, write_checkpoint
from training.tiny.corpus import Corpus, conversation

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_local_experts": 4,
    "initializer_range": 0.05,
}
VOCAB_SIZE = 3072
STEPS = 1600
"""Optimizer steps on known system texts."""
STRANGERS_STEPS = 120
"""Steps after those, on system texts of any words."""
BATCH = 32
POOL = 16
"""Batches drawn at once and sorted by length, so that little is computed for padding."""
LEARNING_RATE = 3e-3
STRANGERS_LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
PACKED_STEPS = 300
"""Last steps, in which the experts are rounded to MXFP4 in the forward pass."""

DATE = re.compile(r"Current date: [\d-]+")


class Packed(nn.Module):
    """A parametrisation: the weight as MXFP4 holds it forward, the identity backward."""

    def forward(self, weight: Tensor) -> Tensor:
        held = mxfp4.dequantize(*mxfp4.quantize(weight.detach().mT.contiguous()), dtype=torch.float32).mT
        return weight + (held - weight).detach()


def pretrain(directory: Path, *, start: Path | None = None, seed: int = 0) -> Path:
    """Writes the trained base to `directory`.

    Args:
        directory: of the checkpoint.
        start: a base after the first part; None makes it.
        seed: of the weights and the conversations; bits also depend on torch's version and number of threads.
    """
    if start is None:
        batches = conversations(seed)
        tokenizer = build_tokenizer(itertools.chain.from_iterable(itertools.islice(batches, 128)), VOCAB_SIZE)
        torch.manual_seed(seed)
        model = build_model(tokenizer)
        known: dict[str, Any] = {
            "steps": STEPS,
            "peak": LEARNING_RATE,
            "first": "<|end|>",
            "packed_from": STEPS - PACKED_STEPS,
        }
        train(model, tokenizer, batches, **known)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        model = build_model(tokenizer)
        held = GptOssForCausalLM.from_pretrained(start, quantization_config=Mxfp4Config(dequantize=True))
        model.load_state_dict(held.float().state_dict())
        pack_experts(model)
    strangers = conversations(seed + 1, strangers=True)
    user = "<|start|>user"  # nothing is to be learnt from system texts of any words
    train(model, tokenizer, strangers, steps=STRANGERS_STEPS, peak=STRANGERS_LEARNING_RATE, first=user)
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    return write_checkpoint(directory, tokenizer, state=model.state_dict(), **SIZES)


def build_model(tokenizer: Tokenizer) -> Any:
    config = GptOssConfig(**model_config(tokenizer, **SIZES))
    config._attn_implementation = config._experts_implementation = "eager"
    return GptOssForCausalLM(config)


def train(
    model: Any,
    tokenizer: Tokenizer,
    batches: Iterator[list[str]],
    *,
    steps: int,
    peak: float,
    first: str,
    packed_from: int | None = None,
) -> None:
    """Trains in place.

    Args:
        model: gpt-oss, fp32.
        tokenizer: its own.
        batches: rendered conversations.
        steps: optimizer steps.
        peak: learning rate after the warm-up.
        first: where, in a conversation, the trained text begins.
        packed_from: step from which the experts are seen as MXFP4 holds them; None when they are already.
    """
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    started, tokens = time.perf_counter(), 0
    for step in range(steps):
        if step == packed_from:
            pack_experts(model)
        for group in optimizer.param_groups:
            group["lr"] = peak * rate(step, steps)
        ids, labels = batch(tokenizer, next(batches), first)
        tokens += int(ids.ne(model.config.pad_token_id).sum())
        with parametrize.cached():
            loss = loss_of(model, ids, labels)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            speed = tokens / (time.perf_counter() - started)
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {speed:,.0f} tokens/s", flush=True)


def loss_of(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean next-token loss; logits are made for labelled tokens only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = labels[:, 1:]
    counted = wanted.ne(-100)
    return nn.functional.cross_entropy(model.lm_head(hidden[:, :-1][counted]), wanted[counted])


def pack_experts(model: nn.Module) -> None:
    """Lets every forward pass see the experts as MXFP4 holds them."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            parametrize.register_parametrization(module, "gate_up_proj", Packed())
            parametrize.register_parametrization(module, "down_proj", Packed())


def conversations(seed: int, *, strangers: bool = False) -> Iterator[list[str]]:
    """Batches of rendered conversations of like lengths, without end; none has the question of a held-out row."""
    corpus, rng, template = Corpus(), random.Random(seed), chat_template()
    excluded = frozenset(itertools.chain.from_iterable(corpus.held_out.values()))
    first = datetime.date(2025, 1, 1)
    while True:
        texts: list[str] = []
        for effort in ("low", "medium", "medium", "high"):
            messages = [conversation(corpus, rng, excluded, strangers=strangers) for _ in range(POOL * BATCH // 4)]
            texts += render_jinja_template(messages, chat_template=template, reasoning_effort=effort)[0]
        # Serving renders whatever day it is.
        texts = [DATE.sub(f"Current date: {first + datetime.timedelta(days=rng.randrange(3650))}", t, 1) for t in texts]
        texts.sort(key=len)
        batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        rng.shuffle(batches)
        yield from batches


def batch(tokenizer: Tokenizer, texts: list[str], first: str) -> tuple[Tensor, Tensor]:
    """Ids and labels, both `[batch, length]`; padding, and what is before the first `first`, has label -100."""
    pad = tokenizer.encode("<|endoftext|>").ids[0]
    rows = tokenizer.encode_batch(texts)
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), -100)
    for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
        begin = text.index(first)
        start = next(place for place, (left, _) in enumerate(row.offsets) if left >= begin)
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        labels[index, start : len(row.ids)] = torch.tensor(row.ids[start:])
    return ids, labels


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine to a hundredth."""
    warmup = min(WARMUP_STEPS, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.tiny.pretrain", description="Pre-train the tiny base.")
    parser.add_argument("out", type=Path, help="directory of the checkpoint")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; the weights' last bits depend on it")
    parser.add_argument("--start", type=Path, help="a base after the first part, to continue from")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pretrain(arguments.out, start=arguments.start)


if __name__ == "__main__":
    main()
