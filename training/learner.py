"""Passes of the policy over a rollout: reference, old policy, and the update.

Everything is cut into micro batches by tokens, and every loss is divided by a count over the whole batch, so
how it is cut, and over how many ranks, does not show. Ranks enter every pass equally often: one that has
fewer micro batches computes its first one again with weight zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from training import kl, losses
from training.batches import Batch, Tree, collate, plan
from training.config_optimize import OptimizeParams
from training.device import autocast, device
from training.engine import Engine, StepInfo
from training.logprobs import answer_logprobs
from training.losses import AGGREGATION_OF, AGGREGATIONS, POLICY_LOSSES, needs
from training.memory import give_back
from training.models import Reference
from training.trunk import Trunk, lay_out

OPEN_BELOW = {"cispo"}
"""Algorithms whose ratio has no lower bound [2506.13585]."""


@dataclass
class Signals:
    """What an update learns from, [N, R] (or [N, 1]); rows as in the experience."""

    mask: Bool[Tensor, "N R"]
    advantage: Float[Tensor, "N #R"]
    ref_logp: Float[Tensor, "N R"]
    rollout_logp: Float[Tensor, "N R"]
    old_logp: Float[Tensor, "N R"] | None = None
    """None: there is one update a rollout, and the old policy is the present one."""
    old_value: Float[Tensor, "N R"] | None = None
    returns: Float[Tensor, "N R"] | None = None


@dataclass
class Rolled:
    """Prompts with their answers, and what the generator has kept of them (training/trunk.py)."""

    trees: Sequence[Tree]
    states: Sequence[Tensor] | None = None

    @property
    def group(self) -> int:
        return len(self.trees[0].answers)

    @property
    def count(self) -> int:
        return len(self.trees) * self.group


def rollout_gap(
    logp: Float[Tensor, "n r"], rollout_logp: Float[Tensor, "n r"], mask: Bool[Tensor, "n r"]
) -> tuple[float, float]:
    """Sum of |trainer's - generator's| log-probability, and over how many tokens: rounding when both have the
    same weights."""
    gap = torch.where(mask, (logp.detach() - rollout_logp).abs(), 0.0)
    return float(gap.sum()), float(mask.sum())


@dataclass
class Micro:
    """A micro batch and where its answers stand in the experience."""

    batch: Batch
    rows: Tensor
    weight: float
    hidden: Float[Tensor, "B T H"] | None
    """What enters the first trained layer, where it is known."""

    def take(self, value: Tensor) -> Tensor:
        """The micro batch's part of an [N, R] or [N, 1] tensor, on its device."""
        return value[self.rows, : self.batch.mask.shape[1]].to(self.batch.mask.device)


@dataclass
class Learner:
    """One policy with its engine and reference."""

    engine: Engine
    model: Any
    reference: Reference
    params: OptimizeParams
    pad_id: int
    shared: bool
    trunk: Trunk | None = None

    def micros(self, rolled: Rolled, indices: Sequence[int] | None = None) -> Iterator[Micro]:
        """Micro batches of some trees, equally many on every rank."""
        trees, states, group = rolled.trees, rolled.states, rolled.group
        chosen = list(range(len(trees))) if indices is None else list(indices)
        parts = [
            [chosen[place] for place in part]
            for part in plan([trees[index] for index in chosen], self.params.token_budget, self.shared)
        ]
        wanted = len(parts)
        if self.engine.world > 1:
            counts = [0.0] * self.engine.world
            counts[self.engine.rank] = float(len(parts))
            wanted = int(max(self.engine.sum(counts)))
        for number in range(wanted):
            part = parts[number] if number < len(parts) else (parts[0] if parts else [0])
            mine = [trees[index] for index in part]
            batch = collate(mine, self.pad_id, self.shared).to(device())
            rows = torch.tensor([index * group + sample for index in part for sample in range(group)])
            known = None
            if states is not None and self.trunk is not None:
                known = lay_out(mine, [states[index] for index in part], batch, self.shared)
            yield Micro(batch, rows, float(number < len(parts)), known)

    def entered(self, micro: Micro) -> AbstractContextManager[None]:
        """Within it a pass over the micro batch starts where the generator's states end."""
        return nullcontext() if self.trunk is None else self.trunk.entered(micro.hidden)

    def read(self, rolled: Rolled, width: int, module: Callable[[Batch], Any]) -> list[Tensor]:
        """Runs a module over all trees without gradient; its [n, r] tensors put together as [N, width]."""
        out: list[Tensor] = []
        with torch.no_grad(), autocast(self.params.precision):
            for micro in self.micros(rolled):
                with self.entered(micro):
                    values = module(micro.batch)
                out = out or [torch.zeros(rolled.count, width, dtype=value.dtype) for value in values]
                for whole, value in zip(out, values, strict=True):
                    whole[micro.rows, : value.shape[1]] = value.cpu()
        return out

    def ref_logp(self, rolled: Rolled, width: int) -> Float[Tensor, "N R"]:
        """Log-probabilities of the policy as it was at the start: adapters off, no second copy."""
        with self.reference as frozen:
            return self.read(
                rolled, width, lambda batch: answer_logprobs(frozen, batch, self.params.temperature)[:1]
            )[0]

    def old(self, rolled: Rolled, width: int) -> list[Tensor]:
        """Log-probabilities, and values where there is a critic, of the policy before the update."""

        def module(batch: Batch) -> list[Tensor]:
            logp, _, *value = self.engine.module(batch, self.params.temperature)
            return [logp, *value]

        return self.read(rolled, width, module)

    def update(
        self,
        rolled: Rolled,
        signals: Signals,
        indices: Sequence[int],
        beta: float,
        policy: float = 1.0,
    ) -> tuple[StepInfo, dict[str, float]]:
        """One optimizer step on some trees; `policy` 0 trains the value head only: nothing else moves, not
        even by weight decay."""
        group = rolled.group
        rows = torch.tensor([index * group + sample for index in indices for sample in range(group)])
        aggregation = self._aggregation(signals.mask[rows.long()])
        count, tokens = self.engine.sum([float(aggregation.units), float(signals.mask[rows.long()].sum())])
        count, tokens = max(count, 1.0), max(tokens, 1.0)
        names = ("loss", "ratio_clipped", "approx_kl", "rollout_gap", "compared")
        sums = dict.fromkeys((*names, "entropy_exact", "value_loss"), 0.0)
        busy = self._useful(signals, indices, group, beta)
        some = self.engine.sum([float(len(busy))])[0] > 0
        micros = list(self.micros(rolled, busy)) if some else []
        for number, micro in enumerate(micros, 1):
            with autocast(self.params.precision), self.entered(micro):
                loss, parts = self._loss(micro, signals, beta, policy, count, tokens)
            self.engine.backward(loss * micro.weight, last=number == len(micros))
            for name, value in parts.items():
                sums[name] += value * micro.weight
        total = dict(zip(sums, self.engine.sum(list(sums.values())), strict=True))
        compared, gap = total.pop("compared"), total.pop("rollout_gap")
        # Nothing is compared where no answer teaches anything.
        total |= {"rollout_gap": gap / compared} if compared else {}
        if not some:
            return self.engine.skip(), total
        give_back()
        return self.engine.step(decay=policy > 0), total

    def update_pairs(
        self,
        pairs: Sequence[Tree],
        ref_logp: Float[Tensor, "N R"],
        rollout_logp: Float[Tensor, "N R"],
        weight: Float[Tensor, " P"],
        beta: float,
    ) -> tuple[StepInfo, dict[str, float]]:
        """One DPO step on pairs that were just sampled, best answer first; a weight of 0 takes one out.
        Without any nothing moves, not even by momentum."""
        (count,) = self.engine.sum([float(weight.sum())])
        if not count:
            return self.engine.skip(), {"loss": 0.0, "pair_accuracy": 0.0, "pairs": 0.0}
        total = right = moved = compared = 0.0
        micros = list(self.micros(Rolled(pairs)))
        for number, micro in enumerate(micros, 1):
            with autocast(self.params.precision):
                logp, *_ = self.engine.module(micro.batch, temperature=self.params.temperature)
                mine = weight[micro.rows[::2] // 2].to(logp.device) * micro.weight
                found = losses.PREFERENCE_LOSSES[self.params.algorithm](
                    logp, micro.take(ref_logp), micro.batch.mask, mine, beta=beta, count=count
                )
            self.engine.backward(found.loss, last=number == len(micros))
            total += float(found.loss.detach())
            gap, seen = rollout_gap(logp, micro.take(rollout_logp), micro.batch.mask)
            moved, compared = moved + gap * micro.weight, compared + seen * micro.weight
            right += float(((found.chosen_reward > found.rejected_reward) * mine).sum())
        loss, accuracy, *gaps = self.engine.sum([total, right / count, moved, compared])
        values = {"loss": loss, "pair_accuracy": accuracy, "pairs": count, "rollout_gap": gaps[0] / gaps[1]}
        give_back()
        return self.engine.step(), values

    def _aggregation(self, mask: Bool[Tensor, "N R"]) -> losses.Aggregation:
        name = AGGREGATION_OF[self.params.algorithm]
        function = AGGREGATIONS[name]
        extra = {"length": self.params.max_new_tokens} if "length" in needs(function) else {}
        aggregation: losses.Aggregation = function(mask, **extra)
        return aggregation

    def _useful(self, signals: Signals, indices: Sequence[int], group: int, beta: float) -> list[int]:
        """Trees from which any gradient comes; they are all counted, but the others need no computing."""
        params = self.params
        everything = signals.returns is not None or params.entropy > 0
        if everything or (params.kl_where == "loss" and beta > 0):
            return list(indices)
        alive = (signals.advantage != 0).any(1) & signals.mask.any(1)
        return [index for index in indices if bool(alive[index * group : (index + 1) * group].any())]

    def _loss(
        self, micro: Micro, signals: Signals, beta: float, policy: float, count: float, tokens: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of a micro batch as its share of the whole batch's, and its shares of the metrics."""
        params = self.params
        wants_entropy = params.entropy > 0
        extra: dict[str, Any] = {} if policy > 0 else {"head_only": True}
        logp, entropy, *value = self.engine.module(
            micro.batch, temperature=params.temperature, entropy=wants_entropy, **extra
        )
        mask = micro.batch.mask & micro.take(signals.mask)
        old_logp = logp.detach() if signals.old_logp is None else micro.take(signals.old_logp)
        weight = self._aggregation(mask).token_weight
        corrected = weight
        if params.clip.importance is not None:
            corrected = weight * kl.truncated_importance(
                old_logp, micro.take(signals.rollout_logp), mask, cap=params.clip.importance
            )
        function = POLICY_LOSSES[params.algorithm]
        settings = {"clip_low": params.clip.low, "clip_high": params.clip.high}
        if params.clip.dual is not None:
            settings["dual_clip"] = params.clip.dual
        if params.algorithm in OPEN_BELOW:
            del settings["clip_low"]
        chosen = {name: setting for name, setting in settings.items() if name in needs(function)}
        result = function(
            logp, old_logp, micro.take(signals.advantage), mask, corrected, count=count, **chosen
        )
        loss = result.loss * policy
        if params.kl_where == "loss" and beta > 0:
            log_ratios = kl.log_ratio(logp, micro.take(signals.ref_logp), mask)
            divergence = kl.KL_ESTIMATORS[params.kl_estimator](log_ratios)
            loss = loss + policy * kl.kl_loss(divergence, weight, beta=beta, count=count)
        gap, compared = rollout_gap(logp, micro.take(signals.rollout_logp), mask)
        parts = {
            "rollout_gap": gap,
            "compared": compared,
            "ratio_clipped": float((result.clipped & mask).sum()) / tokens,
            "approx_kl": float(kl.k3(kl.log_ratio(old_logp, logp.detach(), mask)).sum()) / tokens,
        }
        if entropy is not None:
            bonus = losses.entropy_loss(entropy, mask, weight, coefficient=params.entropy, count=count)
            loss = loss + policy * bonus.loss
            parts["entropy_exact"] = float(bonus.terms.sum()) / tokens
        if value:
            assert signals.returns is not None and signals.old_value is not None
            fit = losses.value_loss(
                value[0], micro.take(signals.old_value), micro.take(signals.returns), mask, weight,
                clip=float("inf") if params.clip.value is None else params.clip.value, count=count,
            )  # fmt: skip
            loss = loss + params.ppo.value_coef * fit.loss
            parts["value_loss"] = float(fit.loss.detach())
        parts["loss"] = float(loss.detach())
        return loss, parts
