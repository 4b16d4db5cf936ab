"""Decoding without a cache, for models whose cache does not give what the trainer computes.

Each token computes its whole sequence anew, in the trainer's own layout (rows of their own, padded on the
right): slow, and exact for every causal LM. Whether a cache can be trusted is tried, not looked up: some
models keep none, or take it under another name, or count positions from the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from training.batches import fill
from training.logprobs import Head

TOKENS = 2048
"""Tokens computed together, padding included."""
PROBE = ([3, 4, 5, 6, 7, 8, 9], [8, 5, 7, 3])
"""Prompts of unlike length on which a cache is tried, and the tokens that follow them."""
FOLLOWING = ([4, 9], [6, 3], [5])
BOUND, NARROW_BOUND = 1e-3, 0.1
"""Mean |difference| of logits as a share of their deviation up to which a cache is right; where bfloat16 is
computed."""
ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""In how many ways a cache of another kind fails."""


class Recomputed:
    """What `DecodingState` is to the generator, with sequences in place of a cache."""

    def __init__(self, backbone: nn.Module, head: Head, pad_id: int) -> None:
        self._backbone, self._head, self._pad = backbone, head, pad_id
        self._device = next(backbone.parameters()).device
        self._rows: list[list[int]] = []

    def prefill(
        self, prompts: Sequence[list[int]], group: int, room: int, seen: list[Tensor]
    ) -> tuple[Float[Tensor, "N V"], list[Tensor]]:
        """Logits of each answer's first token; no states of a trunk."""
        self._rows = [list(prompt) for prompt in prompts for _ in range(group)]
        return self._logits(), []

    def step(self, token: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Logits after one more token a row."""
        for row, added in zip(self._rows, token.tolist(), strict=True):
            row.append(added)
        return self._logits()

    def keep(self, order: Int[Tensor, " K"]) -> None:
        """Goes on with these rows, in this order."""
        self._rows = [self._rows[index] for index in order.tolist()]

    def _logits(self) -> Float[Tensor, "N V"]:
        found: dict[int, Tensor] = {}
        for part in fill([[len(row)] for row in self._rows], TOKENS):
            rows = [self._rows[index] for index in part]
            width = max(map(len, rows))
            ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in rows], device=self._device)
            positions = torch.arange(width, device=self._device).expand(len(rows), width)
            hidden = self._backbone(
                input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False
            ).last_hidden_state
            for at, index in enumerate(part):
                found[index] = hidden[at, len(rows[at]) - 1]
        return self._head(torch.stack([found[index] for index in range(len(self._rows))]))


def why_not(kind: Any, backbone: nn.Module, head: Head, pad_id: int) -> str:
    """What is wrong with the cache of `kind` (`DecodingState`) for this model; empty when it can be trusted.

    Two prompts of unlike length are followed for three tokens, the second of which ends one of them.
    """
    wanted = _follow(Recomputed(backbone, head, pad_id))
    try:
        found = _follow(kind(backbone, head, pad_id))
    except ERRORS as error:
        return f"it fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    gap = float((found - wanted).abs().mean() / wanted.std())
    dtype = next(backbone.parameters()).dtype
    wide = dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(wanted.device.type)
    return (
        f"its logits are {gap:.2g} of their deviation off" if gap > (BOUND if wide else NARROW_BOUND) else ""
    )


def _follow(state: Any) -> Float[Tensor, "K V"]:
    """Logits of the probe, step after step."""
    logits, _ = state.prefill([list(prompt) for prompt in PROBE], 1, len(FOLLOWING), [])
    made = [logits]
    for following in FOLLOWING:
        if len(following) < len(logits):
            state.keep(torch.tensor([len(logits) - 1], device=logits.device))
        logits = state.step(torch.tensor(following, device=logits.device))
        made.append(logits)
    return torch.cat(made).float()
