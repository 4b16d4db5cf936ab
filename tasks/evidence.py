"""What a finished or ended run says of itself, read once from the outputs of its stages. Nothing is changed.

A file that is missing or half written is no error here: whoever asks for a number in it gets `Missing`, which
names the file and what is not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import DataError, InfrastructureError
from tasks.params import FILE, Params, parse, read_raw
from tasks.places import STAGES, Json, home, read_json
from tasks.publish import Lock, read_lock
from tasks.results import ORDER, RESULTS, current, document

Rows = Sequence[Mapping[str, object]]


class Missing(Exception):
    """A number that no file holds; the message names the file."""


@dataclass(frozen=True)
class Facts:
    """All that a diagnosis may look at."""

    params: Params
    results: Mapping[str, Json] = field(default_factory=dict)
    """Stage -> its result document; a stage without one is absent."""
    metrics: Mapping[str, Rows] = field(default_factory=dict)
    """Stage -> the complete lines of its metrics.jsonl."""
    failed: Mapping[str, Json] = field(default_factory=dict)
    """Stage -> its status, of the stages whose newest try failed."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """File -> why it could not be read."""

    @property
    def passed(self) -> bool:
        """Whether the candidate passed all gates."""
        return self.results.get("promote", {}).get("promote") is True

    @property
    def promoted(self) -> bool:
        """Whether it passed them and `register` has made it champion."""
        return self.passed and self.results.get("register", {}).get("alias") == "champion"

    def file(self, stage: str) -> str:
        """The result document of a stage, as the screen names it."""
        return f"{stage}/{RESULTS.get(stage, 'result.json')}"

    def result(self, stage: str) -> Json:
        """A stage's result; Missing where it is not there, or the stage was not run."""
        file = self.file(stage)
        found = self.results.get(stage)
        if found is None:
            raise Missing(f"{file} is {self.problems.get(file, 'missing')}")
        if found.get("status") == "not_run":
            raise Missing(f"{file}: not run, {found.get('reason') or 'no reason given'}")
        return found

    def number(self, stage: str, *keys: str) -> float:
        """A finite number at a place of a stage's result."""
        value: object = self.result(stage)
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Missing(f"{self.file(stage)}: {'.'.join(keys)} is {value!r}")
        return float(value)

    def interval(self, stage: str, key: str = "interval") -> tuple[float, float]:
        """The two ends of an interval in a stage's result."""
        value = self.result(stage).get(key)
        if not isinstance(value, Sequence) or len(value) != 2 or not all(map(finite, value)):
            raise Missing(f"{self.file(stage)}: {key} is {value!r}")
        return float(value[0]), float(value[1])

    def series(self, stage: str, name: str, least: int = 1) -> list[float]:
        """The finite values of a metric, step by step; Missing with fewer than `least`."""
        file = f"{stage}/metrics.jsonl"
        if file in self.problems:
            raise Missing(f"{file} is {self.problems[file]}")
        rows = self.metrics.get(stage, ())
        values = [float(row[name]) for row in rows if finite(row.get(name))]  # type: ignore[arg-type]
        if len(values) < least:
            raise Missing(f"{file}: {name} is recorded at {len(values)} steps; at least {least} are needed")
        return values


def finite(value: object) -> bool:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def gather(project: Path) -> Facts:
    """The facts of the newest run in a project; DataError when none of its stages left anything."""
    results: dict[str, Json] = {}
    metrics: dict[str, Rows] = {}
    failed: dict[str, Json] = {}
    problems: dict[str, str] = {}
    now = current(project)
    for stage in ORDER:
        file = document(project, stage)
        if stage in now and file.is_file():
            try:
                results[stage] = read_json(file)
            except DataError:
                problems[f"{stage}/{file.name}"] = "half written or damaged"
        if stage in now and file.with_name("metrics.jsonl").is_file():
            metrics[stage] = read_lines(file.with_name("metrics.jsonl"))
        said = _status(home(project) / "status" / f"{stage}.json")
        if said.get("state") == "failed":
            failed[stage] = said
    if not results and not metrics and not failed and not problems:
        raise DataError(
            f"{project / STAGES}: no stage has left a result, a run to look at is needed; "
            "start one with `plumbline run`, or fetch its outputs with `dvc pull`"
        )
    return Facts(used_params(project, set(failed)), results, metrics, failed, problems)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete objects of a JSONL file; a line cut by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _status(path: Path) -> Json:
    try:
        return read_json(path) if path.is_file() else {}
    except DataError:
        return {}


def used_params(project: Path, failed: Set[str] = frozenset()) -> Params:
    """The parameters that the outputs were made with: dvc.lock's section of a stage that it knows and that
    did not fail since, else that of params.yaml.
    """
    raw = read_raw(project / FILE)
    try:
        used = _locked(read_lock(project), failed)
    except InfrastructureError:
        used = {}
    return parse({**raw, **used}, f"{FILE} with dvc.lock" if used else FILE)


def _locked(lock: Mapping[str, Lock], failed: Set[str]) -> dict[str, object]:
    """The section of each stage by its own entry in a dvc.lock."""
    found: dict[str, object] = {}
    for stage, entry in lock.items():
        section = "data" if stage == "validate" else stage
        sections = entry.get("params", {}).get(FILE, {})
        if stage not in failed and section in sections:
            found[section] = sections[section]
    return found
