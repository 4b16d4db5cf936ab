"""Advantages: how much better an answer, or a token, was than expected.

Group methods take scores [P, G] (prompts, samples a prompt) and `valid` (False where a scorer failed):
statistics see the valid scores only and an invalid one gets advantage 0, never a score of 0. Token methods
take rewards [N, R]. All results are constants to the optimizer: nothing here carries a gradient.

Divisors: GRPO's group deviation uses G - 1 (ddof 1); `mean_std` takes `ddof`, 1 by default.

Deviations from the papers
- A constant group (a single valid sample included) gives exact zeros, not residue / epsilon, and is reported.
- The group deviation includes the sample itself, so |A| <= (G-1)/sqrt(G): a leave-one-out deviation can be
  residue and explode.
- Whitening takes moments that were summed over all ranks, so the batch's split does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SAME = 1e-6
"""Standard deviation below which values count as equal: float32 sums of log-probabilities differ by less."""


class GroupAdvantage(NamedTuple):
    advantage: Float[Tensor, "P G"]
    constant: Bool[Tensor, " P"]  # groups without any difference: nothing to learn from


class Centred(NamedTuple):
    deviation: Float[Tensor, "P G"]  # score minus the group's mean, 0 where invalid or constant
    size: Float[Tensor, "P 1"]  # valid samples
    constant: Bool[Tensor, " P"]


class TokenAdvantage(NamedTuple):
    advantage: Float[Tensor, "N R"]
    returns: Float[Tensor, "N R"]


class Moments(NamedTuple):
    """Sums over counted values; additive over micro-batches and ranks."""

    number: float
    total: float
    square: float


class BestWorst(NamedTuple):
    best: Int[Tensor, " P"]
    worst: Int[Tensor, " P"]
    usable: Bool[Tensor, " P"]


def constant_groups(score: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """True where all valid scores of a group are equal, or none is valid: DAPO drops it [2503.14476]."""
    highest = torch.where(valid, score, -math.inf).amax(1)
    lowest = torch.where(valid, score, math.inf).amin(1)
    return highest <= lowest  # False for NaN, so that a NaN score reaches the guards


def centred(score: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"]) -> Centred:
    """Scores minus their group's mean over the valid ones."""
    constant = constant_groups(score, valid)
    size = valid.sum(1, keepdim=True).to(score.dtype)
    mean = torch.where(valid, score, 0.0).sum(1, keepdim=True) / size
    deviation = torch.where(valid & ~constant[:, None], score - mean, 0.0)
    return Centred(deviation.detach(), size, constant)


def rloo(score: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"]) -> GroupAdvantage:
    """A_i = R_i - mean of the other R_j = (R_i - mean) * G/(G-1) [2402.14740]."""
    deviation, size, constant = centred(score, valid)
    return GroupAdvantage(deviation * size / (size - 1).clamp(min=1), constant)


def grpo(score: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"], *, epsilon: float = 1e-4) -> GroupAdvantage:
    """A_i = (R_i - mean) / (std + epsilon), std with divisor G - 1 [2402.03300]; of DAPO, GSPO, CISPO."""
    deviation, size, constant = centred(score, valid)
    std = (deviation.square().sum(1, keepdim=True) / (size - 1)).sqrt()
    return GroupAdvantage(torch.where(constant[:, None], 0.0, deviation / (std + epsilon)), constant)


def dr_grpo(score: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"]) -> GroupAdvantage:
    """A_i = R_i - mean: no division by the deviation, which favours easy and hard prompts [2503.20783]."""
    deviation, _, constant = centred(score, valid)
    return GroupAdvantage(deviation, constant)


def gae(
    reward: Float[Tensor, "N R"],
    value: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> TokenAdvantage:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V [1506.02438].

    t+1 is the next counted token, so padding and holes in the mask change nothing; V after the last is 0.
    """
    value, reward = value.detach(), reward.detach()
    advantage = torch.zeros_like(reward)
    next_value = running = reward.new_zeros(len(reward))
    for step in reversed(range(reward.shape[1])):
        counts = mask[:, step]
        delta = reward[:, step] + gamma * next_value - value[:, step]
        running = torch.where(counts, delta + gamma * lam * running, running)
        next_value = torch.where(counts, value[:, step], next_value)
        advantage[:, step] = torch.where(counts, running, 0.0)
    return TokenAdvantage(advantage, torch.where(mask, advantage + value, 0.0))


def discounted_returns(
    reward: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"], *, gamma: float = 1.0
) -> TokenAdvantage:
    """A_t = sum_{s >= t} gamma^(s-t) r_s: REINFORCE++ before it is whitened [2501.03262]."""
    return gae(reward, torch.zeros_like(reward), mask, gamma=gamma, lam=1.0)


def moments(value: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Moments:
    """Number, sum, sum of squares of the counted values in float64: add over ranks, then `mean_std`."""
    counted = value.detach()[mask].double()
    return Moments(float(counted.numel()), float(counted.sum()), float(counted.square().sum()))


def mean_std(summed: Moments, *, ddof: int = 1) -> tuple[float, float]:
    """Mean and standard deviation with divisor number - ddof; (0, 0) of nothing."""
    mean = summed.total / max(summed.number, 1.0)
    variance = (summed.square - summed.total * mean) / max(summed.number - ddof, 1.0)
    return mean, math.sqrt(max(variance, 0.0))


def whiten(
    value: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    mean: float,
    std: float,
    epsilon: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """(value - mean) / (std + epsilon) where counted, 0 elsewhere; mean and std of the global batch.

    All zeros where the values differ by rounding alone (`SAME`): dividing by it would make noise a signal."""
    if std < SAME:
        return torch.zeros_like(value)
    return torch.where(mask, (value - mean) / (std + epsilon), 0.0)


def best_and_worst(score: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"]) -> BestWorst:
    """Online DPO: best valid sample chosen, worst rejected; unusable where all are equal [2402.04792]."""
    best = torch.where(valid, score, -math.inf).argmax(1)
    worst = torch.where(valid, score, math.inf).argmin(1)
    return BestWorst(best, worst, ~constant_groups(score, valid))


# By algorithm. Group methods: (score [P, G], valid [P, G]).
ADVANTAGES: dict[str, Callable[..., GroupAdvantage]] = {
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": grpo,
    "gspo": grpo,
    "cispo": grpo,
}

# Token methods: (reward [N, R], mask [N, R], ...), whitened afterwards over the global batch.
TOKEN_ADVANTAGES: dict[str, Callable[..., TokenAdvantage]] = {"ppo": gae, "reinforce_pp": discounted_returns}
