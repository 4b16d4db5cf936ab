"""Prompts and answers as tensors: each prompt once, batches filled by tokens.

A tree is a prompt with its answers: one for a demonstration, two for a pair, G for a group. `shared` lays a
tree out once, prompt first and then its answers side by side; each answer sees the prompt and itself, and
counts its positions from the prompt's end, so that every number equals that of separate rows. Shared trees
lie one after the other in a single row without padding (training/tree_attention.py). Whatever the layout, all
that a loss reads is [N, R]: N answers in order of trees, R the longest answer.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from training.models import dropouts, has_experts
from training.tree_attention import NAME, Layout


@dataclass(frozen=True)
class Tree:
    """A prompt and its answers, as ids; every answer has at least its end of turn."""

    key: str
    prompt: list[int]
    answers: list[list[int]]


@dataclass(frozen=True)
class Batch:
    """Tensors of one micro batch. B rows of T positions; N answers of at most R tokens."""

    input_ids: Int[Tensor, "B T"]
    position_ids: Int[Tensor, "B T"]
    layout: Layout | None
    """Of a row of trees, what attention must know; None: plain causal, padding on the right."""
    padding: Bool[Tensor, "B T"]
    """True on padding."""
    source: Int[Tensor, "N R"]
    """Position in the flattened [B * T] whose hidden state predicts the answer's token."""
    targets: Int[Tensor, "N R"]
    mask: Bool[Tensor, "N R"]
    last: Int[Tensor, " N"]
    """Position in [B * T] of each answer's last token."""
    tree: Int[Tensor, " N"]
    """Which tree of the batch an answer belongs to."""
    tokens: int
    """Real tokens that are computed."""

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        moved: dict[str, Any] = {
            field.name: value.to(device) if isinstance(value, Tensor) else value
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
        }
        return type(self)(**moved)


def row_lengths(tree: Tree, shared: bool) -> list[int]:
    """Lengths of the rows that a tree becomes."""
    if shared:
        return [len(tree.prompt) + sum(map(len, tree.answers))]
    return [len(tree.prompt) + len(answer) for answer in tree.answers]


def plan(trees: Sequence[Tree], token_budget: int, shared: bool) -> list[list[int]]:
    """Micro batches as indices of trees, longest first (memory's worst case comes at once): all that is
    computed, padding included, <= budget.

    A tree is never cut in two; one that is over the budget by itself is a batch of its own.
    """
    return fill([row_lengths(tree, shared) for tree in trees], token_budget, padded=not shared)


def fill(lengths: Sequence[Sequence[int]], token_budget: int, padded: bool = True) -> list[list[int]]:
    """Groups items, each with the lengths of its rows, so that what is computed stays within the budget:
    rows * longest row, or the sum of the rows where they are not padded."""
    order = sorted(range(len(lengths)), key=lambda index: (-max(lengths[index]), index))
    batches: list[list[int]] = []
    taken = longest = 0
    for index in order:
        more = len(lengths[index]) if padded else sum(lengths[index])
        if not batches or (taken + more) * (longest if padded else 1) > token_budget:
            batches.append([])
            taken, longest = 0, max(lengths[index])
        batches[-1].append(index)
        taken += more
    return batches


def deal(batches: Sequence[list[int]], rank: int, world: int) -> list[tuple[list[int], bool]]:
    """A rank's share of a step's micro batches, and whether each counts.

    Ranks must enter each collective equally often, so a rank that is one short computes the first batch
    again with weight zero.
    """
    mine: list[tuple[list[int], bool]] = []
    for start in range(0, len(batches), world):
        at = start + rank
        mine.append((batches[at], True) if at < len(batches) else (batches[0], False))
    return mine


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """Order of the rows in an epoch, a pure function of seed and epoch: a resumed run needs no saved
    order."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return [int(index) for index in torch.randperm(count, generator=generator)]


def step_rows(count: int, batch: int, seed: int, step: int) -> list[int]:
    """Rows of an optimizer step (from 0): the epoch's order cut into batches, a short one at its end."""
    epoch, at = divmod(step, steps_per_epoch(count, batch))
    return epoch_order(count, seed, epoch)[at * batch : (at + 1) * batch]


def steps_per_epoch(count: int, batch: int) -> int:
    """Optimizer steps an epoch, the partial last batch included."""
    return -(-count // batch)


def collate(trees: Sequence[Tree], pad_id: int, shared: bool) -> Batch:
    """Tensors of some trees: one row of them all, or a row an answer, padded on the right."""
    assert trees and all(tree.prompt and tree.answers and all(tree.answers) for tree in trees)
    rows = [[(tree.prompt, tree.answers) for tree in trees]] if shared else [
        [(tree.prompt, [answer])] for tree in trees for answer in tree.answers
    ]  # fmt: skip
    width = max(sum(len(prompt) + sum(map(len, answers)) for prompt, answers in row) for row in rows)
    longest = max(len(answer) for tree in trees for answer in tree.answers)
    count = sum(len(tree.answers) for tree in trees)
    ids = torch.full((len(rows), width), pad_id)
    # Padding of plain rows goes on counting: a position that fell back would read as a second, packed
    # sequence.
    positions = torch.arange(width).repeat(len(rows), 1)
    padding = torch.ones(len(rows), width, dtype=torch.bool)
    source, targets = (
        torch.zeros(count, longest, dtype=torch.long),
        torch.zeros(count, longest, dtype=torch.long),
    )
    mask = torch.zeros(count, longest, dtype=torch.bool)
    last = torch.zeros(count, dtype=torch.long)
    owner = torch.tensor([index for index, tree in enumerate(trees) for _ in tree.answers])
    number = 0
    for row, parts in enumerate(rows):
        at = 0
        for prompt, answers in parts:
            cue = at + len(prompt)
            ids[row, at:cue] = torch.tensor(prompt)
            positions[row, at:cue] = torch.arange(len(prompt))
            at = cue
            for answer in answers:
                end = at + len(answer)
                ids[row, at:end] = torch.tensor(answer)
                positions[row, at:end] = torch.arange(len(prompt), len(prompt) + len(answer))
                source[number, : len(answer)] = row * width + torch.tensor([cue - 1, *range(at, end - 1)])
                targets[number, : len(answer)] = torch.tensor(answer)
                mask[number, : len(answer)] = True
                last[number] = row * width + end - 1
                number += 1
                at = end
        padding[row, :at] = False
    layout = tuple((len(tree.prompt), *map(len, tree.answers)) for tree in trees) if shared else None
    real = int((~padding).sum())
    return Batch(ids, positions, layout, padding, source, targets, mask, last, owner, real)


def cannot_share(model: Any) -> str | None:
    """Why this model must compute a prompt once an answer, or None when it may be shared."""
    config = getattr(model, "config", None)
    if config is None:
        return "the model has no config that could be checked"
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = set(getattr(config, "layer_types", None) or ())
    attention = getattr(config, "_attn_implementation", None)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = inspect.signature(getattr(inner, "base_model", inner).forward).parameters
    reasons = {
        "it takes no position_ids": "position_ids" not in forward,
        f"attention {attention} takes no 4-D mask": attention not in ("sdpa", "eager", NAME),
        f"layers of type {sorted(layers - {'full_attention'})}": bool(layers - {"full_attention"}),
        "sliding window": bool(getattr(config, "sliding_window", None))
        and getattr(config, "use_sliding_window", True),
        "local attention": "local" in (getattr(config, "attention_layers", None) or ()),
        "positions are distances (alibi)": getattr(config, "alibi", None) is True,
        "recurrent state": any(
            hasattr(config, name) for name in ("state_size", "mamba_d_state", "ssm_cfg", "rwkv")
        ),
        "mixture of experts: its auxiliary loss counts tokens": has_experts(config),
        "dropout above 0": bool(dropouts(model)),
    }
    return next((reason for reason, found in reasons.items() if found), None)
