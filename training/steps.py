"""Answers in steps, for a model that scores each step [2305.20050].

Steps are tokenised apart, the separator at the head of each but the first, so that the ids up to a step's
end are the same whatever follows. A step's score is read at its last token: a causal LM knows the steps
before it there, and none after it. What does not fit into max_length is not read; of the prompt, the left
part goes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from data.records import Message
from training.batches import Batch, Tree, collate, plan
from training.chat import encode_answer, encode_prompt
from training.device import autocast, device

if TYPE_CHECKING:
    from training.score import ScoreModel

Split = Literal["paragraph", "line"]
SEPARATORS: dict[Split, str] = {"paragraph": "\n\n", "line": "\n"}
_CUTS = {"paragraph": re.compile(r"\n\s*\n"), "line": re.compile(r"\n")}


@dataclass(frozen=True)
class StepBatch:
    """Answers of a batch, and where their steps end."""

    batch: Batch
    at: Int[Tensor, "N S"]
    """Position in the batch's flattened [B * T] of the last token of each step; 0 where there is none."""
    mask: Bool[Tensor, "N S"]
    """True on steps."""

    def to(self, where: torch.device) -> StepBatch:
        """The same answers on a device."""
        return StepBatch(self.batch.to(where), self.at.to(where), self.mask.to(where))


def split_steps(answer: str, split: Split) -> list[str]:
    """The steps of a text, without the white space around them; [] when there is nothing but white space."""
    pieces = (piece.strip() for piece in _CUTS[split].split(answer))
    return [piece for piece in pieces if piece]


def encode_steps(
    tok: Any, messages: Sequence[Message], steps: Sequence[str], split: Split, max_length: int
) -> tuple[list[int], list[list[int]]]:
    """Ids of the prompt and of each step that fits; the first step is cut when not even it does."""
    room, parts = max_length - 1, list[list[int]]()
    for number, step in enumerate(steps):
        ids = encode_answer(tok, (SEPARATORS[split] if number else "") + step.strip())[:-1]
        if len(ids) > room:
            if not number:
                parts.append(ids[:room])
            break
        parts.append(ids)
        room -= len(ids)
    keep = max_length - sum(map(len, parts))
    return encode_prompt(tok, messages)[-keep:], parts


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    """Ids of the whole answer."""
    return [token for part in parts for token in part]


def step_ends(parts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of the answer up to the end of each step."""
    return [sum(map(len, parts[: number + 1])) for number in range(len(parts))]


def step_batch(trees: Sequence[Tree], ends: Sequence[Sequence[int]], pad_id: int, shared: bool) -> StepBatch:
    """Tensors of some trees; `ends` (see step_ends) of each answer, in order of trees and answers."""
    batch = collate(trees, pad_id, shared)
    mask = torch.zeros(len(ends), max(map(len, ends)), dtype=torch.bool)
    at = torch.zeros(mask.shape, dtype=torch.long)
    lengths = batch.mask.sum(1).tolist()
    for number, own in enumerate(ends):
        for step, end in enumerate(own):
            # The position that predicts token `end` is that of the token before it.
            at[number, step] = batch.source[number, end] if end < lengths[number] else batch.last[number]
        mask[number, : len(own)] = True
    return StepBatch(batch, at, mask)


def score_steps(
    model: ScoreModel, rows: Sequence[tuple[Sequence[Message], Sequence[str]]], token_budget: int = 8192
) -> tuple[Float[Tensor, "M N S"], Bool[Tensor, "N S"]]:
    """Score of each step by each member, in log odds of being right, and which steps were read; on the
    CPU."""
    split = model.process["split"]
    encoded = [encode_steps(model.tok, prompt, steps, split, model.max_length) for prompt, steps in rows]
    ends = [step_ends(parts) for _, parts in encoded]
    width = max(1, *map(len, ends)) if ends else 1
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    scores = torch.zeros(len(model.members), len(rows), width)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (prompt, parts) in enumerate(encoded):
        if parts:
            groups.setdefault(tuple(prompt), []).append(index)
    items = list(groups.values())
    trees = [
        Tree("", list(prompt), [joined(encoded[index][1]) for index in item])
        for prompt, item in groups.items()
    ]
    with torch.no_grad():
        for part in plan(trees, token_budget, model.shared) if trees else []:
            order = [index for item in part for index in items[item]]
            own = [ends[index] for index in order]
            batch = step_batch([trees[item] for item in part], own, int(model.tok.pad_token_id), model.shared)
            mask[order, : batch.mask.shape[1]] = batch.mask
            for number, member in enumerate(model.members):
                with autocast(model.precision):
                    found = member(batch.to(device()))[..., 0].cpu()
                scores[number, order, : found.shape[1]] = found
    return scores, mask
