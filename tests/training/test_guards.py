from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest

from training.config_guards import GuardParams
from training.guards import GUARDS, SEVERITY, Finding, Seen, Watch, decide, recent, review, start

WINDOW = 3
HEALTHY = {
    "reward": 0.5, "kl": 0.2, "length": 40.0, "length_corr": 0.1, "repetition": 0.02, "entropy": 2.0,
    "clipped": 0.2, "zero_variance": 0.0, "empty": 0.0, "scorer_invalid": 0.0, "grad_norm": 1.0,
    "value_loss": 0.5, "scorer_errors": 0.0, "loss": 0.1, "repeated_tokens": 0.05, "copied": 0.1,
    "judge_directed": 0.05, "phrase": 0.1, "rollout_gap": 0.02, "reference_gap": 0.0,
}  # fmt: skip


def watch(**changes: object) -> Watch:
    return Watch(GuardParams.model_validate({"window": WINDOW, **changes}), kl_target=1.0, error_limit=0.1)


def run(steps: int = 8, **late: float | Sequence[float]) -> list[dict[str, float]]:
    """A healthy run whose last `WINDOW` steps (or as many as values are given) are changed."""
    history = [dict(HEALTHY) for _ in range(steps)]
    for name, value in late.items():
        values = [value] * WINDOW if isinstance(value, int | float) else list(value)
        for row, one in zip(history[-len(values) :], values, strict=True):
            row[name] = one
    return history


def seen(name: str, history: list[dict[str, float]], **changes: object) -> Seen | None:
    return GUARDS[name][0](history, watch(**changes))


def test_a_healthy_run_is_left_alone_at_every_length() -> None:
    for steps in range(1, 10):
        assert review(run(steps) if steps >= WINDOW else [dict(HEALTHY)] * steps, watch()) == []


@pytest.mark.parametrize(
    ("guard", "fault", "near"),
    [
        ("kl", {"kl": 5.2}, {"kl": 4.9}),
        ("kl", {"kl": -5.2}, {"kl": -4.9}),
        ("length", {"length": 81.0}, {"length": 79.0}),
        ("length", {"length": 19.0}, {"length": 21.0}),
        ("repetition", {"repetition": 0.51}, {"repetition": 0.49}),
        ("repetition", {"repeated_tokens": 0.51}, {"repeated_tokens": 0.49}),
        ("copying", {"copied": 0.36}, {"copied": 0.34}),
        ("judge_directed", {"judge_directed": 0.16}, {"judge_directed": 0.14}),
        ("phrase", {"phrase": 0.61}, {"phrase": 0.59}),
        ("stale", {"rollout_gap": 0.061}, {"rollout_gap": 0.059}),
        ("reference", {"reference_gap": [0.011]}, {"reference_gap": [0.009]}),
        ("entropy", {"entropy": 0.19}, {"entropy": 0.21}),
        ("clipped", {"clipped": 0.97}, {"clipped": 0.94}),
        ("zero_variance", {"zero_variance": 0.97}, {"zero_variance": 0.94}),
        ("empty", {"empty": 0.31}, {"empty": 0.29}),
        ("unjudged", {"scorer_invalid": 0.51}, {"scorer_invalid": 0.49}),
        ("length_corr", {"length_corr": 0.7, "length": 50.0}, {"length_corr": 0.7}),
        ("length_corr", {"length_corr": -0.7, "length": 30.0}, {"length_corr": -0.7, "length": 50.0}),
        ("length_corr", {"length_corr": 0.7, "length": 50.0}, {"length_corr": 0.5, "length": 50.0}),
        ("grad_norm", {"grad_norm": [21.0]}, {"grad_norm": [19.0]}),
        ("value_loss", {"value_loss": [10.5]}, {"value_loss": [9.5]}),
        ("scorer_errors", {"scorer_errors": 0.11}, {"scorer_errors": 0.09}),
        ("nonfinite", {"loss": [math.nan]}, {"loss": [1e30]}),
        ("nonfinite", {"reward": [math.inf]}, {"reward": [-1e30]}),
    ],
)
def test_each_guard_sees_its_fault_and_no_less(
    guard: str, fault: dict[str, float], near: dict[str, float]
) -> None:
    found = seen(guard, run(**fault))
    assert found is not None and found.message
    assert seen(guard, run(**near)) is None


@pytest.mark.parametrize(
    "guard",
    ["length", "repetition", "entropy", "clipped", "zero_variance", "empty", "copied", "judge_directed",
     "phrase", "rollout_gap"],
)  # fmt: skip
def test_one_bad_step_is_not_a_window(guard: str) -> None:
    faults = {
        "length": 120.0,
        "repetition": 1.0,
        "entropy": 0.5,
        "clipped": 1.0,
        "zero_variance": 1.0,
        "empty": 0.6,
        "copied": 0.5,
        "judge_directed": 0.3,
        "phrase": 1.0,
        "rollout_gap": 0.1,
    }
    name = {"copied": "copying", "rollout_gap": "stale"}.get(guard, guard)
    assert seen(name, run(**{guard: [faults[guard]]})) is None
    assert seen(name, [dict(HEALTHY)] * 2) is None


def test_a_generator_that_was_exact_may_differ_by_the_least_gap() -> None:
    exact = [{**row, "rollout_gap": 1e-7} for row in run()]
    for gap, alarm in ((2.9e-3, False), (3.1e-3, True)):
        history = [*exact[:-WINDOW], *[{**HEALTHY, "rollout_gap": gap}] * WINDOW]
        assert (seen("stale", history) is not None) == alarm


@pytest.mark.parametrize(
    "guard",
    ["kl", "gap", "length", "length_corr", "repetition", "entropy", "clipped", "zero_variance", "empty",
     "unjudged", "grad_norm", "value_loss", "copying", "judge_directed", "phrase", "stale", "reference"],
)  # fmt: skip
def test_a_null_bound_turns_a_guard_off(guard: str) -> None:
    names = ("kl", "repetition", "repeated_tokens", "clipped", "zero_variance", "empty", "copied",
             "judge_directed", "phrase", "rollout_gap", "reference_gap", "scorer_invalid")  # fmt: skip
    everything = {name: [1e9] * WINDOW for name in names}
    history = run(**everything, length=[1e9] * WINDOW, length_corr=[0.99] * WINDOW, entropy=[0.0] * WINDOW,
                  grad_norm=[1e9], value_loss=[1e9])  # fmt: skip
    history[0] |= {"proxy": 0.0, "proxy_std": 1.0, "judge": 0.0, "judge_std": 1.0}
    history[-1] |= {"proxy": 9.0, "proxy_std": 1.0, "judge": 0.0, "judge_std": 1.0}
    assert seen(guard, history) is not None
    assert seen(guard, history, **{guard: None}) is None


def test_a_far_kl_does_not_wait_for_the_window() -> None:
    assert seen("kl", [dict(HEALTHY), {**HEALTHY, "kl": 10.1}]) is not None
    assert seen("kl", [dict(HEALTHY), {**HEALTHY, "kl": 9.9}]) is None


def test_errors_of_the_first_step_are_enough() -> None:
    assert seen("scorer_errors", [{**HEALTHY, "scorer_errors": 1.0}]) is not None
    # Later one bad step counts as its share of the window.
    assert seen("scorer_errors", run(scorer_errors=[0.2])) is None


def looks(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [
        {**HEALTHY, "proxy": proxy, "proxy_std": 2.0, "judge": judge, "judge_std": 0.5}
        for proxy, judge in pairs
    ]


def test_the_gap_is_in_deviations_of_the_start() -> None:
    # Proxy +4 = 2 deviations, judge +.25 = half a deviation: a gap of 1.5.
    found = seen("gap", looks((1.0, 1.0), (5.0, 1.25)))
    assert found is not None and found.value == pytest.approx(1.5)
    assert seen("gap", looks((1.0, 1.0), (5.0, 1.55))) is None
    assert seen("gap", looks((1.0, 1.0), (1.0, 3.0))) is None, "a judge that gains more is no fault"
    assert seen("gap", looks((1.0, 1.0))) is None
    assert seen("gap", [*looks((1.0, 1.0)), dict(HEALTHY)]) is None


def test_the_gap_takes_the_mean_of_the_last_looks() -> None:
    noisy = looks((0.0, 0.0), (3.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    assert seen("gap", noisy) is None


def test_recent_and_start() -> None:
    history = [{"a": 1.0}, {"a": 2.0, "b": 5.0}, {"a": 6.0}]
    assert recent(history, "a", 2) == 4.0
    assert recent(history, "a", 4) is None
    assert recent(history, "b", 2) is None
    assert start(history, "b") == 5.0 and start(history, "c") is None


def test_review_uses_the_default_action_or_the_one_asked_for() -> None:
    (finding,) = review(run(repetition=0.9), watch())
    assert finding == Finding("repetition", "stop", pytest.approx(0.9), 0.5, finding.message)
    (finding,) = review(run(repetition=0.9), watch(actions={"repetition": "warn"}))
    assert finding.action == "warn"


def test_an_answered_guard_is_quiet_until_its_window_is_new() -> None:
    history = run(repetition=0.9)
    assert review(history, watch(), {"repetition": len(history) - 1}) == []
    assert len(review(history, watch(), {"repetition": len(history) - WINDOW})) == 1
    broken = run(loss=[math.nan])
    assert len(review(broken, watch(), {"nonfinite": len(broken) - 1})) == 1, "NaN never waits"


def finding(action: str) -> Finding:
    return Finding("g", action, 1.0, 0.5, "m")  # type: ignore[arg-type]


def test_the_gravest_action_wins() -> None:
    assert decide([], 0, 2) is None
    for low, high in pairwise(SEVERITY):
        assert decide([finding(low), finding(high), finding(low)], 0, 2) == high


def test_a_rollback_too_many_is_a_stop() -> None:
    assert decide([finding("rollback")], 1, 2) == "rollback"
    assert decide([finding("rollback")], 2, 2) == "stop"
    assert decide([finding("rollback")], 0, 0) == "stop"
    assert decide([finding("lower_lr")], 5, 2) == "lower_lr"
