"""Attention over trees that lie side by side in one row, without padding between them.

A row [1, T] holds whole trees, each as its prompt and then its answers (training/batches.py). Linear layers
and norms compute exactly the tokens that there are; only attention must know where a tree ends: the prompt
with its first answer is one causal piece, and each further answer looks at the prompt and, causally, at
itself. Nothing of size [T, T] is made.

The model calls it by the interface for attention functions of transformers, as the implementation `trees`,
which is that library's sdpa wherever no layout is given (padded rows, decoding with a cache).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "trees"
_DEAF = "_trees_not_heard"
Layout = tuple[tuple[int, ...], ...]
"""Of each tree the tokens of its prompt, then those of each of its answers."""


class Row:
    """A layout on its way to the attention layers; counts the layers that it reached."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.layers = 0
        self._masks: dict[tuple[int, int], Bool[Tensor, "A K"]] = {}

    def mask(self, answer: int, prompt: int, device: torch.device) -> Bool[Tensor, "A K"]:
        """Of an answer's tokens: the whole prompt, and the answer up to the token itself."""
        if (answer, prompt) not in self._masks:
            whole = torch.ones(answer, prompt + answer, dtype=torch.bool, device=device)
            self._masks[answer, prompt] = whole.tril(prompt)
        return self._masks[answer, prompt]


def prepare(backbone: Any) -> bool:
    """Has a model with sdpa attention call `attend`; False for other kinds of attention.

    Nothing else about the model changes, and nothing of it is saved.
    """
    if backbone.config._attn_implementation == "sdpa" and not getattr(backbone, _DEAF, False):
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
        backbone.set_attn_implementation(NAME)
    return bool(backbone.config._attn_implementation == NAME)


def give_up(backbone: Any) -> None:
    """Goes back to sdpa for good, in a model whose attention was never handed the layout: its trees are told
    apart by a whole mask."""
    setattr(backbone, _DEAF, True)
    backbone.set_attn_implementation("sdpa")


def attend(
    module: torch.nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S E"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    trees: Row | None = None,
    **rest: Any,
) -> tuple[Float[Tensor, "B T H E"], None]:
    """An attention function as transformers calls it; `trees`: the layout of the row, if it is one."""
    if trees is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
        return found
    trees.layers += 1
    groups = query.shape[1] // key.shape[1]
    few = groups > 1 and query.device.type == "cpu"
    if groups > 1 and not few:  # Only the CPU's kernel takes a mask and fewer heads of keys.
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)

    def look(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=few)

    return _pieces(look, query, key, value, trees).transpose(1, 2).contiguous(), None


def _pieces(
    look: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 K T D"],
    value: Float[Tensor, "1 K T E"],
    row: Row,
) -> Float[Tensor, "1 H T E"]:
    # Split at once and not sliced: the gradient of a slice is as long as the row.
    sizes = [size for prompt, first, *more in row.layout for size in (prompt + first, *more)]
    parts = zip(*(torch.split(whole, sizes, 2) for whole in (query, key, value)), strict=True)
    seen = []
    for prompt, _, *more in row.layout:
        q, k, v = next(parts)
        seen.append(look(q, k, v, None))
        for answer in more:
            q_own, k_own, v_own = next(parts)
            keys, values = (
                torch.cat([whole[:, :, :prompt], own], 2) for whole, own in ((k, k_own), (v, v_own))
            )
            seen.append(look(q_own, keys, values, row.mask(answer, prompt, q.device)))
    return torch.cat(seen, 2)


def whole_mask(layout: Layout) -> Bool[Tensor, "1 1 T T"]:
    """The same as a mask over the whole row, for attention that takes nothing else."""
    length = sum(map(sum, layout))
    allowed = torch.zeros(length, length, dtype=torch.bool)
    at = 0
    for prompt, *answers in layout:
        stem = slice(at, at + prompt)
        allowed[stem, stem] = True
        at += prompt
        for answer in answers:
            own = slice(at, at + answer)
            allowed[own, stem] = allowed[own, own] = True
            at += answer
    return allowed.tril()[None, None]
