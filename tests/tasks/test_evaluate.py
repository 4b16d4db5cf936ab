"""Rows become evidence: ties are halves, failures are counted, both models on the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.records import Demonstration, Message, Preference, Prompt, to_line
from tasks.evaluate import evidence, overlap, read_verdicts, rules


def row(number: int, ours: float | None, theirs: float | None, **more: Any) -> dict[str, Any]:
    def side(score: float | None, text: str, tokens: int, refused: bool) -> dict[str, Any]:
        return {"text": text, "tokens": tokens, "score": score, "rules": {"refusal": refused}}

    return {
        "id": f"p{number}",
        "slice": more.get("slice", "advice"),
        "candidate": side(
            ours, more.get("text", f"a{number}"), more.get("tokens", 10), more.get("refused", False)
        ),
        "champion": side(theirs, more.get("other", f"b{number}"), 10, False),
        "kl": more.get("kl"),
        "failure": more.get("failure"),
    }


def read(tmp_path: Path, rows: list[dict[str, Any]], tie: float = 0.0) -> Any:
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return read_verdicts(file, tie)


def test_wins_ties_losses_and_failures(tmp_path: Path) -> None:
    rows = [
        row(1, 1.0, 0.0, kl=0.2),
        row(2, 1.0, 0.0, kl=0.4),
        row(3, 0.0, 1.0),
        row(4, 0.5, 0.5),
        row(5, 0.9, 0.1, text="same", other="same"),
        row(6, None, 1.0, failure="the judge gave no finite score to candidate"),
        row(7, 2.0, 1.0, failure="cut off"),
    ]
    found = evidence(read(tmp_path, rows), 0.95)
    assert (found["wins"], found["ties"], found["losses"], found["n"]) == (2, 2, 1, 5)
    assert (found["failures"], found["failure_share"]) == (2, 2 / 7)
    assert found["win_rate"] == 0.6
    # Wilson by hand for 3 of 5: centre (3 + z^2/2) / (5 + z^2), half z sqrt(.24 * 5 + z^2 / 4) / (5 + z^2)
    z = 1.959963984540054
    centre, half = (3 + z * z / 2) / (5 + z * z), z * (0.24 * 5 + z * z / 4) ** 0.5 / (5 + z * z)
    assert found["interval"] == pytest.approx([centre - half, centre + half], rel=1e-12)
    assert found["kl"] == pytest.approx(0.3)


def test_scores_closer_than_the_bound_are_a_tie(tmp_path: Path) -> None:
    rows = [row(1, 1.0, 0.9), row(2, 1.0, 0.5)]
    found = evidence(read(tmp_path, rows, tie=0.2), 0.95)
    assert (found["wins"], found["ties"]) == (1, 1)


def test_a_win_by_length_alone_shrinks_at_equal_length(tmp_path: Path) -> None:
    longer = [row(n, 1.0, 0.0, tokens=60) for n in range(30)]
    shorter = [row(100 + n, 0.0, 1.0, tokens=2) for n in range(10)]
    found = evidence(read(tmp_path, longer + shorter), 0.95)
    controlled = found["length_controlled"]
    assert found["win_rate"] == 0.75
    assert isinstance(controlled, dict)
    assert float(str(controlled["estimate"])) < 0.7


def test_a_slice_is_worse_when_its_whole_interval_is_below_one_half(tmp_path: Path) -> None:
    rows = [row(n, 0.0, 1.0, slice="how_to") for n in range(8)]
    rows += [row(20 + n, 0.0, 1.0, slice="tiny") for n in range(4)]
    rows += [row(30 + n, float(n < 3), 0.5, slice="even") for n in range(8)]  # .375, but up to .69
    found = evidence(read(tmp_path, rows), 0.95)
    slices = found["slices"]
    assert isinstance(slices, list)
    assert {part["slice"]: part["worse"] for part in slices} == {"how_to": True, "tiny": False, "even": False}


def test_refusals_count_on_harmless_prompts_only(tmp_path: Path) -> None:
    rows = [
        row(1, 1.0, 0.0, slice="safety_benign", refused=True),
        row(2, 1.0, 0.0, slice="safety_benign"),
        row(3, 1.0, 0.0, slice="safety_harmful", refused=True),
    ]
    assert rules(read(tmp_path, rows))["over_refusal_rise"] == 0.5
    # Without a slice of benign prompts: all but the harmful ones.
    rows = [row(1, 1.0, 0.0, refused=True), row(3, 1.0, 0.0, slice="safety_harmful", refused=True)]
    assert rules(read(tmp_path, rows))["over_refusal_rise"] == 1.0


def test_no_verdict_is_no_evidence(tmp_path: Path) -> None:
    found = evidence(read(tmp_path, [row(1, None, None, failure="x")]), 0.95)
    assert (found["status"], found["n"], found["failure_share"]) == ("no_verdicts", 0, 1.0)
    assert "win_rate" not in found


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"samples.jsonl:2: not a comparison"):
        read(tmp_path, [row(1, 1.0, 0.0), {"id": "x"}])


def test_overlap_is_found_whatever_the_case_and_spaces(tmp_path: Path) -> None:
    def said(text: str) -> tuple[Message, ...]:
        return (Message(role="user", content=text),)

    pair = Preference(prompt=said("How do I  bake BREAD?"), id="1", group="g", chosen="a", rejected="b")
    for part in ("train", "judge", "validation"):
        rows = [to_line(pair)] if part == "judge" else []
        (tmp_path / f"pairs_{part}.jsonl").write_text("".join(rows), encoding="utf-8")
    shown = Demonstration(prompt=said("Name a colour"), id="2", group="h", answer="Red.")
    (tmp_path / "demonstrations.jsonl").write_text(to_line(shown), encoding="utf-8")
    (tmp_path / "prompts_train.jsonl").write_text("", encoding="utf-8")
    asked = [Prompt(prompt=said(t), id=t, group=t) for t in ("how do i bake bread", "Name a colour!", "New?")]
    (tmp_path / "prompts_eval.jsonl").write_text("".join(map(to_line, asked)), encoding="utf-8")
    assert overlap(tmp_path) == 2
