"""Each gate opens on good evidence, closes on bad, and fails when it can not be computed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from tasks.params import PromoteParams
from tasks.promote import GATES, Evidence, decide, decision
from tasks.results import headline

GOOD: dict[str, Any] = {
    "validate": {"checks": {"evaluated": 20, "failed": 0}},
    "reward": {"gate": {"open": True}, "accuracy": 0.7, "interval": [0.6, 0.8], "n": 120},
    "judge": {"gate": {"open": True}, "accuracy": 0.7, "interval": [0.6, 0.8], "n": 120},
    "optimize": {"status": "trained", "algorithm": "rloo", "digest": "c"},
    "evaluate": {
        "status": "compared",
        "n": 120,
        "win_rate": 0.62,
        "interval": [0.53, 0.7],
        "length_controlled": {"estimate": 0.6, "interval": [0.51, 0.69]},
        "kl": 0.4,
        "failure_share": 0.0,
        "overlap": 0,
        "slices": [{"slice": "advice", "n": 20, "win_rate": 0.6, "worse": False}],
        "rules": {"over_refusal_rise": 0.0},
    },
}


def judged(results: dict[str, Any], **params: Any) -> dict[str, Any]:
    gates = decide(Evidence(params=PromoteParams(**params), **results))
    assert [gate.name for gate in gates] == list(GATES)
    return {gate.name: gate for gate in gates}


def changed(path: str, value: Any) -> dict[str, Any]:
    results = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = results
    for key in parents:
        place = place[key]
    place[last] = value
    return results


def test_all_gates_open_on_good_evidence() -> None:
    gates = judged(GOOD)
    assert all(gate.passed for gate in gates.values())
    document = decision(list(gates.values()), "c", "b", False)
    assert headline(document) == {"gates_passed": float(len(GATES)), "gates_failed": 0.0}
    assert (document["promote"], document["failed"]) == (True, [])


@pytest.mark.parametrize(
    ("path", "value", "gate"),
    [
        ("validate.checks.failed", 1, "data checks"),
        ("validate.checks.evaluated", 0, "data checks"),
        ("reward.gate", {"open": False, "reason": "no better than length"}, "reward model"),
        ("judge.gate", {"open": False, "reason": "chance"}, "judge"),
        ("optimize.status", "stopped_by_guard", "training"),
        ("evaluate.n", 99, "prompts compared"),
        ("evaluate.failure_share", 0.06, "failures"),
        ("evaluate.overlap", 1, "unseen prompts"),
        ("evaluate.interval", [0.5, 0.7], "win rate"),
        ("evaluate.length_controlled.estimate", 0.5, "length-controlled win rate"),
        ("evaluate.kl", 10.1, "KL"),
        ("evaluate.slices", [{"slice": "a", "n": 30, "win_rate": 0.2, "worse": True}], "slices"),
        ("evaluate.rules.over_refusal_rise", 0.06, "over-refusal"),
    ],
)
def test_a_gate_closes(path: str, value: Any, gate: str) -> None:
    gates = judged(changed(path, value))
    assert [name for name, found in gates.items() if not found.passed] == [gate]


@pytest.mark.parametrize(
    ("path", "value", "gate"),
    [
        ("evaluate.n", None, "prompts compared"),
        ("evaluate.failure_share", None, "failures"),
        ("evaluate.kl", math.nan, "KL"),
        ("evaluate.kl", "0.1", "KL"),
        ("evaluate.overlap", None, "unseen prompts"),
        ("evaluate.interval", None, "win rate"),
        ("evaluate.win_rate", math.inf, "win rate"),
        ("evaluate.length_controlled", None, "length-controlled win rate"),
        ("evaluate.slices", [], "slices"),
        ("evaluate.rules", {}, "over-refusal"),
        ("validate.checks", None, "data checks"),
        ("judge.accuracy", None, "judge"),
        ("optimize.status", None, "training"),
    ],
)
def test_a_gate_that_can_not_be_computed_fails(path: str, value: Any, gate: str) -> None:
    gates = judged(changed(path, value))
    assert not gates[gate].passed
    assert gates[gate].reason


def test_what_was_not_run_is_said_with_its_reason() -> None:
    results = changed("evaluate", {"status": "not_run", "reason": "the judge is not good enough"})
    gates = judged(results)
    assert not gates["win rate"].passed
    assert gates["win rate"].reason == "not computed: its stage was not run"
    results = changed("evaluate", {"status": "no_verdicts", "reason": "no prompt has a verdict"})
    assert judged(results)["slices"].reason == "not computed: no prompt has a verdict"


def test_the_reward_model_does_not_count_when_pairs_were_trained_on() -> None:
    results = changed("optimize.algorithm", "dpo")
    results["reward"]["gate"] = {"open": False}
    assert judged(results)["reward model"].passed


def test_thresholds_are_the_parameters() -> None:
    assert not judged(GOOD, min_prompts=121)["prompts compared"].passed
    assert not judged(GOOD, max_kl=0.3)["KL"].passed
    assert not judged(GOOD, min_win_rate_lower=0.53)["win rate"].passed
    bad = changed("evaluate.slices", [{"slice": "a", "n": 9, "win_rate": 0.1, "worse": True}])
    assert judged(bad, max_regression_slices=1)["slices"].passed
