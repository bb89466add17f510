"""Several rows in one sequence, none of which sees another: best fit, restarted positions, document masks."""

import bisect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from training.model.attention import Window, takes_windows

Example = dict[str, list[int]]


def pack(examples: Sequence[Example], max_length: int) -> list[Example]:
    """Fills sequences of at most `max_length` tokens by best fit, longest row first; deterministic.

    Best-fit decreasing needs at most 11/9 of the optimal number of bins, plus one (Johnson, 1973).

    Args:
        examples: rows with `input_ids` and `labels`, none longer than `max_length`.

    Returns:
        Sequences with `input_ids`, `labels` and `position_ids` (from 0 in each row), in the order of their first row.
    """
    order = sorted(range(len(examples)), key=lambda index: (-len(examples[index]["input_ids"]), index))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in order:
        length = len(examples[index]["input_ids"])
        place = bisect.bisect_left(room, (length, -1))
        if place == len(room):
            bins.append([])
            free, chosen = max_length, len(bins) - 1
        else:
            free, chosen = room.pop(place)
        bins[chosen].append(index)
        bisect.insort(room, (free - length, chosen))
    return [_join([examples[index] for index in sorted(members)]) for members in sorted(bins, key=min)]


def _join(members: Sequence[Example]) -> Example:
    # A row's first token has nothing before it, so its label would be predicted from the row before: it is never trained.
    return {
        "input_ids": [token for member in members for token in member["input_ids"]],
        "labels": [label for member in members for label in (-100, *member["labels"][1:])],
        "position_ids": [position for member in members for position in range(len(member["input_ids"]))],
    }


def install_masks(model: nn.Module, *, packed: bool) -> None:
    """Makes a decoder mask by `position_ids`: a position of 0 begins a document.

    transformers builds gpt-oss's masks without the positions, so that packed rows would see each other; decoders take
    ready masks instead, which is what this hook gives them: by kind of layer where the model names kinds, else one, with
    the model's window if it has one. Unpacked rows are padded at the end and need the causal mask alone, which is the same
    for every batch of a length and made once.
    """

    def give_masks(
        decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens: Tensor = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        length = tokens.shape[1]
        config = decoder.config
        flex = config._attn_implementation == "flex_attention"
        dtype = decoder.embed_tokens.weight.dtype
        window = getattr(config, "sliding_window", None)
        bare = flex and takes_windows(config, dtype, tokens.device)
        if packed:
            documents = (kwargs["position_ids"] == 0).cumsum(-1)
            masks = _masks(length, window, flex, dtype, tokens.device, documents, bare)
        else:
            masks = _causal_masks(length, window, flex, dtype, tokens.device, bare)
        by_kind = getattr(config, "layer_types", None)
        return args, kwargs | {"attention_mask": masks if by_kind else masks["sliding_attention"]}

    model.register_forward_pre_hook(give_masks, with_kwargs=True)


@lru_cache(maxsize=16)
def _causal_masks(
    length: int, window: int | None, flex: bool, dtype: torch.dtype, device: torch.device, bare: bool
) -> dict[str, Any]:
    return _masks(length, window, flex, dtype, device, None, bare)


def _masks(
    length: int,
    window: int | None,
    flex: bool,
    dtype: torch.dtype,
    device: torch.device,
    documents: Tensor | None,
    bare: bool = False,
) -> dict[str, Any]:
    """`full_attention` and `sliding_attention` masks: a BlockMask for flex, else additive `[B or 1, 1, T, T]`.

    Args:
        window: tokens that a sliding layer sees; None is all.
        documents: `[B, T]` number of the document that each token belongs to; None when there is one a row.
        bare: a `Window` for sliding layers instead of a mask.
    """

    width = length if window is None else window

    def full(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        causal = q >= kv
        return causal if documents is None else causal & (documents[b, q] == documents[b, kv])

    def sliding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return full(b, h, q, kv) & (q - kv < width)

    batch = None if documents is None else len(documents)
    kinds = {"full_attention": full, "sliding_attention": sliding}
    ready = {}
    if bare:
        starts = None if documents is None else torch.searchsorted(documents, documents).int()
        ready["sliding_attention"] = Window(width, starts)
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask

        return ready | {
            name: create_block_mask(
                mod, batch, None, length, length, device=str(device), _compile=device.type == "cuda"
            )
            for name, mod in kinds.items()
            if name not in ready
        }
    b = torch.arange(batch or 1, device=device)[:, None, None, None]
    q = torch.arange(length, device=device)[None, None, :, None]
    kv = torch.arange(length, device=device)[None, None, None, :]
    blocked = torch.finfo(dtype).min
    return {
        name: torch.zeros(batch or 1, 1, length, length, dtype=dtype, device=device).masked_fill_(
            ~mod(b, b, q, kv), blocked
        )
        for name, mod in kinds.items()
    }
