"""What speaks for a fault in data, reward model or SFT: one function a question, from facts to one number.

Each number is scaled so that its bounds need no parameter: a KL is told as a multiple of its target, a share
as a share. `tasks/outcomes.py` goes on with optimisation and evaluation; the tree that asks all these
questions, with the bounds, is in `tasks/diagnosis.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.evidence import Facts, Missing
from training.config_optimize import ON_PAIRS

REPRESENTATIVE = 0.2
"""Share of the pairs that must be judged twice before their agreement speaks for all pairs."""
ENOUGH_STEPS = 12
"""Steps of SFT from which a loss that does not fall is a cause."""


@dataclass(frozen=True)
class Evidence:
    """One number, where it is from, and what it is in words."""

    value: float
    file: str
    seen: str
    decisive: bool = True
    """False: too little is known to call it a cause, however bad the number is."""


# -- which branches a run has ------------------------------------------------------------------------------


def on_pairs(facts: Facts) -> bool:
    """Trained on the pairs themselves (DPO and its family)."""
    return facts.params.optimize.algorithm in ON_PAIRS


def on_policy(facts: Facts) -> bool:
    """Trained on its own samples against a reward."""
    return not on_pairs(facts)


def learned_reward(facts: Facts) -> bool:
    """On policy, with the reward stage's model among the scorers."""
    return on_policy(facts) and any(s.kind == "learned" for s in facts.params.optimize.rewards.scorers)


def always(facts: Facts) -> bool:
    """Every run."""
    return True


# -- the course of a run -----------------------------------------------------------------------------------


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the first and of the last quarter of a series, at least one value each."""
    size = max(1, len(values) // 4)
    return statistics.fmean(values[:size]), statistics.fmean(values[-size:])


METRICS = "optimize/metrics.jsonl"


def failed_stages(facts: Facts) -> Evidence:
    if not facts.failed:
        return Evidence(0, ".plumbline/status", "no stage failed")
    stage, said = next(iter(facts.failed.items()))
    first = (str(said.get("message") or "").splitlines() or ["no message"])[0]
    seen = f"{stage}: {said.get('kind')}: {first}"
    return Evidence(len(facts.failed), f".plumbline/status/{stage}.json", seen)


# -- data --------------------------------------------------------------------------------------------------


def _pairs(facts: Facts) -> float:
    parts = facts.result("validate").get("pairs")
    if not isinstance(parts, dict):
        raise Missing("validate/result.json: pairs is missing")
    return float(sum(parts.values()))


def refused(facts: Facts) -> Evidence:
    rows, bad = facts.number("validate", "rows_in"), facts.number("validate", "rows_refused")
    return Evidence(bad / max(rows, 1), facts.file("validate"), f"{bad:.0f} of {rows:.0f} rows refused")


def training_pairs(facts: Facts) -> Evidence:
    value = facts.number("validate", "pairs", "train")
    return Evidence(value, facts.file("validate"), f"{value:.0f} pairs to train on")


def agreement(facts: Facts) -> Evidence:
    value = facts.number("validate", "agreement", "mean")
    twice, pairs = facts.number("validate", "agreement", "pairs_judged_more_than_once"), _pairs(facts)
    enough = twice >= REPRESENTATIVE * pairs
    seen = f"two judgements agree in {value:.2f}, over {twice:.0f} pairs judged more than once"
    rest = "" if enough else f"; only {twice / max(pairs, 1):.0%} of the pairs, may be a choice of hard ones"
    return Evidence(value, facts.file("validate"), seen + rest, enough)


def contradictions(facts: Facts) -> Evidence:
    value, pairs = facts.number("validate", "agreement", "contradicted_pairs"), _pairs(facts)
    seen = f"{value:.0f} of {pairs:.0f} pairs are also labelled the other way round"
    return Evidence(value / max(pairs, 1), facts.file("validate"), seen)


def data_length(facts: Facts) -> Evidence:
    value = facts.number("validate", "length_baseline", "accuracy")
    return Evidence(value, facts.file("validate"), f"length alone puts {value:.2f} of the pairs right")


# -- reward model ------------------------------------------------------------------------------------------


def held_out(facts: Facts, stage: str) -> Evidence:
    """Lower end of the held-out accuracy of reward model or judge."""
    lower, accuracy, n = facts.interval(stage)[0], facts.number(stage, "accuracy"), facts.number(stage, "n")
    seen = f"accuracy {accuracy:.2f} on {n:.0f} held-out pairs, lower end {lower:.2f}"
    return Evidence(lower, facts.file(stage), seen)


def beyond_length(facts: Facts, stage: str) -> Evidence:
    """What reward model or judge puts right more than length alone does."""
    accuracy, length = facts.number(stage, "accuracy"), facts.number(stage, "length_baseline")
    seen = f"accuracy {accuracy:.2f}, length alone {length:.2f}"
    return Evidence(accuracy - length, facts.file(stage), seen)


def reward_pairs(facts: Facts) -> Evidence:
    what, key = ("prompts", "prompts") if facts.params.reward.process else ("pairs", "n")
    n, least = facts.number("reward", key), facts.params.reward.gate.min_pairs
    seen = f"{n:.0f} held-out {what}, gate.min_pairs {least}"
    return Evidence(n / least, facts.file("reward"), seen)


def reward_chance(facts: Facts) -> Evidence:
    """Chance is one half for pairs; for steps it is the commoner label, so what is above it counts from
    one half on."""
    if not facts.params.reward.process:
        return held_out(facts, "reward")
    lower, common = facts.interval("reward")[0], facts.number("reward", "majority_baseline")
    seen = f"accuracy of steps at least {lower:.2f}, the commoner label alone {common:.2f}"
    return Evidence(0.5 + lower - max(common, 0.5), facts.file("reward"), seen)


def reward_length(facts: Facts) -> Evidence:
    return beyond_length(facts, "reward")


def calibration(facts: Facts) -> Evidence:
    value = facts.number("reward", "calibration", "ece")
    return Evidence(value, facts.file("reward"), f"chance and frequency differ by {value:.2f}")


def saturation(facts: Facts) -> Evidence:
    usual, now = (
        facts.number("reward", "score_std"),
        statistics.median(facts.series("optimize", "reward_std")),
    )
    seen = f"deviation {now:.3g} on the policy's answers, {usual:.3g} on held-out pairs"
    return Evidence(now / max(usual, 1e-12), METRICS, seen)


def equal_groups(facts: Facts) -> Evidence:
    value = statistics.fmean(facts.series("optimize", "zero_variance"))
    return Evidence(value, METRICS, f"{value:.2f} of the groups have equal rewards")


# -- SFT ---------------------------------------------------------------------------------------------------


def sft_dropped(facts: Facts) -> Evidence:
    dropped = facts.result("sft").get("dropped")
    if not isinstance(dropped, dict):
        raise Missing("sft/result.json: dropped is missing")
    kept, lost = facts.number("sft", "rows"), float(sum(dropped.values()))
    seen = f"{lost:.0f} of {kept + lost:.0f} demonstrations too long"
    return Evidence(lost / max(kept + lost, 1), facts.file("sft"), seen)


def sft_loss(facts: Facts) -> Evidence:
    losses = facts.series("sft", "loss", 2)
    first, last = ends(losses)
    seen = f"loss {first:.3f} to {last:.3f}, first and last quarter of {len(losses)} steps"
    # In a few steps the batches differ by more than a model learns; half as much again is no noise.
    decisive = len(losses) >= ENOUGH_STEPS or last > 1.5 * first
    return Evidence(1 - last / max(first, 1e-12), "sft/metrics.jsonl", seen, decisive)


def sft_stops(facts: Facts) -> Evidence:
    value = facts.number("sft", "stop_share")
    return Evidence(value, facts.file("sft"), f"{value:.2f} of the sampled answers end by themselves")


def cut_answers(facts: Facts) -> Evidence:
    first, _ = ends(facts.series("optimize", "clipped"))
    seen = f"{first:.2f} of the first answers cut at max_new_tokens"
    return Evidence(first, METRICS, seen)
