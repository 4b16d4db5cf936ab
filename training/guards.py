"""What watches a run: pure detectors over the history of metrics, and what is done about what they see.

A detector gets the history (metrics of every step so far, the newest last), the bounds, and the KL target;
it returns what it saw, or None. It knows nothing of models and changes nothing. `review` asks them all;
`decide` turns findings into one action. Everything found is written into the journal by the caller.

Most guards want `window` steps: they look at the mean of the last `window` steps, and start when there are as
many. Some act at once: a number that is not finite, scorers that fail, a gradient far outside its range, a
reference that has moved.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from training.config import SpikeParams
from training.config_guards import Action, GuardParams

History = Sequence[Mapping[str, float]]
LEAST_GAP = 1e-3
"""Nats a token by which generator and trainer may always differ: rounding in float32 is far below it."""
SEVERITY: tuple[Action, ...] = ("warn", "lower_lr", "raise_beta", "rollback", "stop")


class Seen(NamedTuple):
    """A value beyond its bound."""

    value: float
    bound: float
    message: str


@dataclass(frozen=True)
class Finding:
    """What a guard saw and what it asks for."""

    guard: str
    action: Action
    value: float
    bound: float
    message: str


@dataclass(frozen=True)
class Watch:
    """What detectors compare with."""

    bounds: GuardParams
    kl_target: float
    error_limit: float


def recent(history: History, name: str, window: int) -> float | None:
    """Mean of a metric over the last `window` steps; None while there are fewer, or where it is missing."""
    values = [row[name] for row in history[-window:] if name in row]
    return sum(values) / window if len(values) == window else None


def start(history: History, name: str) -> float | None:
    """The first value of a metric: the run's own baseline."""
    return next((row[name] for row in history if name in row), None)


# -- detectors -----------------------------------------------------------------------------------------------


def nonfinite(history: History, watch: Watch) -> Seen | None:
    """A metric that is NaN or infinite; the optimizer has not moved on it."""
    found = sorted(name for name, value in history[-1].items() if not math.isfinite(value))
    return Seen(float(len(found)), 0.0, f"not finite: {', '.join(found)}") if found else None


def scorer_errors(history: History, watch: Watch) -> Seen | None:
    """Share of failed scores over its limit, in the last `window` steps or as many as there are."""
    rows = history[-watch.bounds.window :]
    value = sum(row.get("scorer_errors", 0.0) for row in rows) / len(rows)
    if value <= watch.error_limit:
        return None
    return Seen(value, watch.error_limit, "share of failed scores over rewards.error_limit")


def kl(history: History, watch: Watch) -> Seen | None:
    """KL to the reference over kl.target times a factor; a negative mean as large is as wrong."""
    if watch.bounds.kl is None:
        return None
    bound = watch.bounds.kl * watch.kl_target
    # The newest step counts alone when it is far out: divergence does not wait for a window.
    newest = history[-1].get("kl", 0.0)
    mean = recent(history, "kl", watch.bounds.window)
    value = newest if abs(newest) > 2 * bound else mean
    if value is None or abs(value) <= bound:
        return None
    return Seen(value, bound, "KL to the reference in nats an answer, over guards.kl * kl.target")


def gap(history: History, watch: Watch) -> Seen | None:
    """The proxy's gain since the start minus the judge's, each in its own deviations at the start."""
    if watch.bounds.gap is None:
        return None
    looks = [row for row in history if "judge" in row]
    if len(looks) < 2:
        return None
    gains = []
    for name in ("proxy", "judge"):
        deviation = max(looks[0][f"{name}_std"], 1e-6)
        now = [row[name] for row in looks[1:][-watch.bounds.window :]]
        gains.append((sum(now) / len(now) - looks[0][name]) / deviation)
    value = gains[0] - gains[1]
    if value <= watch.bounds.gap:
        return None
    return Seen(value, watch.bounds.gap, f"proxy gained {gains[0]:.2f} deviations, the judge {gains[1]:.2f}")


def length(history: History, watch: Watch) -> Seen | None:
    """Mean length of the answers against its start, either way."""
    return _against_start(history, watch, "length", watch.bounds.length)


def _against_start(history: History, watch: Watch, name: str, bound: float | None) -> Seen | None:
    first, now = start(history, name), recent(history, name, watch.bounds.window)
    if bound is None or first is None or now is None:
        return None
    value = max(now, 1e-9) / max(first, 1e-9)
    if 1 / bound <= value <= bound:
        return None
    return Seen(value, bound, f"{name} is {now:.3g}, it was {first:.3g} at the start")


def length_corr(history: History, watch: Watch) -> Seen | None:
    """Correlation of reward and length within the batch, while the length moves that way."""
    bound = watch.bounds.length_corr
    value = recent(history, "length_corr", watch.bounds.window)
    first, now = start(history, "length"), recent(history, "length", watch.bounds.window)
    if bound is None or value is None or first is None or now is None or abs(value) <= bound:
        return None
    # A reward that likes short answers is no fault as long as answers do not shrink.
    moved = now / max(first, 1e-9) - 1
    if moved * value <= 0 or abs(moved) < 0.15:
        return None
    return Seen(value, bound, f"reward follows length (r = {value:.2f}) and length moved by {moved:+.0%}")


def repetition(history: History, watch: Watch) -> Seen | None:
    """Share of repeated 4-grams in the answers: of words, or of tokens, where there are no words."""
    bound = watch.bounds.repetition
    words = _over(history, watch, "repetition", bound)
    return words or _over(history, watch, "repeated_tokens", bound)


def copying(history: History, watch: Watch) -> Seen | None:
    """Answers are taken from their prompts, more than at the start: a task may ask for quotations."""
    return _risen(history, watch, "copied", watch.bounds.copying)


def judge_directed(history: History, watch: Watch) -> Seen | None:
    """Answers address a judge or imitate its verdict, more than at the start."""
    return _risen(history, watch, "judge_directed", watch.bounds.judge_directed)


def phrase(history: History, watch: Watch) -> Seen | None:
    """The same words in the answers to all prompts: a magic phrase, whatever it says."""
    return _risen(history, watch, "phrase", watch.bounds.phrase)


def _risen(history: History, watch: Watch, name: str, bound: float | None) -> Seen | None:
    first, now = start(history, name), recent(history, name, watch.bounds.window)
    if bound is None or first is None or now is None or now - first <= bound:
        return None
    return Seen(now - first, bound, f"{name} is {now:.3f}, it was {first:.3f} at the start")


def clipped(history: History, watch: Watch) -> Seen | None:
    """Share of answers cut at max_new_tokens: the cap may be shorter than any answer."""
    return _over(history, watch, "clipped", watch.bounds.clipped)


def zero_variance(history: History, watch: Watch) -> Seen | None:
    """Share of groups whose rewards are all equal: nothing is learned from them."""
    return _over(history, watch, "zero_variance", watch.bounds.zero_variance)


def empty(history: History, watch: Watch) -> Seen | None:
    """Share of empty answers."""
    return _over(history, watch, "empty", watch.bounds.empty)


def unjudged(history: History, watch: Watch) -> Seen | None:
    """Share of answers without a reward, since a scorer failed or said that it can't judge them: they teach
    nothing."""
    return _over(history, watch, "scorer_invalid", watch.bounds.unjudged)


def _over(history: History, watch: Watch, name: str, bound: float | None) -> Seen | None:
    value = recent(history, name, watch.bounds.window)
    if bound is None or value is None or value <= bound:
        return None
    return Seen(value, bound, f"{name} {value:.3f}, mean of {watch.bounds.window} steps")


def entropy(history: History, watch: Watch) -> Seen | None:
    """Token entropy under a share of its start: the policy has closed."""
    first, now = start(history, "entropy"), recent(history, "entropy", watch.bounds.window)
    if watch.bounds.entropy is None or first is None or now is None or now >= watch.bounds.entropy * first:
        return None
    return Seen(
        now / max(first, 1e-9), watch.bounds.entropy, f"entropy {now:.3g}, it was {first:.3g} at the start"
    )


def grad_norm(history: History, watch: Watch) -> Seen | None:
    """Gradient norm far over its running median."""
    return _over_median(history, watch, "grad_norm", watch.bounds.grad_norm)


def stale(history: History, watch: Watch) -> Seen | None:
    """The generator's log-probabilities leave the trainer's: it samples from other weights."""
    bound, now = watch.bounds.stale, recent(history, "rollout_gap", watch.bounds.window)
    first = start(history, "rollout_gap")
    if bound is None or now is None or first is None:
        return None
    value = now / max(first, LEAST_GAP)
    if value <= bound:
        return None
    return Seen(value, bound, f"generator and trainer differ by {now:.3g} nats a token, first by {first:.3g}")


def reference(history: History, watch: Watch) -> Seen | None:
    """The reference is another one than at the start, so KL measures something else."""
    bound, value = watch.bounds.reference, history[-1].get("reference_gap")
    if bound is None or value is None or value <= bound:
        return None
    return Seen(value, bound, "the frozen reference gives other log-probabilities than at the start")


def value_loss(history: History, watch: Watch) -> Seen | None:
    """Value loss far over its running median."""
    return _over_median(history, watch, "value_loss", watch.bounds.value_loss)


def _over_median(history: History, watch: Watch, name: str, bound: float | None) -> Seen | None:
    before = [row[name] for row in history[:-1][-4 * watch.bounds.window :] if name in row]
    newest = history[-1].get(name)
    if bound is None or newest is None or len(before) < watch.bounds.window:
        return None
    value = newest / max(statistics.median(before), 1e-8)
    return Seen(value, bound, f"{name} {newest:.3g} against its running median") if value > bound else None


def risen_loss(history: History, bounds: SpikeParams) -> Seen | None:
    """Mean loss of the last steps far over the first one; a loss that starts at 0 or below has no factor."""
    first, now = start(history, "loss"), recent(history, "loss", bounds.window)
    if bounds.loss is None or first is None or now is None or first <= 0 or now <= bounds.loss * first:
        return None
    return Seen(now / first, bounds.loss, f"loss is {now:.3g}, it was {first:.3g} at the start")


Detector = Callable[[History, Watch], Seen | None]

# Guard -> what it sees, what it asks for unless guards.actions says otherwise.
GUARDS: dict[str, tuple[Detector, Action]] = {
    "nonfinite": (nonfinite, "rollback"),
    "scorer_errors": (scorer_errors, "stop"),
    "kl": (kl, "rollback"),
    "gap": (gap, "stop"),
    "length": (length, "stop"),
    "length_corr": (length_corr, "warn"),
    "repetition": (repetition, "stop"),
    "entropy": (entropy, "rollback"),
    "clipped": (clipped, "stop"),
    "zero_variance": (zero_variance, "stop"),
    "grad_norm": (grad_norm, "lower_lr"),
    "value_loss": (value_loss, "lower_lr"),
    "empty": (empty, "stop"),
    "unjudged": (unjudged, "stop"),
    "copying": (copying, "stop"),
    "judge_directed": (judge_directed, "stop"),
    "phrase": (phrase, "warn"),
    "stale": (stale, "stop"),
    "reference": (reference, "stop"),
}


# -- decisions -----------------------------------------------------------------------------------------------


def review(history: History, watch: Watch, quiet: Mapping[str, int] | None = None) -> list[Finding]:
    """All that the guards see after the newest step.

    `quiet`: guard -> length of the history up to which it has been answered; it speaks again only of what
    came after, so that one fault is not punished at every step while the window still holds it.
    """
    findings = []
    for name, (detector, default) in GUARDS.items():
        answered = (quiet or {}).get(name, 0)
        if answered and len(history) - answered < watch.bounds.window and name != "nonfinite":
            continue
        seen = detector(history, watch)
        if seen is not None:
            action = watch.bounds.actions.get(name, default)
            findings.append(Finding(name, action, seen.value, seen.bound, seen.message))
    return findings


def review_given(history: History, bounds: SpikeParams, quiet: Mapping[str, int]) -> list[Finding]:
    """`review` for a run on given data, whose history has `loss` and `grad_norm`, all of them finite."""
    watch = Watch(GuardParams(grad_norm=bounds.grad_norm, window=bounds.window), 1.0, 0.0)
    findings = []
    for name, seen in (
        ("grad_norm", grad_norm(history, watch)), ("loss", risen_loss(history, bounds)),
    ):  # fmt: skip
        waited = len(history) - quiet.get(name, -bounds.window)
        if seen is not None and waited >= bounds.window:
            findings.append(Finding(name, bounds.action, seen.value, seen.bound, seen.message))
    return findings


def decide(findings: Sequence[Finding], rollbacks: int, max_rollbacks: int) -> Action | None:
    """The gravest action asked for; a rollback too many is a stop."""
    if not findings:
        return None
    action = max((finding.action for finding in findings), key=SEVERITY.index)
    return "stop" if action == "rollback" and rollbacks >= max_rollbacks else action
