"""What speaks for a fault in optimisation or evaluation; the second half of `tasks/symptoms.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tasks.evidence import Facts, Missing, finite
from tasks.symptoms import METRICS, Evidence, beyond_length, ends, held_out, on_pairs
from training.stats import wilson

NEVER = 100_000
"""Evaluation prompts beyond which a difference is called none."""


def trend(values: Sequence[float]) -> tuple[float, float, float]:
    """Least-squares line through a series over its steps: fitted change from first to last step, the standard
    error of that change, and the deviation of a step from the line.
    """
    n = len(values)
    steps = range(n)
    middle, mean = (n - 1) / 2, statistics.fmean(values)
    spread = sum((step - middle) ** 2 for step in steps)
    slope = sum((step - middle) * (value - mean) for step, value in zip(steps, values, strict=True)) / spread
    rest = sum(
        (value - mean - slope * (step - middle)) ** 2 for step, value in zip(steps, values, strict=True)
    )
    noise = math.sqrt(rest / (n - 2))
    return slope * (n - 1), noise / math.sqrt(spread) * (n - 1), noise


# -- hyper-parameters --------------------------------------------------------------------------------------


def nonfinite(facts: Facts) -> Evidence:
    rows = facts.metrics.get("optimize")
    if not rows:
        raise Missing(f"{METRICS} is missing or empty")
    bad = [row.get("step") for row in rows if not all(map(finite, row.values()))]
    seen = f"first at step {bad[0]}" if bad else f"all {len(rows)} steps finite"
    return Evidence(len(bad), METRICS, seen)


def kl_blown(facts: Facts) -> Evidence:
    target = facts.params.optimize.kl.target
    if on_pairs(facts):
        value = abs(facts.number("optimize", "kl"))
        return Evidence(value / target, facts.file("optimize"), f"KL {value:.3g}, kl.target {target:g}")
    values = [abs(value) for value in facts.series("optimize", "kl")]
    window = min(3, len(values))
    means = [statistics.fmean(values[at : at + window]) for at in range(len(values) - window + 1)]
    seen = f"KL reached {max(means):.3g} (mean of {window} steps), kl.target {target:g}"
    return Evidence(max(means) / target, METRICS, seen)


def kl_small(facts: Facts) -> Evidence:
    target = facts.params.optimize.kl.target
    if on_pairs(facts):
        value, file = abs(facts.number("optimize", "kl")), facts.file("optimize")
    else:
        value, file = abs(ends(facts.series("optimize", "kl"))[1]), METRICS
    return Evidence(value / target, file, f"KL {value:.2g} at the end, kl.target {target:g}")


def reward_rise(facts: Facts) -> Evidence:
    values = facts.series("optimize", "reward", 4)
    change, error, _ = trend(values)
    seen = f"reward changed by {change:+.3g} over {len(values)} steps, standard error {error:.2g}"
    return Evidence(change / max(error, 1e-12), METRICS, seen)


def batch_noise(facts: Facts) -> Evidence:
    change, _, noise = trend(facts.series("optimize", "reward", 4))
    seen = f"a step's mean reward is off by {noise:.2g}, the change is {change:+.2g}"
    return Evidence(noise / max(abs(change), 1e-12), METRICS, seen)


def gradient(facts: Facts) -> Evidence:
    value = statistics.median(facts.series("optimize", "grad_norm"))
    return Evidence(value, METRICS, f"median gradient norm {value:.3g}")


def gradient_clipped(facts: Facts) -> Evidence:
    value = statistics.median(facts.series("optimize", "grad_norm"))
    bound = facts.params.optimize.clip_norm
    return Evidence(value / bound, METRICS, f"median gradient norm {value:.3g}, clip_norm {bound:g}")


def ratio_clipped(facts: Facts) -> Evidence:
    value = statistics.fmean(facts.series("optimize", "ratio_clipped"))
    return Evidence(value, METRICS, f"{value:.2f} of the tokens outside the ratio's bounds")


def entropy(facts: Facts) -> Evidence:
    first, last = ends(facts.series("optimize", "entropy"))
    return Evidence(last / max(first, 1e-12), METRICS, f"entropy {first:.3g} to {last:.3g} nats a token")


def guard(facts: Facts) -> Evidence:
    stopped = facts.result("optimize").get("status") == "stopped_by_guard"
    seen = str(facts.result("optimize").get("reason")) if stopped else "no guard ended the run"
    return Evidence(float(stopped), facts.file("optimize"), seen)


def pair_accuracy(facts: Facts) -> Evidence:
    lower, value = facts.interval("optimize", "interval_after")[0], facts.number("optimize", "accuracy_after")
    seen = f"{value:.2f} of the held-out pairs right, lower end {lower:.2f}"
    return Evidence(lower, facts.file("optimize"), seen)


# -- over-optimisation -------------------------------------------------------------------------------------


def gap(facts: Facts) -> Evidence:
    """The proxy's gain minus the judge's, each in its own deviations at the first look [2210.10760]."""
    gains = []
    for name in ("proxy", "judge"):
        values = facts.series("optimize", name, 2)
        gains.append((values[-1] - values[0]) / max(facts.series("optimize", f"{name}_std")[0], 1e-6))
    seen = f"proxy gained {gains[0]:+.2f} deviations, the judge {gains[1]:+.2f}"
    return Evidence(gains[0] - gains[1], METRICS, seen)


def worse_with_reward(facts: Facts) -> Evidence:
    """How far the win rate's interval lies below one half, while the held-out reward rose; else -1."""
    rise = facts.number("optimize", "reward_after") - facts.number("optimize", "reward_before")
    upper = facts.interval("evaluate")[1]
    seen = f"held-out reward {rise:+.2f}, win rate at most {upper:.2f}"
    return Evidence(0.5 - upper if rise > 0 else -1.0, facts.file("evaluate"), seen)


def length_moved(facts: Facts) -> Evidence:
    first, last = (max(value, 1e-9) for value in ends(facts.series("optimize", "length")))
    return Evidence(
        max(first / last, last / first), METRICS, f"answers went from {first:.3g} to {last:.3g} tokens"
    )


def repetition(facts: Facts) -> Evidence:
    value = ends(facts.series("optimize", "repetition"))[1]
    return Evidence(value, METRICS, f"{value:.2f} of the 4-grams repeated at the end")


# -- evaluation --------------------------------------------------------------------------------------------


def judge_chance(facts: Facts) -> Evidence:
    return held_out(facts, "judge")


def judge_length(facts: Facts) -> Evidence:
    return beyond_length(facts, "judge")


def overlap(facts: Facts) -> Evidence:
    value = facts.number("evaluate", "overlap")
    return Evidence(value, facts.file("evaluate"), f"{value:.0f} evaluation prompts met in training")


def no_verdict(facts: Facts) -> Evidence:
    value, bound = facts.number("evaluate", "failure_share"), facts.params.promote.max_failure_share
    seen = f"{value:.2f} of the prompts without a verdict, promote.max_failure_share {bound:g}"
    return Evidence(value / max(bound, 1e-12), facts.file("evaluate"), seen)


def prompts_needed(rate: float, confidence: float, floor: float = 0.5) -> int:
    """Prompts after which a win rate's Wilson interval lies above `floor`; at most NEVER."""
    low, high = 0, NEVER
    if rate <= floor or wilson(rate * high, high, confidence=confidence).lower <= floor:
        return NEVER
    while high - low > 1:
        middle = (low + high) // 2
        enough = wilson(rate * middle, middle, confidence=confidence).lower > floor
        low, high = (low, middle) if enough else (middle, high)
    return high


def wanted_prompts(facts: Facts) -> int:
    """Compared prompts that this run's decision would have needed."""
    promote = facts.params.promote
    rate = facts.number("evaluate", "win_rate")
    needed = prompts_needed(rate, facts.params.evaluate.confidence, promote.min_win_rate_lower)
    return max(needed, promote.min_prompts)


def power(facts: Facts) -> Evidence:
    """Prompts needed over prompts compared; 0 where more of them would not help."""
    n, rate = facts.number("evaluate", "n"), facts.number("evaluate", "win_rate")
    lower, upper = facts.interval("evaluate")
    seen = f"win rate {rate:.2f} [{lower:.2f}, {upper:.2f}], {n:.0f} prompts"
    needed = wanted_prompts(facts)
    if needed >= NEVER:
        return Evidence(0.0, facts.file("evaluate"), f"{seen}; more prompts would not help")
    return Evidence(needed / max(n, 1), facts.file("evaluate"), f"{seen}; {needed} needed")


def better(facts: Facts) -> Evidence:
    rate, bound = facts.number("evaluate", "win_rate"), facts.params.promote.min_win_rate_lower
    seen = f"win rate {rate:.3f}, promote.min_win_rate_lower {bound:g}"
    return Evidence(rate - bound, facts.file("evaluate"), seen)


def level(facts: Facts) -> Evidence:
    value, bound = (
        facts.number("evaluate", "length_controlled", "estimate"),
        facts.params.promote.min_length_controlled,
    )
    seen = f"{value:.3f} at equal length, promote.min_length_controlled {bound:g}"
    return Evidence(value - bound, facts.file("evaluate"), seen)


def drift(facts: Facts) -> Evidence:
    value, bound = facts.number("evaluate", "kl"), facts.params.promote.max_kl
    seen = f"KL {value:.3g} nats an answer, promote.max_kl {bound:g}"
    return Evidence(value / bound, facts.file("evaluate"), seen)


def slices(facts: Facts) -> Evidence:
    found = facts.result("evaluate").get("slices")
    if not isinstance(found, list):
        raise Missing("evaluate/result.json: slices is missing")
    worse = [str(part.get("slice")) for part in found if part.get("worse") is True]
    over = len(worse) - facts.params.promote.max_regression_slices
    seen = f"worse: {', '.join(worse)}" if worse else f"none of {len(found)} is worse"
    return Evidence(over, facts.file("evaluate"), seen)


def refusals(facts: Facts) -> Evidence:
    value, bound = facts.number("evaluate", "rules", "over_refusal_rise"), facts.params.promote.over_refusal
    seen = f"refusals of harmless prompts {value:+.2f}, promote.over_refusal {bound:g}"
    return Evidence(value - bound, facts.file("evaluate"), seen)
