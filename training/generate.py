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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from data.errors import DivergenceError
from training.decoding import DecodingState
from training.logprobs import Head, backbone_and_head
from training.models import is_lora
from training.packed import Packed
from training.trunk import Trunk, gather_states
from training.uncached import Recomputed, why_not

MAX_ROWS = 128
"""Answers decoded together; wider no longer pays on a CPU, and the cache grows with it."""


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

    def update(self, version: int) -> dict[str, float]:
        """The policy's weights have changed: answers from now on come from `version`, or this raises. Returns
        what was measured of it, for the metrics of the next step."""
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
        self._packed = Packed()
        self._uncached: str | None = None
        """Why the model decodes without a cache, empty where it has one; None: not tried yet."""

    def update(self, version: int) -> dict[str, float]:
        """Nothing to do: these are the trained weights."""
        return {}

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
            self._packed.in_place(self._model, min(size, len(prompts)) * group, max_new_tokens),
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
            ids, logps, length, went, known = self._decode(
                prompts, group, max_new_tokens, temperature, seeds, seen
            )
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
        return rows, gather_states(known, seen, length.view(-1, group).tolist(), went)

    def _decode(
        self,
        prompts: Sequence[list[int]],
        group: int,
        max_new_tokens: int,
        temperature: float,
        seeds: numpy.typing.NDArray[numpy.uint64],
        seen: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Ids and log-probabilities [max_new_tokens, N], lengths [N], which answers each step went on with,
        and the prompts' states."""
        backbone, head = backbone_and_head(self._model)
        state = self._state(backbone, head)
        logits, known = state.prefill(prompts, group, max_new_tokens, seen)
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
        return ids, logps, length, went, known

    def _state(self, backbone: nn.Module, head: Head) -> DecodingState | Recomputed:
        """A cache, where it gives the trainer's numbers."""
        state = DecodingState(backbone, head, self._pad)
        if not state.plain:
            return state
        if self._uncached is None:
            self._uncached = why_not(DecodingState, backbone, head, self._pad)
            if self._uncached:
                print(
                    f"this model's cache can't be used, {self._uncached}; each token of an answer computes "
                    "the whole sequence anew",
                    flush=True,
                )
        return Recomputed(backbone, head, self._pad) if self._uncached else state


def choose(
    logits: Float[Tensor, "N V"], temperature: float, draw: Float[Tensor, " N"] | None
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """A token a row and its log-probability: by inverting the cumulative distribution, or the top one.

    `logits` is used up."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if draw is None:
        logp = logits.log_softmax(-1)
        token = logp.argmax(-1)
        best = logp.gather(-1, token[:, None])[:, 0]
        _require_finite(best)
        return token, best
    # In place: a tensor [N, V] of 49,152 columns takes longer to allocate than to compute.
    logits = logits.div_(temperature)
    chances = logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
    cumulative = chances.cumsum(-1)
    total = cumulative[:, -1:]
    _require_finite(total)
    # Below the total even after rounding: the token found has a probability above zero.
    target = torch.minimum((draw[:, None] * total).to(total.dtype), total.nextafter(torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, target, right=True)
    return token[:, 0], chances.gather(-1, token)[:, 0].log()


def _require_finite(found: Tensor) -> None:
    """DivergenceError unless a row's logits have given a distribution."""
    if not bool(found.isfinite().all()):
        raise DivergenceError(
            "the policy's logits are not finite, so nothing can be sampled: it has diverged; lower lr "
            "(optimize.lr), or go back to a model whose weights are finite"
        )


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
