"""Every loss of the project. Tensors and named scalars in, the loss and a few detached tensors out.

Conventions
- `logp`, `old_logp`, `ref_logp` are [N, R]: log-probabilities of answer tokens at the sampling temperature;
  `mask` is True where a token counts. What stands elsewhere, NaN included, touches neither loss nor gradient.
- Sums are divided by `count`, a number that the caller has summed over micro-batches and ranks, so how a
  batch is split cannot change the number. Pairs: count = pairs (or the sum of their weights).
- Preference losses see pairs as neighbouring rows: rows 0, 2, .. are chosen, rows 1, 3, .. rejected.
- Policy losses take `token_weight` [N, R] from an aggregation (times `kl.truncated_importance`, if any).
- `needs(loss)` names what a loss reads: which tensors to compute and which settings have an effect.

Deviations from the papers
- ORPO's likelihood term is averaged over the tokens of each chosen answer, then over pairs; an average
  log-probability above -1e-6 counts as -1e-6 in the odds.
- KTO's reference point is an argument (the mean over the whole batch of mismatched answers), so it does not
  depend on the micro-batch; for pairs the loss is half of the two answers' sum.
- RLOO runs through the clipped loss: the same gradient at ratio 1, bounded when a rollout is used again.
- Ratios are bounded at e^+-20 (see kl.ratio).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.kl import Count, log_ratio, ratio, sequence_log_ratio


class Loss(NamedTuple):
    loss: Float[Tensor, ""]
    terms: Float[Tensor, "*shape"]  # before weights and division; of counted positions only where [K]


class RewardLoss(NamedTuple):
    loss: Float[Tensor, ""]
    gap: Float[Tensor, "*shape"]  # chosen minus rejected
    correct: Float[Tensor, "*shape"]  # 1 right, 1/2 tie, 0 wrong


class PreferenceLoss(NamedTuple):
    loss: Float[Tensor, ""]
    chosen_reward: Float[Tensor, " P"]  # implicit: beta * log ratio; SimPO beta * average logp
    rejected_reward: Float[Tensor, " P"]


class PolicyLoss(NamedTuple):
    loss: Float[Tensor, ""]
    ratio: Float[Tensor, "N R"]
    clipped: Bool[Tensor, "N R"]  # counted tokens from which no gradient comes (CISPO: whose weight was cut)


class Aggregation(NamedTuple):
    token_weight: Float[Tensor, "N R"]
    units: Tensor  # answers or tokens of this part: `count` is their sum over micro-batches and ranks


# -- supervised fine-tuning and reward models ----------------------------------------------------------------


def cross_entropy(logp: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"], *, count: Count) -> Loss:
    """-sum(logp) / count over counted tokens; count = answer tokens of the whole batch."""
    terms = -torch.where(mask, logp, 0.0)
    return Loss(terms.sum() / count, terms.detach())


def bradley_terry(
    chosen: Float[Tensor, "*shape"],
    rejected: Float[Tensor, "*shape"],
    margin: Float[Tensor, "*shape"],
    weight: Float[Tensor, "*shape"],
    *,
    centring: float = 0.0,
    smoothing: float = 0.0,
    count: Count,
) -> RewardLoss:
    """-(1-s) log sigma(g) - s log sigma(-g) + centring (chosen + rejected)^2, g = chosen - rejected - margin.

    Bradley-Terry [2203.02155], margin [2307.09288], centring [2312.09244], smoothing for wrong labels
    [2401.06080]. Scores [P] or [P, heads]; a weight of 0 takes a pair out of a head; count = sum of weights.
    """
    gap = chosen - rejected
    ranking = -(1 - smoothing) * logsigmoid(gap - margin) - smoothing * logsigmoid(margin - gap)
    terms = ranking + centring * (chosen + rejected).square()
    correct = 0.5 * (1.0 + torch.sign(gap.detach()))
    return RewardLoss((weight * terms).sum() / count, gap.detach(), correct)


def process_reward(
    score: Float[Tensor, "N R"], label: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"], *, count: Count
) -> Loss:
    """-y log sigma(s) - (1-y) log sigma(-s) at the last token of each step [2305.20050]; count = steps."""
    score, label = score[mask], label[mask]
    terms = -label * logsigmoid(score) - (1 - label) * logsigmoid(-score)
    return Loss(terms.sum() / count, terms.detach())


# -- preference optimisation ---------------------------------------------------------------------------------


def sequence_average(value: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"]) -> Float[Tensor, " N"]:
    """Mean over counted tokens; 0 for an answer without any."""
    return torch.where(mask, value, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def dpo(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    beta: float,
    count: Count,
) -> PreferenceLoss:
    """-log sigma(beta h), h = log ratio of chosen - of rejected [2305.18290]; online DPO too."""
    reward = beta * sequence_log_ratio(logp, ref_logp, mask)
    return _preference(-logsigmoid(reward[0::2] - reward[1::2]), reward, weight, count)


def conservative_dpo(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    beta: float,
    smoothing: float,
    count: Count,
) -> PreferenceLoss:
    """-(1-s) log sigma(beta h) - s log sigma(-beta h): labels wrong with probability s [cDPO note]."""
    reward = beta * sequence_log_ratio(logp, ref_logp, mask)
    gap = reward[0::2] - reward[1::2]
    terms = -(1 - smoothing) * logsigmoid(gap) - smoothing * logsigmoid(-gap)
    return _preference(terms, reward, weight, count)


def robust_dpo(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    beta: float,
    smoothing: float,
    count: Count,
) -> PreferenceLoss:
    """(-(1-s) log sigma(beta h) + s log sigma(-beta h)) / (1-2s): unbiased, s < 1/2 [2403.00409]."""
    reward = beta * sequence_log_ratio(logp, ref_logp, mask)
    gap = reward[0::2] - reward[1::2]
    terms = (-(1 - smoothing) * logsigmoid(gap) + smoothing * logsigmoid(-gap)) / (1 - 2 * smoothing)
    return _preference(terms, reward, weight, count)


def ipo(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    beta: float,
    count: Count,
) -> PreferenceLoss:
    """(h - 1/(2 beta))^2 with summed log ratios, beta = tau of the paper [2310.12036]."""
    log_ratios = sequence_log_ratio(logp, ref_logp, mask)
    terms = (log_ratios[0::2] - log_ratios[1::2] - 1 / (2 * beta)).square()
    return _preference(terms, beta * log_ratios, weight, count)


def ipo_average(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    beta: float,
    count: Count,
) -> PreferenceLoss:
    """IPO with log ratios averaged over tokens, so that long answers do not dominate h."""
    log_ratios = sequence_average(log_ratio(logp, ref_logp, mask), mask)
    terms = (log_ratios[0::2] - log_ratios[1::2] - 1 / (2 * beta)).square()
    return _preference(terms, beta * log_ratios, weight, count)


def hinge(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    beta: float,
    count: Count,
) -> PreferenceLoss:
    """max(0, 1 - beta h) [2305.10425 on the DPO reward, as in 2309.06657]."""
    reward = beta * sequence_log_ratio(logp, ref_logp, mask)
    return _preference((1 - reward[0::2] + reward[1::2]).clamp(min=0), reward, weight, count)


def kto(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " N"],
    wanted: Bool[Tensor, " N"],
    kl: Float[Tensor, ""],
    *,
    beta: float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    count: Count,
) -> Loss:
    """lambda (1 - sigma(beta (l - z))), of (z - l) if unwanted; l = log ratio, z = max(0, kl) [2402.01306].

    kl: mean over the batch of sequence log ratios of answers put to other prompts; no gradient flows through
    it. desirable and undesirable are lambda_D and lambda_U; count = answers (or the sum of weights).
    """
    reference_point = kl.detach().clamp(min=0)
    difference = sequence_log_ratio(logp, ref_logp, mask) - reference_point
    terms = 1 - torch.sigmoid(beta * torch.where(wanted, difference, -difference))
    weight = torch.where(wanted, desirable * weight, undesirable * weight)
    return Loss((weight * terms).sum() / count, terms.detach())


def kto_pair(
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    kl: Float[Tensor, ""],
    *,
    beta: float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    count: Count,
) -> PreferenceLoss:
    """KTO on pairs: chosen wanted, rejected not; half of the two terms' sum a pair [2402.01306]."""
    wanted = torch.arange(logp.shape[0], device=logp.device) % 2 == 0
    loss, _ = kto(
        logp,
        ref_logp,
        mask,
        weight.repeat_interleave(2),
        wanted,
        kl,
        beta=beta,
        desirable=desirable,
        undesirable=undesirable,
        count=2 * count,
    )
    reward = beta * sequence_log_ratio(logp, ref_logp, mask).detach()
    return PreferenceLoss(loss, reward[0::2], reward[1::2])


def orpo(
    logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    lam: float,
    count: Count,
) -> PreferenceLoss:
    """-a_c - lam log sigma(log odds_c - log odds_r); a = average logp, odds = e^a / (1 - e^a) [2403.07691].

    Without a reference; the reward that is returned is a.
    """
    average = sequence_average(logp, mask)
    bounded = average.clamp(max=-1e-6)
    log_odds = bounded - torch.log(-torch.expm1(bounded))
    terms = -average[0::2] - lam * logsigmoid(log_odds[0::2] - log_odds[1::2])
    return _preference(terms, average, weight, count)


def simpo(
    logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    weight: Float[Tensor, " P"],
    *,
    beta: float,
    gamma: float,
    count: Count,
) -> PreferenceLoss:
    """-log sigma(beta a_c - beta a_r - gamma), a = average logp; without a reference [2405.14734]."""
    reward = beta * sequence_average(logp, mask)
    return _preference(-logsigmoid(reward[0::2] - reward[1::2] - gamma), reward, weight, count)


def _preference(terms: Tensor, reward: Tensor, weight: Tensor, count: Count) -> PreferenceLoss:
    reward = reward.detach()
    return PreferenceLoss((weight * terms).sum() / count, reward[0::2], reward[1::2])


# -- aggregation of token losses -----------------------------------------------------------------------------


def token_mean(mask: Bool[Tensor, "N R"], *, dtype: torch.dtype = torch.float32) -> Aggregation:
    """Every token weighs the same: sum / tokens (DAPO) [2503.14476]."""
    return Aggregation(mask.to(dtype), mask.sum())


def sequence_mean(mask: Bool[Tensor, "N R"], *, dtype: torch.dtype = torch.float32) -> Aggregation:
    """Mean of the answers' means (GRPO); empty answers do not count [2402.03300]."""
    return Aggregation(mask.to(dtype) / mask.sum(1, keepdim=True).clamp(min=1), mask.any(1).sum())


def sequence_sum(mask: Bool[Tensor, "N R"], *, dtype: torch.dtype = torch.float32) -> Aggregation:
    """Mean over answers of their sums: the policy gradient of whole answers (RLOO) [2402.14740]."""
    return Aggregation(mask.to(dtype), mask.any(1).sum())


def fixed_length(
    mask: Bool[Tensor, "N R"], *, length: int, dtype: torch.dtype = torch.float32
) -> Aggregation:
    """Mean over answers of sum / length, the longest allowed: no length bias (Dr. GRPO) [2503.20783]."""
    return Aggregation(mask.to(dtype) / length, mask.any(1).sum())


# -- on-policy -----------------------------------------------------------------------------------------------


def clipped_policy(
    logp: Float[Tensor, "N R"],
    old_logp: Float[Tensor, "N R"],
    advantage: Float[Tensor, "N #R"],
    mask: Bool[Tensor, "N R"],
    token_weight: Float[Tensor, "N R"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
    count: Count,
) -> PolicyLoss:
    """-min(r A, clip(r, 1-low, 1+high) A), for A < 0 at most dual_clip * |A| [1707.06347, 1912.09729].

    r = pi / pi_old of the token. clip_high > clip_low is DAPO's clip-higher [2503.14476].
    """
    token_ratio = ratio(log_ratio(logp, old_logp.detach(), mask))
    return _clip(token_ratio, advantage, mask, token_weight, clip_low, clip_high, dual_clip, count)


def gspo(
    logp: Float[Tensor, "N R"],
    old_logp: Float[Tensor, "N R"],
    advantage: Float[Tensor, "N 1"],
    mask: Bool[Tensor, "N R"],
    token_weight: Float[Tensor, "N R"],
    *,
    clip_low: float,
    clip_high: float,
    count: Count,
) -> PolicyLoss:
    """The clipped loss with one ratio an answer, exp(mean log ratio of its tokens) [2507.18071].

    With `sequence_mean` weights each answer counts once, as in the paper, whose clip ranges are 3e-4 and
    4e-4.
    """
    mean_log_ratio = sequence_average(log_ratio(logp, old_logp.detach(), mask), mask)
    answer_ratio = ratio(mean_log_ratio)[:, None].expand(mask.shape)
    return _clip(answer_ratio, advantage, mask, token_weight, clip_low, clip_high, math.inf, count)


def cispo(
    logp: Float[Tensor, "N R"],
    old_logp: Float[Tensor, "N R"],
    advantage: Float[Tensor, "N #R"],
    mask: Bool[Tensor, "N R"],
    token_weight: Float[Tensor, "N R"],
    *,
    clip_low: float = 1.0,
    clip_high: float,
    count: Count,
) -> PolicyLoss:
    """-stopgrad(clip(r, 1-low, 1+high)) A log pi: no token loses its gradient [2506.13585].

    clip_low 1 leaves the lower side open, as in the paper.
    """
    token_ratio = ratio(log_ratio(logp, old_logp, mask)).detach()
    cut = token_ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -cut * torch.where(mask, advantage.detach(), 0.0) * torch.where(mask, logp, 0.0)
    return PolicyLoss((terms * token_weight).sum() / count, token_ratio, cut != token_ratio)


def _clip(
    ratios: Tensor,
    advantage: Tensor,
    mask: Tensor,
    token_weight: Tensor,
    low: float,
    high: float,
    dual: float,
    count: Count,
) -> PolicyLoss:
    advantage = torch.where(mask, advantage.detach(), 0.0)
    free = ratios * advantage
    pessimistic = torch.minimum(free, ratios.clamp(1 - low, 1 + high) * advantage)
    objective = torch.maximum(pessimistic, torch.where(advantage < 0, dual * advantage, 0.0))
    loss = -(objective * token_weight).sum() / count
    return PolicyLoss(loss, ratios.detach(), objective != free)


def value_loss(
    value: Float[Tensor, "N R"],
    old_value: Float[Tensor, "N R"],
    returns: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    token_weight: Float[Tensor, "N R"],
    *,
    clip: float,
    count: Count,
) -> Loss:
    """max((V - ret)^2, (V_old + clip(V - V_old, +-clip) - ret)^2) / 2 [1707.06347]."""
    value, old_value, returns = value[mask], old_value[mask].detach(), returns[mask].detach()
    near = old_value + (value - old_value).clamp(-clip, clip)
    terms = 0.5 * torch.maximum((value - returns).square(), (near - returns).square())
    return Loss((terms * token_weight[mask]).sum() / count, terms.detach())


def entropy_loss(
    entropy: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    token_weight: Float[Tensor, "N R"],
    *,
    coefficient: float,
    count: Count,
) -> Loss:
    """-coefficient * mean entropy of the token distributions: keeps the policy open [1707.06347]."""
    terms = torch.where(mask, entropy, 0.0)
    return Loss(-coefficient * (terms * token_weight).sum() / count, terms.detach())


# -- names ---------------------------------------------------------------------------------------------------


def needs(function: Callable[..., object]) -> frozenset[str]:
    """Names of the arguments of a function in the dicts below."""
    return frozenset(inspect.signature(function).parameters)


# By algorithm. `kto` with feedback that is not in pairs is called by itself.
PREFERENCE_LOSSES: dict[str, Callable[..., PreferenceLoss]] = {
    "dpo": dpo,
    "cdpo": conservative_dpo,
    "robust_dpo": robust_dpo,
    "ipo": ipo,
    "ipo_average": ipo_average,
    "hinge": hinge,
    "kto": kto_pair,
    "orpo": orpo,
    "simpo": simpo,
    "online_dpo": dpo,
}

POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": clipped_policy,
    "rloo": clipped_policy,
    "grpo": clipped_policy,
    "dr_grpo": clipped_policy,
    "dapo": clipped_policy,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce_pp": clipped_policy,
}

AGGREGATIONS: dict[str, Callable[..., Aggregation]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "fixed_length": fixed_length,
}

# What each paper uses.
AGGREGATION_OF: dict[str, str] = {
    "ppo": "token_mean",
    "rloo": "sequence_sum",
    "grpo": "sequence_mean",
    "dr_grpo": "fixed_length",
    "dapo": "token_mean",
    "gspo": "sequence_mean",
    "cispo": "token_mean",
    "reinforce_pp": "token_mean",
}
