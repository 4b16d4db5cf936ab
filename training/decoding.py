"""The inside of the built-in generator: prompts computed once, a cache that answers share, grow in and leave.

Prompts that open alike (a system message, the template) have that opening computed once; the rest is computed
in batches of like length, padded on the right, where causal attention needs no other mask. Keys and values
then lie with their ends aligned, a row an answer, with room for the whole answer: nothing is reallocated as
answers grow, and one that ends gives its place to the last row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from training.batches import cannot_share, fill
from training.logprobs import Head

CACHE_NAMES = ("past_key_values", "cache", "cache_params")
"""What models call the argument for their cache."""
MIN_PREFIX = 8
"""Tokens that prompts must open with alike before these are computed apart."""
PREFILL_TOKENS = 768
"""Prompt tokens computed together: enough rows for a matrix product, little padding."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer in a buffer [N, heads, room, width], filled up to `used`."""

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        super().__init__()
        self._keys, self._values, self.used = keys, values, used
        self.is_initialized = True
        self.keys, self.values = keys[:, :, :used], values[:, :, :used]

    @classmethod
    def like(cls, layer: Any, rows: int, columns: int, used: int) -> RoomyLayer:
        """An empty buffer for the shapes of another layer."""
        blank = [
            torch.zeros(rows, old.shape[1], columns, old.shape[3], dtype=old.dtype, device=old.device)
            for old in (layer.keys, layer.values)
        ]
        return cls(blank[0], blank[1], used)

    def put(self, rows: slice, columns: slice, layer: Any, row: int, length: int) -> None:
        """Copies the first `length` columns of a row of another layer into a block of this one."""
        self._keys[rows, :, columns] = layer.keys[row, :, :length]
        self._values[rows, :, columns] = layer.values[row, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Writes the new positions behind the old ones and returns all."""
        end = self.used + key_states.shape[2]
        self._keys[:, :, self.used : end] = key_states
        self._values[:, :, self.used : end] = value_states
        self.used = end
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def keep(self, order: Tensor) -> None:
        """Goes on with these rows: those that stay where they are cost nothing."""
        count = len(order)
        moved = (order != torch.arange(count, device=order.device)).nonzero()[:, 0]
        for whole in (self._keys, self._values):
            whole[moved, :, : self.used] = whole[order[moved], :, : self.used]
        self._keys, self._values = self._keys[:count], self._values[:count]
        self.keys, self.values = self.keys[:count], self.values[:count]


class DecodingState:
    """Cache, mask and positions of a batch of answers that grow token by token."""

    def __init__(self, backbone: nn.Module, head: Head, pad_id: int) -> None:
        self._backbone, self._head, self._pad = backbone, head, pad_id
        self._device = next(backbone.parameters()).device
        names = inspect.signature(backbone.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])
        self._takes_positions = "position_ids" in names
        self.plain = cannot_share(backbone) is not None
        """Recurrent layers, sliding windows and the like: transformers' own cache and masks."""
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._next = torch.zeros(0, dtype=torch.long)
        self._width = 0

    def prefill(
        self, prompts: Sequence[list[int]], group: int, room: int, seen: list[Tensor]
    ) -> tuple[Float[Tensor, "N V"], list[Tensor]]:
        """Logits of each answer's first token. `seen`: where the trunk's states of a forward pass turn up, if
        they are recorded; those of the prompts are taken from there and returned, one a prompt."""
        if self.plain:
            return self._prefill_plain(prompts, group, room), []
        self._width = max(map(len, prompts))
        count = len(prompts) * group
        last: dict[int, Tensor] = {}
        states: dict[int, Tensor] = {}
        for prefix, indices in openings(prompts):
            opening, known = self._opening(prompts[indices[0]][:prefix], seen)
            for part in fill([[len(prompts[index]) - prefix] for index in indices], PREFILL_TOKENS):
                mine = [indices[place] for place in part]
                cache, hidden = self._rest([prompts[index][prefix:] for index in mine], opening, prefix)
                block = seen.pop() if seen else None
                for row, index in enumerate(mine):
                    length = len(prompts[index])
                    last[index] = hidden[row, length - prefix - 1]
                    self._settle(cache, row, index, length, group, count, room)
                    if block is not None:
                        states[index] = torch.cat([*known, block[row, : length - prefix]])
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        filled = torch.arange(self._width, device=self._device) >= (self._width - lengths)[:, None]
        mask = torch.cat([filled, filled.new_ones(len(prompts), room)], 1)
        self._mask = mask.repeat_interleave(group, 0)
        self._next = lengths.repeat_interleave(group)
        logits = self._head(torch.stack([last[index] for index in range(len(prompts))]))
        order = range(len(prompts)) if states else range(0)
        return logits.repeat_interleave(group, 0), [states[index] for index in order]

    def _opening(self, ids: list[int], seen: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Cache of what some prompts open with, and its states."""
        if not ids:
            return None, []
        cache = DynamicCache(config=self._backbone.config)
        positions = torch.arange(len(ids), device=self._device)[None]
        self._forward(torch.tensor([ids], device=self._device), positions, None, cache)
        return cache, [seen.pop()[0]] if seen else []

    def _rest(self, rows: Sequence[list[int]], opening: Any, prefix: int) -> tuple[Any, Tensor]:
        """Cache and hidden states of prompts after their common opening, padded on the right."""
        width = max(map(len, rows))
        ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in rows], device=self._device)
        positions = torch.arange(prefix, prefix + width, device=self._device).expand(len(rows), width)
        if opening is None:
            cache = DynamicCache(config=self._backbone.config)
            return cache, self._forward(ids, positions, None, cache)
        layers = [RoomyLayer.like(layer, len(rows), prefix + width, prefix) for layer in opening.layers]
        for new, old in zip(layers, opening.layers, strict=True):
            new.put(slice(None), slice(prefix), old, 0, prefix)
        cache = Cache(layers=layers)
        query, key = positions[0, :, None], torch.arange(prefix + width, device=self._device)
        mask = (key <= query).expand(len(rows), 1, width, prefix + width)
        return cache, self._forward(ids, positions, mask, cache)

    def _settle(
        self, cache: Any, row: int, index: int, length: int, group: int, count: int, room: int
    ) -> None:
        """Gives each sample of a prompt its copy of the keys and values, ends aligned."""
        if self._cache is None:
            columns = self._width + room
            self._cache = Cache(
                layers=[RoomyLayer.like(layer, count, columns, self._width) for layer in cache.layers]
            )
        samples, place = slice(index * group, (index + 1) * group), slice(self._width - length, self._width)
        for new, old in zip(self._cache.layers, cache.layers, strict=True):
            new.put(samples, place, old, row, length)

    def _prefill_plain(self, prompts: Sequence[list[int]], group: int, room: int) -> Tensor:
        """Every sample's prompt, padded on the left, in a cache of transformers' making."""
        ids, present = pad_left([prompt for prompt in prompts for _ in range(group)], self._pad, self._device)
        self._cache = DynamicCache(config=self._backbone.config)
        self._mask = torch.cat([present, present.new_ones(len(ids), room)], 1)
        self._next = present.sum(1)
        hidden = self._forward(ids, present.cumsum(1).sub(1).clamp(min=0), present, self._cache)
        self._width = ids.shape[1]
        return self._head(hidden[:, -1])

    def step(self, token: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Logits after one more token a row."""
        self._width += 1
        mask = self._mask[:, : self._width]
        hidden = self._forward(
            token[:, None], self._next[:, None], mask if self.plain else mask[:, None, None], self._cache
        )
        self._next = self._next + 1
        return self._head(hidden[:, -1])

    def keep(self, order: Int[Tensor, " K"]) -> None:
        """Goes on with these rows, in this order."""
        for layer in self._cache.layers:
            if self.plain:
                layer.reorder_cache(order)
            else:
                layer.keep(order)
        self._mask, self._next = self._mask[order], self._next[order]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True, self._cache_name: cache}
        if self._takes_positions:
            inputs["position_ids"] = positions
        hidden: Tensor = self._backbone(**inputs).last_hidden_state
        return hidden


def openings(prompts: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
    """Prompts that open alike: length of what they share, and which they are."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        alike.setdefault(tuple(prompt[:MIN_PREFIX]), []).append(index)
    found = [(common_prefix([prompts[index] for index in each]), each) for each in alike.values()]
    lone = [index for prefix, each in found if not prefix for index in each]
    return [pair for pair in found if pair[0]] + ([(0, sorted(lone))] if lone else [])


def common_prefix(prompts: Sequence[list[int]]) -> int:
    """Tokens that all prompts open with, at most the shortest less one; 0 where that is no gain."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    length = next((at for at in range(limit) if first[at] != last[at]), limit)
    return length if length >= MIN_PREFIX else 0


def pad_left(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "N W"], Bool[Tensor, "N W"]]:
    """Ids with their ends aligned, and where they are real."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device) >= (width - lengths)[:, None]
