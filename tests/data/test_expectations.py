"""The suite on the written files: every expectation can fail, errors count as failures, empty tables fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data import expectations
from data.config import DataParams
from data.errors import DataError
from data.expectations import Check, check_files
from data.pipeline import _gate_checks, run
from data.records import Preference, Prompt, StepLabels, read_records, to_line
from tests.data.samples import pairs, write_jsonl

PARAMS = DataParams(min_pairs=10, max_chars=1000)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    source = write_jsonl(folder / "rows.jsonl", pairs(40, each=2))
    run(PARAMS.model_copy(update={"files": (str(source),)}), 0, folder / "out", folder / "docs")
    return folder / "out"


@pytest.fixture
def out(clean: Path, tmp_path: Path) -> Path:
    for path in clean.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def _failed(checks: list[Check]) -> set[tuple[str, str]]:
    return {(check.table, check.column or "rows") for check in checks if not check.passed}


def _edit(path: Path, kind: Any, **changes: Any) -> None:
    records = list(read_records(path, kind))
    records[0] = records[0].model_copy(update=changes)
    path.write_text("".join(map(to_line, records)), encoding="utf-8")


def test_a_clean_data_set_passes_real_checks(out: Path) -> None:
    checks = check_files(out, PARAMS)
    assert len(checks) == 35
    assert _failed(checks) == set()
    assert not [check for check in checks if check.error or "?" in check.observed]


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"weight": 0.0}, "weight"),
        ({"agreement": 1.5}, "agreement"),
        ({"chosen": ""}, "answer_chars"),
        ({"rejected": "x" * 1001}, "rejected_chars"),
        ({"prompt": ()}, "prompt_chars"),
        ({"group": "short"}, "group"),
    ],
)
def test_a_wrong_pair_fails_its_check(out: Path, changes: dict[str, Any], column: str) -> None:
    if changes.get("prompt") == ():
        pair = next(iter(read_records(out / "pairs_train.jsonl", Preference)))
        changes = {"prompt": (pair.prompt[0].model_copy(update={"content": ""}),)}
    _edit(out / "pairs_train.jsonl", Preference, **changes)
    assert ("pairs", column) in _failed(check_files(out, PARAMS))


def test_sides_that_do_not_differ_fail(out: Path) -> None:
    _edit(out / "pairs_judge.jsonl", Preference, chosen="Same.", rejected="Same.")
    assert _failed(check_files(out, PARAMS)) == {("pairs", "sides_differ")}


def test_a_prompt_that_ends_with_the_assistant_fails(out: Path) -> None:
    prompt = next(iter(read_records(out / "prompts_train.jsonl", Prompt)))
    turn = prompt.prompt[0].model_copy(update={"role": "assistant"})
    _edit(out / "prompts_train.jsonl", Prompt, prompt=(turn,))
    assert _failed(check_files(out, PARAMS)) == {("prompts_train", "ends_with_user")}


def test_a_group_in_two_parts_fails(out: Path) -> None:  # F20
    train, test = out / "pairs_train.jsonl", out / "pairs_test.jsonl"
    line = train.read_text("utf-8").splitlines(keepends=True)[0]
    test.write_text(test.read_text("utf-8") + line, encoding="utf-8")
    failed = _failed(check_files(out, PARAMS))
    assert {("pairs", "group_in_one_part"), ("pairs", "id"), ("demonstrations", "apart")} <= failed


def test_a_held_out_prompt_among_the_rollouts_fails(out: Path) -> None:  # F20
    train, evaluation = out / "prompts_train.jsonl", out / "prompts_eval.jsonl"
    train.write_text(train.read_text("utf-8") + evaluation.read_text("utf-8"), encoding="utf-8")
    assert _failed(check_files(out, PARAMS)) == {("prompts_train", "apart"), ("prompts_eval", "apart")}


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({}, None),
        ({"labels": (True,)}, "labels_fit"),
        ({"labels": (None, None)}, "labels_fit"),
        ({"steps": ("", "")}, "answer_chars"),
        ({"group": "short"}, "group"),
    ],
)
def test_labelled_steps_are_checked(out: Path, changes: dict[str, Any], column: str | None) -> None:
    pair = next(iter(read_records(out / "pairs_train.jsonl", Preference)))
    row = StepLabels(
        prompt=pair.prompt, id="0" * 16, group="a" * 16, steps=("One.", "Two."), labels=(True, None)
    )
    lines = to_line(row.model_copy(update=changes))
    (out / "steps_train.jsonl").write_text(lines, encoding="utf-8")
    assert _failed(check_files(out, PARAMS)) == ({("steps", column)} if column else set())


def test_steps_in_another_part_than_their_pairs_fail(out: Path) -> None:
    pair = next(iter(read_records(out / "pairs_judge.jsonl", Preference)))
    row = StepLabels(prompt=pair.prompt, id="0" * 16, group=pair.group, steps=("One.",), labels=(True,))
    (out / "steps_train.jsonl").write_text(to_line(row), encoding="utf-8")
    assert {("steps", "group_in_one_part"), ("pairs", "group_in_one_part")} <= _failed(
        check_files(out, PARAMS)
    )


def test_an_empty_table_fails_its_floor(out: Path) -> None:  # F26
    for name in ("pairs_test.jsonl", "demonstrations.jsonl", "prompts_eval.jsonl"):
        (out / name).write_bytes(b"")
    failed = _failed(check_files(out, PARAMS))
    assert {("pairs", "part"), ("demonstrations", "rows"), ("prompts_eval", "rows")} <= failed


def test_too_few_pairs_fail_the_floor(out: Path) -> None:
    assert _failed(check_files(out, PARAMS.model_copy(update={"min_pairs": 81}))) == {("pairs", "rows")}


def test_an_expectation_that_raised_counts_as_failed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = expectations._Wanted("ExpectColumnValuesToMatchRegex", "broken", {"column": "id", "regex": "("})
    monkeypatch.setattr(expectations, "_common_suite", lambda params: [broken])
    checks = check_files(out, PARAMS)
    found = [check for check in checks if check.what == "broken"]
    assert found and all(not check.passed and check.error for check in found)
    with pytest.raises(DataError, match="pairs: broken"):
        _gate_checks(checks)


def test_no_checks_at_all_is_a_failure() -> None:  # F26
    with pytest.raises(DataError, match="no check"):
        _gate_checks([])
