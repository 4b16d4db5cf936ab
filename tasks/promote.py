"""Whether the candidate may become champion: a list of gates, each with its evidence. Pure: it changes
nothing.

A gate that can not be computed fails. A failed gate is an outcome, not a crash; the report says why.
`register` is the one that carries the decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tasks.params import PromoteParams
from tasks.places import Json
from tasks.stage import Stage, run
from training.config_optimize import ON_PAIRS

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Gate:
    """One condition and what speaks for or against it."""

    name: str
    passed: bool
    estimate: float | None = None
    interval: Interval = None
    n: int | None = None
    threshold: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Evidence:
    """The results of the stages above, and the thresholds."""

    validate: Json
    reward: Json
    judge: Json
    optimize: Json
    evaluate: Json
    params: PromoteParams


class Uncomputable(Exception):
    """The evidence for a gate is not there."""


def _absent(result: Mapping[str, object], what: str) -> Uncomputable:
    if result.get("status") == "not_run":
        return Uncomputable("not computed: its stage was not run")
    return Uncomputable(f"not computed: {result.get('reason') or what}")


def number(result: Mapping[str, object], *keys: str) -> float:
    """A number at a place of a result; a missing or non-finite one makes its gate fail."""
    value: object = result
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or abs(value) == float("inf")
    ):
        raise _absent(result, f"{'.'.join(keys)} is {'missing' if value is None else value!r}")
    return float(value)


def interval(result: Mapping[str, object], key: str = "interval") -> tuple[float, float]:
    """The two ends of an interval."""
    value = result.get(key)
    if not isinstance(value, Sequence) or len(value) != 2:
        raise _absent(result, f"{key} is missing")
    return float(value[0]), float(value[1])


def data_checks(e: Evidence) -> Gate:
    failed = number(e.validate, "checks", "failed")
    asked = int(number(e.validate, "checks", "evaluated"))
    return Gate(
        "data checks", failed == 0 and asked > 0, failed, None, asked, 0.0, f"{failed:.0f} of {asked} failed"
    )


def _score_gate(name: str, result: Json) -> Gate:
    gate = result.get("gate")
    opened = isinstance(gate, dict) and gate.get("open") is True
    reason = str(gate.get("reason", "")) if isinstance(gate, dict) else ""
    n = int(number(result, "n"))
    return Gate(
        name, opened, number(result, "accuracy"), interval(result), n, 0.5, reason or "held-out accuracy"
    )


def reward_gate(e: Evidence) -> Gate:
    if e.optimize.get("algorithm") in ON_PAIRS:
        return Gate("reward model", True, reason="not used: trained on the pairs themselves")
    return _score_gate("reward model", e.reward)


def judge_gate(e: Evidence) -> Gate:
    return _score_gate("judge", e.judge)


def training_ended_well(e: Evidence) -> Gate:
    status = str(e.optimize.get("status"))
    reason = str(e.optimize.get("reason") or f"status: {status}")
    return Gate("training", status == "trained", reason=reason)


def prompts_compared(e: Evidence) -> Gate:
    n = number(e.evaluate, "n")
    bound = e.params.min_prompts
    return Gate(
        "prompts compared", n >= bound, n, None, int(n), bound, f"at least {bound} are needed to decide"
    )


def failures(e: Evidence) -> Gate:
    share = number(e.evaluate, "failure_share")
    bound = e.params.max_failure_share
    return Gate("failures", share <= bound, share, None, None, bound, "share of prompts without a verdict")


def unseen_prompts(e: Evidence) -> Gate:
    overlap = number(e.evaluate, "overlap")
    return Gate(
        "unseen prompts", overlap == 0, overlap, None, None, 0.0, "evaluation prompts met in training"
    )


def win_rate(e: Evidence) -> Gate:
    estimate, ends, bound = number(e.evaluate, "win_rate"), interval(e.evaluate), e.params.min_win_rate_lower
    n = int(number(e.evaluate, "n"))
    return Gate("win rate", ends[0] > bound, estimate, ends, n, bound, "lower end of the interval above it")


def length_controlled(e: Evidence) -> Gate:
    part = e.evaluate.get("length_controlled")
    if not isinstance(part, dict):
        raise _absent(e.evaluate, "length_controlled is missing")
    estimate, bound = number(part, "estimate"), e.params.min_length_controlled
    passed = estimate > bound
    return Gate(
        "length-controlled win rate", passed, estimate, interval(part), None, bound, "at equal length"
    )


def divergence(e: Evidence) -> Gate:
    kl, bound = number(e.evaluate, "kl"), e.params.max_kl
    return Gate("KL", kl <= bound, kl, None, None, bound, "nats an answer from the SFT model")


def regressions(e: Evidence) -> Gate:
    slices = e.evaluate.get("slices")
    if not isinstance(slices, list) or not slices:
        raise _absent(e.evaluate, "slices are missing")
    worse = [str(part["slice"]) for part in slices if part.get("worse") is True]
    bound = e.params.max_regression_slices
    reason = f"significantly worse: {', '.join(worse)}" if worse else "no slice is significantly worse"
    return Gate("slices", len(worse) <= bound, float(len(worse)), None, len(slices), float(bound), reason)


def over_refusal(e: Evidence) -> Gate:
    rise, bound = number(e.evaluate, "rules", "over_refusal_rise"), e.params.over_refusal
    return Gate(
        "over-refusal", rise <= bound, rise, None, None, bound, "rise of refusals of harmless prompts"
    )


GATES: dict[str, Callable[[Evidence], Gate]] = {
    "data checks": data_checks,
    "reward model": reward_gate,
    "judge": judge_gate,
    "training": training_ended_well,
    "unseen prompts": unseen_prompts,
    "prompts compared": prompts_compared,
    "failures": failures,
    "win rate": win_rate,
    "length-controlled win rate": length_controlled,
    "KL": divergence,
    "slices": regressions,
    "over-refusal": over_refusal,
}


def decide(evidence: Evidence) -> list[Gate]:
    """All gates, in the order in which the pipeline meets them."""
    gates: list[Gate] = []
    for name, gate in GATES.items():
        try:
            judged = gate(evidence)
        except Uncomputable as error:
            judged = Gate(name, False, reason=str(error))
        gates.append(replace(judged, passed=bool(judged.passed)))
    return gates


def decision(gates: Sequence[Gate], candidate: object, champion: object, require_human: bool) -> Json:
    """The document that `register` carries out and the report shows."""
    failed = [gate.name for gate in gates if not gate.passed]
    return {
        "promote": not failed,
        "failed": failed,
        "gates_passed": len(gates) - len(failed),
        "gates_failed": len(failed),
        "gates": [asdict(gate) for gate in gates],
        "candidate": candidate,
        "champion": champion,
        "require_human": require_human,
    }


def body(stage: Stage) -> None:
    """Collect the evidence and write decision.json."""
    params = stage.params.promote
    names = ("validate", "reward", "judge", "optimize", "evaluate")
    results = {name: stage.result_of(name) for name in names}
    gates = decide(Evidence(params=params, **results))
    champion = stage.result_of("champion", "champion.json").get("digest")
    document = decision(gates, results["optimize"].get("digest"), champion, params.require_human)
    for gate in gates:
        print(f"promote: {'passed' if gate.passed else 'FAILED'}  {gate.name}: {gate.reason}")
    stage.publish_result(document, file="decision.json")


if __name__ == "__main__":
    run("promote", body)
