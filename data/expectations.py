"""The data set as a whole, checked by a Great Expectations suite on the files that were written.

The files are read back, so that what is checked is what later stages get. Text stays on disk; the tables hold
lengths, keys and flags. Two things that the library leaves to its caller are done here: a suite on an empty
table must fail (most expectations succeed on zero rows), and an expectation that raised counts as failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from data.checks import Record
from data.config import DataParams
from data.emit import DEMONSTRATIONS, FEEDBACK, PAIRS, PROMPTS_EVAL, PROMPTS_TRAIN, STEPS
from data.records import Demonstration, Feedback, Preference, Prompt, StepLabels, read_records
from data.splits import intervals

Cell = str | int | float | bool | None
Row = dict[str, Cell]
Columns = dict[str, list[Cell]]


@dataclass(frozen=True)
class Check:
    """One evaluated expectation."""

    table: str
    what: str
    expectation: str
    column: str
    passed: bool
    error: str
    observed: str
    bound: str

    def to_json(self) -> dict[str, JsonValue]:
        return dict(vars(self))


@dataclass(frozen=True)
class _Wanted:
    """An expectation to evaluate: its class, its arguments, and what it means for a reader."""

    name: str
    what: str
    arguments: dict[str, Any]


def check_files(out: Path, params: DataParams) -> list[Check]:
    """Evaluate the suites on the files in `out`."""
    pairs = _columns(_pair_rows(out))
    demonstrations, feedback = _columns(_demonstration_rows(out)), _columns(_feedback_rows(out))
    prompts, evaluation = (
        _columns(_prompt_rows(out / PROMPTS_TRAIN)),
        _columns(_prompt_rows(out / PROMPTS_EVAL)),
    )
    steps = _columns(_step_rows(out))
    parts = [
        place
        for table in (pairs, steps)
        for place in zip(table.get("group", []), table.get("part", []), strict=True)
    ]
    held_out = {group for group, part in parts if part != "train"} | set(evaluation.get("group", []))
    for table in (demonstrations, feedback, prompts):
        _mark_apart(table, held_out)
    taken = {group for group, part in parts if part != "test" or params.eval_prompts}
    _mark_apart(evaluation, taken.union(demonstrations.get("group", []), prompts.get("group", [])))
    tables = [
        ("demonstrations", demonstrations, _answer_suite(params, "demonstrations to imitate")),
        ("prompts_train", prompts, _prompt_suite(params, "prompts to optimise on")),
        ("prompts_eval", evaluation, _prompt_suite(params, "prompts to evaluate on")),
    ]
    if pairs or params.min_pairs:
        _mark_one_part(pairs, parts)
        tables.insert(0, ("pairs", pairs, _pair_suite(params)))
    if steps:
        _mark_one_part(steps, parts)
        tables.append(("steps", steps, _step_suite(params)))
    if feedback:
        tables.append(("feedback", feedback, _answer_suite(params, "rows of feedback")))
    return _evaluate(tables)


# The tables: one row a record, without its text


def _pair_rows(out: Path) -> Iterator[Row]:
    for part, name in PAIRS.items():
        for pair in read_records(out / name, Preference):
            yield {
                **_common(pair),
                "part": part,
                "answer_chars": len(pair.chosen),
                "rejected_chars": len(pair.rejected),
                "sides_differ": pair.chosen.strip() != pair.rejected.strip(),
                "weight": pair.weight,
                "agreement": pair.agreement,
            }


def _step_rows(out: Path) -> Iterator[Row]:
    for part, name in STEPS.items():
        for row in read_records(out / name, StepLabels):
            yield {
                **_common(row),
                "part": part,
                "answer_chars": sum(map(len, row.steps)),
                "labels_fit": len(row.labels) == len(row.steps)
                and any(one is not None for one in row.labels),
            }


def _demonstration_rows(out: Path) -> Iterator[Row]:
    for row in read_records(out / DEMONSTRATIONS, Demonstration):
        yield {**_common(row), "answer_chars": len(row.answer)}


def _feedback_rows(out: Path) -> Iterator[Row]:
    for row in read_records(out / FEEDBACK, Feedback):
        yield {**_common(row), "answer_chars": len(row.answer)}


def _prompt_rows(path: Path) -> Iterator[Row]:
    for row in read_records(path, Prompt):
        yield _common(row)


def _common(record: Record) -> Row:
    return {
        "id": record.id,
        "group": record.group,
        "prompt_chars": sum(len(message.content) for message in record.prompt),
        "ends_with_user": record.prompt[-1].role == "user",
    }


def _columns(rows: Iterator[Row]) -> Columns:
    columns: Columns = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def _mark_one_part(table: Columns, places: Sequence[tuple[Cell, Cell]]) -> None:
    parts: dict[Cell, set[Cell]] = {}
    for group, part in places:
        parts.setdefault(group, set()).add(part)
    table["group_in_one_part"] = [len(parts[group]) == 1 for group in table.get("group", [])]


def _mark_apart(table: Columns, forbidden: set[Cell]) -> None:
    if table:
        table["apart"] = [group not in forbidden for group in table["group"]]


# The suites


def _floor(minimum: int, what: str) -> _Wanted:
    return _Wanted("ExpectTableRowCountToBeBetween", what, {"min_value": minimum})


def _true(column: str, what: str) -> _Wanted:
    return _Wanted("ExpectColumnValuesToBeInSet", what, {"column": column, "value_set": [True]})


def _between(column: str, what: str, low: float, high: float | None, strict: bool = False) -> _Wanted:
    bounds = {"column": column, "min_value": low, "max_value": high, "strict_min": strict}
    return _Wanted("ExpectColumnValuesToBeBetween", what, bounds)


def _common_suite(params: DataParams) -> list[_Wanted]:
    return [
        _Wanted("ExpectColumnValuesToNotBeNull", "each row has an id", {"column": "id"}),
        _Wanted("ExpectColumnValuesToBeUnique", "no row stands twice", {"column": "id"}),
        _Wanted("ExpectColumnValuesToMatchRegex", "group keys are whole", _GROUP),
        _between("prompt_chars", "prompts are neither empty nor over-long", 1, params.max_chars),
        _true("ends_with_user", "prompts end with the user's turn"),
    ]


_GROUP: dict[str, Any] = {"column": "group", "regex": "^[0-9a-f]{16}$"}


def _pair_suite(params: DataParams) -> list[_Wanted]:
    parts = {"column": "part", "value_set": list(intervals(params.splits))}
    return [
        _floor(max(1, params.min_pairs), "enough pairs (data.min_pairs)"),
        *_common_suite(params),
        _between("answer_chars", "chosen answers are neither empty nor over-long", 1, params.max_chars),
        _between("rejected_chars", "rejected answers are neither empty nor over-long", 1, params.max_chars),
        _true("sides_differ", "chosen and rejected differ"),
        _between("weight", "weights are above 0", 0, None, strict=True),
        _between("agreement", "agreement is a share", 0, 1),
        _Wanted("ExpectColumnDistinctValuesToEqualSet", "every part has pairs, and no other", parts),
        _true("group_in_one_part", "no prompt group stands in two parts"),
    ]


def _step_suite(params: DataParams) -> list[_Wanted]:
    return [
        *_common_suite(params),
        _between("answer_chars", "answers are neither empty nor over-long", 1, params.max_chars),
        _true("labels_fit", "each step has its label, and some step is judged"),
        _true("group_in_one_part", "no prompt group stands in two parts"),
    ]


def _prompt_suite(params: DataParams, what: str) -> list[_Wanted]:
    return [
        _floor(1, f"there are {what}"),
        *_common_suite(params),
        _true("apart", "no prompt group of another use is among them"),
    ]


def _answer_suite(params: DataParams, what: str) -> list[_Wanted]:
    answers = _between("answer_chars", "answers are neither empty nor over-long", 1, params.max_chars)
    return [*_prompt_suite(params, what), answers]


# Evaluation


def _evaluate(tables: Sequence[tuple[str, Columns, list[_Wanted]]]) -> list[Check]:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    import pandas as pd

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    source = context.data_sources.add_pandas("outputs")
    checks: list[Check] = []
    for name, table, wanted in tables:
        columns = sorted({str(item.arguments["column"]) for item in wanted if "column" in item.arguments})
        frame = pd.DataFrame({column: table.get(column, []) for column in columns})
        definition = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        batch = definition.get_batch({"dataframe": frame})
        expectations = [
            getattr(gx.expectations, item.name)(**item.arguments, meta={"position": position})
            for position, item in enumerate(wanted)
        ]
        report = batch.validate(gx.ExpectationSuite(name, expectations=expectations), result_format="SUMMARY")
        found = {result.expectation_config.meta["position"]: result for result in report.results}
        checks += [_check(name, item, found.get(position)) for position, item in enumerate(wanted)]
    return checks


def _check(table: str, wanted: _Wanted, result: Any) -> Check:
    column = str(wanted.arguments.get("column", ""))
    limits = {key: value for key, value in wanted.arguments.items() if key != "column" and value is not None}
    bound = ", ".join(f"{key} {value}" for key, value in limits.items() if value is not False)
    if result is None:
        return Check(table, wanted.what, wanted.name, column, False, "was not evaluated", "", bound)
    error = _error_of(result.exception_info)
    found = result.result or {}
    if "observed_value" in found:
        observed = str(found["observed_value"])
    else:
        observed = f"{found.get('unexpected_count', '?')} of {found.get('element_count', '?')} rows differ"
    passed = bool(result.success) and not error
    return Check(table, wanted.what, wanted.name, column, passed, error, observed, bound)


def _error_of(info: Any) -> str:
    """The message of an error in an expectation; the library reports it flat or below a metric's name."""
    for entry in (info, *info.values()) if isinstance(info, dict) else ():
        if isinstance(entry, dict) and entry.get("raised_exception"):
            return str(entry.get("exception_message") or "the expectation raised an error")
    return ""
