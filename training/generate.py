"""Answers by sampling, with the log-probability of every token at the sampling temperature.

What makes the built-in generator fast: each distinct prompt is computed once and its cache copied to its
samples; the part that all prompts open with (a system message, say) is computed once for all of them; the
cache is allocated once a batch, not grown at each token; finished answers leave the batch.

Training samples the full softmax at T: no top-k, top-p or min-p, whose renormalised distribution would not be
the one that the loss differentiates. The random number of a token is a hash of (seed, step, prompt key,
sample, position), so neither batch, nor rank, nor the order of prompts changes an answer (beyond the last bit
of a matrix product: about one token in a million lies that close to a boundary).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from training.batches import cannot_share
from training.logprobs import Head, backbone_and_head
from training.models import is_lora
from training.trunk import Trunk, gather_states

MAX_ROWS = 128
"""Answers decoded together; wider no longer pays on a CPU, and the cache grows with it."""
MIN_PACKED = 8192
"""Rows of an LM head from which packing it pays."""
PACKED_ROWS = 64
"""Answers that the packed layout is made for; it works for any number."""
MIN_PREFIX = 8
"""Tokens that all prompts must open with before they are computed apart."""


@dataclass
class Rollout:
    """Answers as prompt x sample; EOS is part of an answer where it was met."""

    answers: list[list[list[int]]] = field(default_factory=list)
    logp: list[list[list[float]]] = field(default_factory=list)
    """Of every token, from the float32 softmax at the sampling temperature (1 when greedy)."""
    finished: list[list[bool]] = field(default_factory=list)
    """False: cut at max_new_tokens."""
    states: list[Tensor] | None = None
    """A prompt: hidden states of its tree below the trained layers (training/trunk.py), where recorded."""


class Generator(Protocol):
    """What the on-policy program asks of an engine that generates."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        group: int,
        *,
        max_new_tokens: int,
        temperature: float,
        keys: Sequence[str] | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Rollout:
        """`group` answers to each prompt; `keys` name the prompts for the random numbers (default: their
        ids)."""
        ...

    def update(self, version: int) -> None:
        """The policy's weights have changed: answers from now on come from `version`, or this raises."""
        ...


class BuiltinGenerator:
    """Generates with the very module that is trained."""

    def __init__(
        self,
        model: nn.Module,
        stop_ids: Sequence[int],
        pad_id: int,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        gathered: Callable[[], AbstractContextManager[Any]] = nullcontext,
        max_rows: int = MAX_ROWS,
        trunk: Trunk | None = None,
    ) -> None:
        """`gathered` makes sharded weights whole (ZeRO-3), so that ranks need not keep in step. `trunk`: what
        it computes below the trained layers is kept for the trainer."""
        self._model: Any = model
        self._stops = torch.tensor(sorted(set(stop_ids)))
        self._pad = pad_id
        self._autocast = autocast
        self._gathered = gathered
        self._max_rows = max_rows
        self.trunk = trunk
        self._packed = PackedHead()

    def update(self, version: int) -> None:
        """Nothing to do: these are the trained weights."""

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[list[int]],
        group: int,
        *,
        max_new_tokens: int,
        temperature: float,
        keys: Sequence[str] | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Rollout:
        """See `Generator`; temperature 0 takes the likeliest token."""
        assert prompts and group >= 1 and max_new_tokens >= 1 and temperature >= 0 and all(prompts)
        keys = [prompt_key(prompt) for prompt in prompts] if keys is None else keys
        blank = [[] for _ in prompts]  # type: list[list[Any]]
        rollout = Rollout([list(x) for x in blank], [list(x) for x in blank], [list(x) for x in blank])
        states: dict[int, Tensor] = {}
        # Prompts of like length together: less padding, and one row's samples never part.
        order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
        size = max(1, self._max_rows // group)
        with (
            self._gathered(),
            evaluating(self._model),
            merged(self._model),
            self._packed.in_place(self._model),
            self._autocast(),
        ):
            for start in range(0, len(order), size):
                part = order[start : start + size]
                seeds = numpy.array(
                    [row_seed(seed, step, keys[index], sample) for index in part for sample in range(group)],
                    dtype=numpy.uint64,
                )
                texts = [prompts[index] for index in part]
                rows, known = self._batch(texts, group, max_new_tokens, temperature, seeds)
                states |= dict(zip(part, known, strict=False))
                for row, (ids, logp, finished) in enumerate(rows):
                    index = part[row // group]
                    rollout.answers[index].append(ids)
                    rollout.logp[index].append(logp)
                    rollout.finished[index].append(finished)
        rollout.states = [states[index] for index in range(len(prompts))] if self.trunk else None
        return rollout

    def _batch(
        self,
        prompts: Sequence[list[int]],
        group: int,
        max_new_tokens: int,
        temperature: float,
        seeds: numpy.typing.NDArray[numpy.uint64],
    ) -> tuple[list[tuple[list[int], list[float], bool]], list[Tensor]]:
        """Answers of some prompts that fit together: ids, log-probabilities, whether it ended by itself; and
        the trunk's states."""
        record: AbstractContextManager[list[Tensor]] = (
            self.trunk.recording() if self.trunk else nullcontext([])
        )
        with record as seen:
            ids, logps, length, went = self._decode(prompts, group, max_new_tokens, temperature, seeds)
        rows = [
            (
                ids[: length[row], row].tolist(),
                logps[: length[row], row].tolist(),
                bool(torch.isin(ids[length[row] - 1, row], self._stops)),
            )
            for row in range(len(length))
        ]
        if not self.trunk:
            return rows, []
        lengths = length.view(-1, group).tolist()
        return rows, gather_states(seen, prompts, lengths, went)

    def _decode(
        self,
        prompts: Sequence[list[int]],
        group: int,
        max_new_tokens: int,
        temperature: float,
        seeds: numpy.typing.NDArray[numpy.uint64],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Ids and log-probabilities [max_new_tokens, N], lengths [N], and which answers each step went on
        with."""
        backbone, head = backbone_and_head(self._model)
        state = DecodingState(backbone, head, self._pad)
        logits = state.prefill(prompts, group, max_new_tokens)
        device = logits.device
        stops = self._stops.to(device)
        count = len(prompts) * group
        ids = torch.zeros(max_new_tokens, count, dtype=torch.long)
        logps = torch.zeros(max_new_tokens, count)
        length = torch.full((count,), max_new_tokens)
        active = torch.arange(count)
        went: list[Tensor] = []
        for position in range(max_new_tokens):
            draw = None if temperature == 0 else torch.from_numpy(uniforms(seeds[active.numpy()], position))
            token, logp = choose(logits, temperature, None if draw is None else draw.to(device))
            ids[position, active] = token.cpu()
            logps[position, active] = logp.float().cpu()
            ended = torch.isin(token, stops).cpu()
            length[active[ended]] = position + 1
            going = ~ended
            if position + 1 == max_new_tokens or not bool(going.any()):
                break
            if bool(ended.any()):
                order = close_ranks(ended)
                active = active[order]
                token = token[order.to(device)]
                state.keep(order.to(device))
            went.append(active)
            logits = state.step(token)
        return ids, logps, length, went


def choose(
    logits: Float[Tensor, "N V"], temperature: float, draw: Float[Tensor, " N"] | None
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """A token a row and its log-probability: by inverting the cumulative distribution, or the top one.

    `logits` is used up."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if draw is None:
        logp = logits.log_softmax(-1)
        token = logp.argmax(-1)
        return token, logp.gather(-1, token[:, None])[:, 0]
    # In place: a tensor [N, V] of 49,152 columns takes longer to allocate than to compute.
    logits = logits.div_(temperature)
    chances = logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
    cumulative = chances.cumsum(-1)
    total = cumulative[:, -1:]
    # Below the total even after rounding: the token found has a probability above zero.
    target = torch.minimum((draw[:, None] * total).to(total.dtype), total.nextafter(torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, target, right=True)
    return token[:, 0], chances.gather(-1, token)[:, 0].log()


def close_ranks(ended: Bool[Tensor, " N"]) -> Int[Tensor, " K"]:
    """The rows that go on, in an order that moves few: the last ones fill the places of those that ended."""
    count = int((~ended).sum())
    order = torch.arange(count)
    order[ended[:count]] = torch.arange(count, len(ended))[~ended[count:]]
    return order


# -- random numbers ------------------------------------------------------------------------------------------


def prompt_key(prompt: Sequence[int]) -> str:
    """Name of a prompt that has no other: the digest of its ids."""
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()[:16]


def row_seed(seed: int, step: int, key: str, sample: int) -> int:
    """64 bits for one answer; its tokens count on from there."""
    text = f"{seed}\0{step}\0{key}\0{sample}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def uniforms(seeds: numpy.typing.NDArray[numpy.uint64], position: int) -> numpy.typing.NDArray[numpy.float64]:
    """One number in [0, 1) a row: output `position` of a SplitMix64 stream of its own."""
    z = seeds + numpy.uint64((position + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    z = z ^ (z >> numpy.uint64(31))
    return (z >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53


# -- the model while it generates ----------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, caches on, and back as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def merged(model: Any) -> Iterator[None]:
    """Adapters folded into the weights for as long as it generates, the very old tensors back afterwards.

    Folding and unfolding in place would leave rounding behind. A bfloat16 base is left alone: its rounding
    would be larger than what the adapters say.
    """
    swapped: list[tuple[nn.Parameter, Tensor]] = []
    layers = [part for part in model.modules() if hasattr(part, "lora_A") and hasattr(part, "base_layer")]
    simple = all(
        part.base_layer.weight.dtype in (torch.float32, torch.float64)
        and part.base_layer.weight.numel()
        and set(part.lora_A) == {"default"}
        and hasattr(part, "get_delta_weight")
        for part in layers
    )
    if not is_lora(model) or not layers or not simple:
        yield
        return
    try:
        for part in layers:
            weight = part.base_layer.weight
            swapped.append((weight, weight.data))
            weight.data = weight.data + part.get_delta_weight("default").to(weight.dtype)
        with model.disable_adapter():
            yield
    finally:
        for weight, data in swapped:
            weight.data = data


class PackedHead:
    """The LM head in the layout that a CPU multiplies best while few rows are decoded.

    It is the one matrix that fits in no cache: packed, 57 GFLOP/s were measured where the ordinary layout
    gave 31 (64 rows, one thread, 49152 x 576). Small heads, other devices and types are left alone.
    """

    def __init__(self) -> None:
        self._known: tuple[int, int] | None = None
        self._weight: Tensor | None = None

    @contextmanager
    def in_place(self, model: Any) -> Iterator[None]:
        """The model's head computes with the packed weights for as long as this lasts."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        linear = inner.get_output_embeddings()
        weight: Tensor = linear.weight
        usable = (
            type(linear) is nn.Linear
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.shape[0] >= MIN_PACKED
            and getattr(linear, "bias", None) is None
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )
        if not usable:
            yield
            return
        # The version counts changes in place: a head that learns is packed again after each step.
        known = (weight.data_ptr(), weight._version)
        if known != self._known:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)
            self._known = known
        linear.forward = self._multiply
        try:
            yield
        finally:
            del linear.forward

    def _multiply(self, hidden: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            hidden = hidden.float()
        logits: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, None, "none", [], "")
        return logits


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer in a buffer that has room for the whole answer."""

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        super().__init__()
        self._keys, self._values, self.used = keys, values, used
        self.is_initialized = True
        self.keys, self.values = keys[:, :, :used], values[:, :, :used]

    @classmethod
    def like(cls, keys: Tensor, values: Tensor, rows: Tensor, room: int) -> RoomyLayer:
        """Chosen rows (repeated, too) of some keys and values, with room for more positions."""
        used = keys.shape[2]
        roomy = [
            torch.empty(
                len(rows), old.shape[1], used + room, old.shape[3], dtype=old.dtype, device=old.device
            )
            for old in (keys, values)
        ]
        for new, old in zip(roomy, (keys, values), strict=True):
            new[:, :, :used] = old[rows]
        return cls(roomy[0], roomy[1], used)

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
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._takes_positions = "position_ids" in names
        self._plain = cannot_share(backbone) is not None
        """Recurrent layers, sliding windows and the like: transformers' own cache and masks."""
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._next = torch.zeros(0, dtype=torch.long)

    def prefill(self, prompts: Sequence[list[int]], group: int, room: int) -> Float[Tensor, "N V"]:
        """Computes each prompt once, spreads it over its samples; logits of the first token."""
        rows = torch.arange(len(prompts), device=self._device).repeat_interleave(group)
        if self._plain:
            return self._prefill_plain(prompts, rows, room)
        prefix = common_prefix(prompts)
        cache: Any = None
        if prefix:
            opening = torch.tensor([prompts[0][:prefix]], device=self._device)
            cache = DynamicCache(config=self._backbone.config)
            self._forward(opening, torch.arange(prefix, device=self._device)[None], None, cache)
        rest = [prompt[prefix:] for prompt in prompts]
        ids, present = pad_left(rest, self._pad, self._device)
        width = ids.shape[1]
        spread = torch.zeros(len(prompts), dtype=torch.long, device=self._device)
        if prefix:
            cache = Cache(layers=[RoomyLayer.like(x.keys, x.values, spread, width) for x in cache.layers])
        else:
            cache = DynamicCache(config=self._backbone.config)
        positions = prefix + present.cumsum(1).sub(1).clamp(min=0)
        opened = torch.ones(len(prompts), prefix, dtype=torch.bool, device=self._device)
        seen = torch.cat([opened, present], 1)
        hidden = self._forward(ids, positions, prefill_mask(seen, width), cache)
        self._mask = torch.cat([seen, seen.new_ones(len(prompts), room)], 1)[rows]
        self._next = torch.tensor([len(prompt) for prompt in prompts], device=self._device)[rows]
        self._cache = Cache(layers=[RoomyLayer.like(x.keys, x.values, rows, room) for x in cache.layers])
        logits: Tensor = self._head(hidden[:, -1])
        return logits[rows]

    def _prefill_plain(self, prompts: Sequence[list[int]], rows: Tensor, room: int) -> Tensor:
        """Every sample's prompt, padded on the left, in a cache of transformers' making."""
        ids, present = pad_left([prompts[int(row)] for row in rows], self._pad, self._device)
        self._cache = DynamicCache(config=self._backbone.config)
        self._mask = torch.cat([present, present.new_ones(len(rows), room)], 1)
        self._next = present.sum(1)
        hidden = self._forward(ids, present.cumsum(1).sub(1).clamp(min=0), present, self._cache)
        self._width = ids.shape[1]
        return self._head(hidden[:, -1])

    def step(self, token: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Logits after one more token a row."""
        seen = self._seen() + 1
        mask = self._mask[:, :seen] if self._plain else self._mask[:, None, None, :seen]
        hidden = self._forward(token[:, None], self._next[:, None], mask, self._cache)
        self._next = self._next + 1
        self._width = seen
        return self._head(hidden[:, -1])

    def _seen(self) -> int:
        return self._width if self._plain else int(self._cache.layers[0].used)

    def keep(self, rows: Int[Tensor, " K"]) -> None:
        """Drops finished rows."""
        if self._plain:
            for layer in self._cache.layers:
                layer.batch_select_indices(rows)
        else:
            for layer in self._cache.layers:
                layer.keep(rows)
        self._mask, self._next = self._mask[rows], self._next[rows]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True, self._cache_name: cache}
        if self._takes_positions:
            inputs["position_ids"] = positions
        hidden: Tensor = self._backbone(**inputs).last_hidden_state
        return hidden


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


def prefill_mask(seen: Bool[Tensor, "N S"], width: int) -> Bool[Tensor, "N 1 W S"]:
    """Causal over the last `width` positions and blind to padding; padding sees itself, no row is empty."""
    total = seen.shape[1]
    query = torch.arange(total - width, total, device=seen.device)[:, None]
    key = torch.arange(total, device=seen.device)[None]
    allowed = (key <= query) & seen[:, None, :] | (key == query)
    return allowed[:, None]
