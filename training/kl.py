"""Divergence from the reference: estimators, where they enter, the controller, laws of KL and reward.

Everything starts from `log_ratio`, which is masked before anything is exponentiated: an overflow on a padded
position would give a finite loss and a NaN gradient.

Deviations from the papers
- `ratio` bounds the log ratio at +-LOG_RATIO_BOUND, `k3` at the side where it is exponentiated: beyond it the
  gradient is 0, not NaN. Where the policy leaves the reference, k3 goes on growing and so pulling it back.
- KL in the loss carries no importance ratio: it is exact on policy only (the first update of a rollout).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Count = float | int | Tensor  # answers, pairs or tokens of the global batch

LOG_RATIO_BOUND = 20.0  # e^20 = 4.9e8: far outside every clip range, far inside float32


def log_ratio(
    logp: Float[Tensor, "N R"], other_logp: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"]
) -> Float[Tensor, "N R"]:
    """log pi(token) - log pi_other(token) where `mask` counts, 0 elsewhere (whatever stands there)."""
    return torch.where(mask, logp - other_logp, 0.0)


def sequence_log_ratio(
    logp: Float[Tensor, "N R"], other_logp: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"]
) -> Float[Tensor, " N"]:
    """log pi(answer) - log pi_other(answer): the token log ratios summed."""
    return log_ratio(logp, other_logp, mask).sum(1)


def ratio(log_ratios: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """pi / pi_other, bounded to exp(+-LOG_RATIO_BOUND)."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def k1(log_ratios: Float[Tensor, "N R"]) -> Float[Tensor, "N R"]:
    """-log r with r = pi_ref/pi, x ~ pi. Unbiased, may be negative [joschu.net/blog/kl-approx].

    In the reward its gradient is that of the KL; in the loss its gradient is zero in the mean [2510.01555].
    """
    return log_ratios


def k2(log_ratios: Float[Tensor, "N R"]) -> Float[Tensor, "N R"]:
    """(log r)^2 / 2 [joschu.net/blog/kl-approx]. Biased as a value, exact as a loss (its gradient)."""
    return 0.5 * log_ratios.square()


def k3(log_ratios: Float[Tensor, "N R"]) -> Float[Tensor, "N R"]:
    """(r - 1) - log r, r = pi_ref/pi [joschu.net/blog/kl-approx]. Never negative; biased as a loss."""
    bounded = log_ratios.clamp(min=-LOG_RATIO_BOUND)
    return torch.expm1(-bounded) + bounded  # expm1: exp(x) - 1 would round to negative values near 0


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(
    kl: Float[Tensor, "N R"], token_weight: Float[Tensor, "N R"], *, beta: float, count: Count
) -> Float[Tensor, ""]:
    """beta * sum(weight * kl) / count: KL as a term of the loss [2402.03300], weights as in it."""
    return beta * (kl * token_weight).sum() / count


def kl_in_score(score: Float[Tensor, " N"], kl: Float[Tensor, "N R"], *, beta: float) -> Float[Tensor, " N"]:
    """score - beta * sum_t kl_t: KL in an answer's reward (RLOO), detached [2402.14740]."""
    return score - beta * kl.detach().sum(1)


def last_token(mask: Bool[Tensor, "N R"]) -> Bool[Tensor, "N R"]:
    """True at each row's last counted token only (its EOS when there is one), nowhere in an empty row."""
    counted_from_here = mask.flip(1).cumsum(1).flip(1)
    return mask & (counted_from_here == 1)


def kl_in_token_reward(
    score: Float[Tensor, " N"], kl: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"], *, beta: float
) -> Float[Tensor, "N R"]:
    """r_t = -beta * kl_t + [t = last] * score: rewards of PPO, REINFORCE++ [1707.06347, 2501.03262]."""
    return torch.where(mask, -beta * kl.detach(), 0.0) + torch.where(last_token(mask), score[:, None], 0.0)


def adaptive_beta(
    beta: float, kl: float, *, target: float, count: int, horizon: float = 10_000.0, bound: float = 0.2
) -> float:
    """beta * (1 + clip(kl/target - 1, +-bound) * count/horizon) [1909.08593]; count: answers seen.

    A batch of more answers than the horizon counts as the horizon, so that the sign stays; a KL that is not
    finite changes nothing."""
    if not math.isfinite(kl):
        return beta
    error = min(max(kl / target - 1.0, -bound), bound)
    return beta * (1.0 + error * min(count / horizon, 1.0))


def truncated_importance(
    old_logp: Float[Tensor, "N R"],
    rollout_logp: Float[Tensor, "N R"],
    mask: Bool[Tensor, "N R"],
    *,
    cap: float,
) -> Float[Tensor, "N R"]:
    """min(pi_old / pi_rollout, cap), detached, 1 off the mask: corrects rollouts of another engine.

    Multiply it into `token_weight` of a policy loss; the count stays what it was.
    """
    return ratio(log_ratio(old_logp, rollout_logp, mask)).clamp(max=cap).detach()


def best_of_n_kl(n: int) -> float:
    """ln n - (n-1)/n: an upper bound of KL(best of n || policy) [2210.10760 uses it as the value]."""
    return math.log(n) - (n - 1) / n


def gold_reward(d: Float[Tensor, "*shape"], *, alpha: float, beta: float) -> Float[Tensor, "*shape"]:
    """Over-optimisation under RL: d * (alpha - beta * ln d), d = sqrt(KL); 0 at d = 0 [2210.10760]."""
    return alpha * d - beta * torch.xlogy(d, d)


def gold_peak(*, alpha: float, beta: float) -> float:
    """d = sqrt(KL) at which `gold_reward` is highest: the derivative alpha - beta - beta * ln d is 0."""
    return math.exp(alpha / beta - 1.0)
