"""Evidence for decisions: intervals, tests and a confidence sequence. Floats and NumPy arrays, no torch.

A tie counts as half a win. Intervals that treat half wins as a binomial are conservative: a tie has less
variance than a win and a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    estimate: float
    lower: float
    upper: float
    n: int


class LengthControlled(NamedTuple):
    estimate: float
    lower: float
    upper: float
    n: int
    slope: float  # log odds of a win per unit of tanh(length difference / its deviation)


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise DataError(f"confidence is {confidence}; it must lie between 0 and 1, .95 for 95 %")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _require(n: int, what: str) -> None:
    if n < 1:
        raise DataError(f"{what} needs at least 1 observation and got {n}; see which rows were left out")


def wilson(successes: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Score interval for a share: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) [Wilson 1927]."""
    _require(n, "a Wilson interval")
    if not 0 <= successes <= n:
        raise DataError(f"{successes} successes in {n} trials; the number must lie between 0 and {n}")
    z = _quantile(confidence)
    share = successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(share, max(middle - half, 0.0), min(middle + half, 1.0), n)


def clustered_share(
    outcome: Sequence[float], clusters: Sequence[Hashable], *, confidence: float = 0.95
) -> Interval:
    """Wilson interval of a share whose rows come in clusters (the steps of a prompt): n is divided by the
    design effect v / (p (1 - p) / n), at least 1 [Kish 1965].

    v = K / (K - 1) sum_k (total_k - p size_k)^2 / n^2, the linearised variance of a ratio over K clusters.
    One cluster, or a share of 0 or 1, shows no variance: then clusters are counted. The result's n is rows.
    """
    won = np.asarray(outcome, float)
    n = len(won)
    _require(n, "a clustered interval")
    places: dict[Hashable, int] = {}
    at = np.array([places.setdefault(cluster, len(places)) for cluster in clusters])
    share, count = float(won.mean()), len(places)
    totals, sizes = np.bincount(at, weights=won), np.bincount(at)
    spread = float(((totals - share * sizes) ** 2).sum())
    independent = float(count)
    if count > 1 and spread > 0:
        variance = count / (count - 1) * spread / n**2
        independent = min(float(n), max(1.0, share * (1 - share) / variance))
    whole = int(independent + 1e-9)
    found = wilson(share * whole, whole, confidence=confidence)
    return Interval(share, found.lower, found.upper, n)


def win_rate(wins: int, ties: int, losses: int, *, confidence: float = 0.95) -> Interval:
    """Win rate with half ties and its Wilson interval."""
    return wilson(wins + ties / 2, wins + ties + losses, confidence=confidence)


def mcnemar_exact(first: int, second: int) -> float:
    """Two-sided exact p of discordant counts: min(1, 2 P(X <= min)), X ~ Binomial(first + second, 1/2)."""
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1))
    return min(1.0, 2.0 * tail / 2.0**n)


def length_controlled_win_rate(
    outcome: Sequence[float],
    length_difference: Sequence[float],
    *,
    confidence: float = 0.95,
    ridge: float = 0.16,
) -> LengthControlled:
    """Win rate at equal length: sigma(theta) of P(win) = sigma(theta + slope x) [2404.04475].

    x = tanh(difference / deviation), difference = candidate's length minus the champion's; outcome 1, 1/2 or
    0. Deviations from the paper: no term per prompt; a normal prior of deviation 2.5 on the slope (ridge =
    1/2.5^2) and half a win and half a loss at x = 0, so that a clean sweep still has a finite interval;
    interval from the Fisher information, conservative with ties.
    """
    won, difference = np.asarray(outcome, float), np.asarray(length_difference, float)
    _require(len(won), "a length-controlled win rate")
    x = np.tanh(difference / max(float(difference.std()), 1e-12))
    design = np.stack([np.ones(len(x) + 1), np.append(x, 0.0)], 1)
    target, weight = np.append(won, 0.5), np.ones(len(x) + 1)
    prior = np.diag([0.0, ridge])
    theta, information = _logistic(design, target, weight, prior)
    spread = _quantile(confidence) * math.sqrt(float(np.linalg.inv(information)[0, 0]))
    level, slope = float(theta[0]), float(theta[1])
    return LengthControlled(_sigma(level), _sigma(level - spread), _sigma(level + spread), len(won), slope)


def _sigma(value: float) -> float:
    return 0.5 * (1 + math.tanh(value / 2))


def _logistic(design: Floats, target: Floats, weight: Floats, prior: Floats) -> tuple[Floats, Floats]:
    """Newton's method for the penalised logistic likelihood: parameters and information matrix."""
    theta = np.zeros(design.shape[1])
    for _ in range(200):
        chance = 0.5 * (1 + np.tanh(design @ theta / 2))
        gradient = design.T @ (weight * (target - chance)) - prior @ theta
        information = design.T @ (design * (weight * chance * (1 - chance))[:, None]) + prior
        step = np.linalg.solve(information, gradient)
        if float(np.abs(step).max()) < 1e-10:
            return theta, information
        theta = theta + step / max(1.0, float(np.abs(step).max()))
    raise DataError(f"the length regression did not settle in 200 steps, at {theta}; check the lengths")


def expected_calibration_error(
    probability: Sequence[float], outcome: Sequence[float], *, bins: int = 10
) -> float:
    """sum over equal bins of share * |mean outcome - mean probability| [1706.04599]."""
    chance, happened = np.asarray(probability, float), np.asarray(outcome, float)
    _require(len(chance), "a calibration error")
    index = np.minimum((chance * bins).astype(int), bins - 1)
    gaps = np.bincount(index, weights=happened - chance, minlength=bins)
    return float(np.abs(gaps).sum() / len(chance))


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    prompts: Sequence[Hashable],
    *,
    seed: int,
    samples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Mean of first - second, percentile interval; whole prompts are drawn: their rows are dependent."""
    difference = np.asarray(first, float) - np.asarray(second, float)
    _require(len(difference), "a bootstrap")
    _quantile(confidence)
    places: dict[Hashable, int] = {}
    cluster = np.array([places.setdefault(prompt, len(places)) for prompt in prompts])
    totals = np.bincount(cluster, weights=difference)
    sizes = np.bincount(cluster)
    chance = np.full(len(sizes), 1 / len(sizes))
    drawn = np.random.default_rng(seed).multinomial(len(sizes), chance, size=samples)
    means = (drawn @ totals) / (drawn @ sizes)
    lower, upper = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(difference.mean()), float(lower), float(upper), len(difference))


def log_evidence(wins: float, n: int, rate: float) -> float:
    """log of the beta-binomial mixture martingale against `rate` [Robbins 1970; 1810.08240].

    M = B(1 + S, 1 + n - S) / (rate^S (1 - rate)^(n - S)), S = wins with half ties. Each factor is convex in
    the outcome, so outcomes inside [0, 1], ties too, keep E[M] <= 1; by Ville's inequality P(M ever >= 1/a)
    <= a.
    """
    mixture = math.lgamma(1 + wins) + math.lgamma(1 + n - wins) - math.lgamma(2 + n)
    return mixture - wins * math.log(rate) - (n - wins) * math.log1p(-rate)


def confidence_sequence(wins: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Interval for a win rate that holds at all n at once: look as often as you like, stop when you like.

    The rates whose `log_evidence` stays below log(1/alpha); wins count ties as half.
    """
    _require(n, "a confidence sequence")
    _quantile(confidence)
    share = wins / n
    bound = -math.log(1 - confidence)

    def outside(rate: float) -> bool:
        return log_evidence(wins, n, rate) >= bound

    lower = _boundary(outside, share, 0.0) if share > 0 else 0.0
    upper = _boundary(outside, share, 1.0) if share < 1 else 1.0
    return Interval(share, lower, upper, n)


def _boundary(outside: Callable[[float], bool], inside: float, end: float) -> float:
    """Bisection between a rate that is inside and an end that is not; returns the last rate seen outside."""
    for _ in range(60):
        middle = (inside + end) / 2
        inside, end = (inside, middle) if outside(middle) else (middle, end)
    return end
