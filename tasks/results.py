"""The stages' result documents, as they lie in data/stages."""

from __future__ import annotations

from pathlib import Path

from tasks.places import Json, read_json, stage_folder

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
    """What each stage says of itself; a stage that has not run is an empty object."""
    found: dict[str, Json] = {}
    for stage in ORDER:
        file = stage_folder(project, stage) / RESULTS.get(stage, "result.json")
        found[stage] = read_json(file) if file.is_file() else {}
    return found
