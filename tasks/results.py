"""The stages' result documents, as they lie in data/stages, and which of them belong to the newest run.

A run that was stopped leaves the outputs of the stages that it did not reach as the run before made them.
They say nothing about the new one, so whoever tells how a run ended takes the current ones alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from data.errors import DataError, InfrastructureError
from tasks.places import STAGES, Json, read_json, stage_folder
from tasks.publish import Lock, listing_digest, read_lock
from tasks.status import read_status

RESULTS = {
    "sources": "data.json",
    "champion": "champion.json",
    "promote": "decision.json",
    "register": "register.json",
}
ORDER = (
    "base",
    "validate",
    "sft",
    "reward",
    "judge",
    "optimize",
    "champion",
    "evaluate",
    "promote",
    "register",
)


def results(project: Path) -> dict[str, Json]:
    """What each stage says of itself; one that has not run, or not since the stages above it changed, is an
    empty object."""
    now = current(project)
    return {
        stage: read_json(file) if stage in now and (file := document(project, stage)).is_file() else {}
        for stage in ORDER
    }


def document(project: Path, stage: str) -> Path:
    """Where a stage's result is."""
    return stage_folder(project, stage) / RESULTS.get(stage, "result.json")


def headline(result: Json) -> dict[str, float]:
    """The numbers of a result document itself, with the ends of its interval; nothing deeper."""
    numbers = {
        name: float(value)
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    interval = result.get("interval")
    if isinstance(interval, list) and len(interval) == 2:
        numbers |= {"interval_lower": float(interval[0]), "interval_upper": float(interval[1])}
    return numbers


def current(project: Path) -> frozenset[str]:
    """The stages whose output was made of the outputs above it as they are now, by dvc.lock.

    A stage that dvc.lock does not know is taken at its word. An output above that is not there makes those
    below it old when its stage began here and has not ended well; else it was only never fetched.
    """
    try:
        lock = read_lock(project)
    except InfrastructureError:
        lock = {}
    known: dict[str, bool] = {}
    found = {stage for stage in ORDER if stage_folder(project, stage).is_dir()}
    return frozenset(stage for stage in found if _is_current(project, stage, lock, known))


def _is_current(project: Path, stage: str, lock: Mapping[str, Lock], known: dict[str, bool]) -> bool:
    if stage not in known:
        inputs = [(Path(dep["path"]), dep.get("md5")) for dep in lock.get(stage, {}).get("deps") or ()]
        inputs = [(path, md5) for path, md5 in inputs if path.is_relative_to(STAGES) and path != STAGES]
        above = {path: path.relative_to(STAGES).parts[0] for path, _ in inputs}
        known[stage] = (
            _there(project, stage)
            and all(_is_current(project, name, lock, known) for name in above.values())
            and (
                _carried_out(project)
                if stage == "register"
                else all(
                    _md5(project, path, lock.get(above[path], {})) in (md5, None) for path, md5 in inputs
                )
            )
        )
    return known[stage]


def _there(project: Path, stage: str) -> bool:
    if stage_folder(project, stage).is_dir():
        return True
    try:
        said = read_status(project, stage)
    except DataError:
        return False
    return said is None or said.get("state") == "done"


def _carried_out(project: Path) -> bool:
    """Whether register speaks of the candidate that was decided about. It writes the report itself, before
    DVC has noted its output."""
    try:
        decided, done = (read_json(document(project, stage)) for stage in ("promote", "register"))
    except DataError:
        return False
    return decided.get("candidate") == done.get("candidate")


def _md5(project: Path, path: Path, above: Lock) -> str | None:
    """DVC's digest of a path in the output of the stage above, from dvc.lock and DVC's cache; None when they
    do not tell."""
    for out in above.get("outs") or ():
        folder, md5 = Path(out["path"]), str(out.get("md5"))
        if path == folder:
            return md5
        if path.is_relative_to(folder):
            return _md5_within(project, md5, path.relative_to(folder).as_posix())
    return None


def _md5_within(project: Path, md5: str, name: str) -> str | None:
    listing = project / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    try:
        entries = json.loads(listing.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for entry in entries:
        if entry["relpath"] == name:
            return str(entry["md5"])
    start = f"{name}/"
    below = [
        {"md5": entry["md5"], "relpath": entry["relpath"].removeprefix(start)}
        for entry in entries
        if entry["relpath"].startswith(start)
    ]
    return listing_digest(below) if below else None
