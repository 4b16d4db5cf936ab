"""Candidate against champion on the same held-out prompts, judged by a model that neither has been trained
against.

The program `training.compare` generates and scores, one row a prompt in samples.jsonl. Here the rows become
evidence: win rate with interval (a tie is half a win), the same at equal length, slices, KL, rule checks. A
row without a verdict is counted as a failure, never as a loss or a zero, and both models are always compared
on the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.config import PARTS
from data.errors import DataError
from data.records import Demonstration, Preference, Prompt, normalise_prompt, read_records
from tasks.optimize import closed_gate
from tasks.places import Json
from tasks.stage import Stage, run
from training.stats import Interval, length_controlled_win_rate
from training.stats import win_rate as half_tie_win_rate

HARMLESS = "safety_benign"
_SLICE_MIN = 5  # fewer rows give an interval that says nothing


@dataclass(frozen=True)
class Verdict:
    """One compared prompt."""

    key: str
    slice: str
    outcome: float | None
    """1 the candidate, 0 the champion, 1/2 a tie; None: no verdict."""
    length_difference: float
    kl: float | None
    rules: Mapping[str, tuple[bool, bool]]
    """Rule -> (candidate, champion) broke it."""


def read_verdicts(path: Path, tie: float) -> list[Verdict]:
    """The rows of samples.jsonl; scores closer than `tie` are a tie."""
    verdicts = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                verdicts.append(_verdict(json.loads(line), tie))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{path}:{number}: not a comparison ({error!r}); run evaluate again"
                ) from error
    return verdicts


def _verdict(row: Json, tie: float) -> Verdict:
    candidate, champion = row["candidate"], row["champion"]
    assert isinstance(candidate, dict) and isinstance(champion, dict)
    outcome: float | None = None
    ours, theirs = candidate.get("score"), champion.get("score")
    if row.get("failure") is None and isinstance(ours, int | float) and isinstance(theirs, int | float):
        difference = float(ours) - float(theirs)
        same = candidate.get("text") == champion.get("text")
        outcome = 0.5 if same or abs(difference) <= tie else float(difference > 0)
    kl = row.get("kl")
    rules = {
        rule: (bool(candidate["rules"][rule]), bool(champion["rules"][rule]))
        for rule in sorted(candidate.get("rules", {}))
    }
    return Verdict(
        key=str(row["id"]), slice=str(row.get("slice", "all")), outcome=outcome,
        length_difference=float(candidate["tokens"]) - float(champion["tokens"]),
        kl=float(kl) if isinstance(kl, int | float) else None, rules=rules,
    )  # fmt: skip


def evidence(verdicts: Sequence[Verdict], confidence: float) -> Json:
    """The numbers that the gates read."""
    judged = [verdict for verdict in verdicts if verdict.outcome is not None]
    outcomes = [verdict.outcome for verdict in judged if verdict.outcome is not None]
    wins, ties, losses = count(outcomes)
    found: Json = {
        "status": "compared" if outcomes else "no_verdicts",
        "n": len(outcomes),
        "wins": wins,
        "ties": ties,
        "losses": losses,
        "failures": len(verdicts) - len(judged),
        "failure_share": (len(verdicts) - len(judged)) / len(verdicts) if verdicts else 1.0,
        "slices": slices(judged, confidence),
        "rules": rules(verdicts),
        "confidence": confidence,
    }
    if not outcomes:
        return {**found, "reason": "no prompt has a verdict"}
    rate = half_tie_win_rate(wins, ties, losses, confidence=confidence)
    lengths = [verdict.length_difference for verdict in judged]
    level = length_controlled_win_rate(outcomes, lengths, confidence=confidence)
    kls = [verdict.kl for verdict in verdicts if verdict.kl is not None]
    return {
        **found,
        "win_rate": rate.estimate,
        "interval": [rate.lower, rate.upper],
        "length_controlled": {
            "estimate": level.estimate, "interval": [level.lower, level.upper], "slope": level.slope
        },
        "length_difference": sum(lengths) / len(lengths),
        "kl": sum(kls) / len(kls) if kls else None,
    }  # fmt: skip


def count(outcomes: Sequence[float]) -> tuple[int, int, int]:
    """Wins, ties, losses."""
    wins = sum(outcome == 1 for outcome in outcomes)
    losses = sum(outcome == 0 for outcome in outcomes)
    return wins, len(outcomes) - wins - losses, losses


def slices(judged: Sequence[Verdict], confidence: float) -> list[Json]:
    """Win rate of each slice; `worse` when even the interval's upper end is below one half."""
    table: list[Json] = []
    for name in sorted({verdict.slice for verdict in judged}):
        outcomes = [v.outcome for v in judged if v.slice == name and v.outcome is not None]
        wins, ties, losses = count(outcomes)
        rate: Interval = half_tie_win_rate(wins, ties, losses, confidence=confidence)
        table.append(
            {
                "slice": name, "n": rate.n, "win_rate": rate.estimate, "interval": [rate.lower, rate.upper],
                "worse": rate.n >= _SLICE_MIN and rate.upper < 0.5,
            }
        )  # fmt: skip
    return table


def rules(verdicts: Sequence[Verdict]) -> Json:
    """Share of answers that break each rule, candidate and champion, and the rise of refusals of harmless
    prompts.
    """
    found: Json = {}
    for rule in sorted({rule for verdict in verdicts for rule in verdict.rules}):
        pairs = [verdict.rules[rule] for verdict in verdicts if rule in verdict.rules]
        found[rule] = {
            "candidate": sum(pair[0] for pair in pairs) / len(pairs),
            "champion": sum(pair[1] for pair in pairs) / len(pairs),
            "n": len(pairs),
        }
    refusals = [v.rules["refusal"] for v in verdicts if "refusal" in v.rules and _harmless(v, verdicts)]
    if refusals:
        found["over_refusal_rise"] = (sum(a for a, _ in refusals) - sum(b for _, b in refusals)) / len(
            refusals
        )
    return found


def _harmless(verdict: Verdict, verdicts: Sequence[Verdict]) -> bool:
    """Prompts that must be answered: the slice of harmless ones that sound alarming, else all but the
    harmful ones.
    """
    if any(other.slice == HARMLESS for other in verdicts):
        return verdict.slice == HARMLESS
    return verdict.slice != "safety_harmful"


def overlap(folder: Path) -> int:
    """Evaluation prompts whose normalised text was met in any training part."""
    trained: set[str] = set()
    for part in PARTS[:3]:
        trained |= {_text(record) for record in read_records(folder / f"pairs_{part}.jsonl", Preference)}
    trained |= {_text(record) for record in read_records(folder / "demonstrations.jsonl", Demonstration)}
    trained |= {_text(record) for record in read_records(folder / "prompts_train.jsonl", Prompt)}
    return sum(_text(record) in trained for record in read_records(folder / "prompts_eval.jsonl", Prompt))


def _text(record: Prompt | Preference | Demonstration) -> str:
    turns = [message for message in record.prompt if message.role != "system"]
    return " | ".join(f"{turn.role}: {normalise_prompt(turn.content)}" for turn in turns)


def body(stage: Stage) -> None:
    """Compare, unless there is no candidate or no judge to compare by."""
    optimized = stage.result_of("optimize")
    reason = closed_gate(stage.result_of("judge"), "judge")
    if optimized.get("status") == "not_run":
        reason = f"there is no candidate: {optimized.get('reason')}"
    if reason is not None:
        stage.not_run(reason)
        return
    params = stage.params.evaluate
    champion = stage.output_of("champion", "model")
    inputs = {
        "candidate": stage.output_of("optimize", "model"),
        "champion": champion if champion.is_dir() else stage.output_of("sft", "model"),
        "reference": stage.output_of("sft", "model"),
        "judge": stage.output_of("judge", "model"),
        "prompts": stage.output_of("validate", "prompts_eval.jsonl"),
    }
    stage.launch("training.compare", params, inputs, params.processes, params.threads)
    found = evidence(read_verdicts(stage.work / "samples.jsonl", params.tie), params.confidence)
    found["overlap"] = overlap(stage.output_of("validate"))
    stage.publish_result(found, "samples.jsonl")


if __name__ == "__main__":
    run("evaluate", body)
