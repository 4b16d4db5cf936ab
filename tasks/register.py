"""Carry the decision out: the outside world's one way to be changed, the same however often it is run.

A candidate that passed all gates becomes a registered version and champion, by compare-and-set against the
champion that it was compared with; with `promote.require_human` it waits as challenger. Weights that were
rolled back stay out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from data.errors import PlumblineError
from tasks import lineage
from tasks.params import Params
from tasks.places import Json, file_digest, read_json, stage_folder
from tasks.registry import CHALLENGER, CHAMPION, Registry, Version, peek
from tasks.report import newest
from tasks.stage import Stage, run


def carry_out(
    project: Path, params: Params, decision: Json, force: bool = False
) -> tuple[Json, Version | None]:
    """Bring the registry to where the decision wants it; what register.json says, and the version."""
    candidate, champion = decision.get("candidate"), decision.get("champion")
    if decision.get("promote") is not True or not isinstance(candidate, str):
        failed = decision.get("failed")
        reason = (
            f"gates failed: {', '.join(failed)}" if isinstance(failed, list) and failed else "no candidate"
        )
        return {"registered": False, "alias": None, "candidate": candidate, "reason": reason}, None
    registry = Registry(project, params.registry.name)
    version = registry.by_digest(candidate)
    if version is None:
        run_id = registry.producing_run(candidate, "optimize")
        model = stage_folder(project, "optimize") / "model"
        version = registry.register(candidate, model, run_id, _tags(project, decision))
    if version.rolled_back and not force:
        reason = "these weights were rolled back; `plumbline promote --force` overrides"
        return {"registered": True, "alias": None, "candidate": candidate, "reason": reason}, version
    current = registry.champion()
    if current is not None and current.digest == candidate:
        return _done(candidate, CHAMPION), current
    if params.promote.require_human:
        registry.challenge(version)
        return _done(candidate, CHALLENGER), registry.find(version.version)
    sft = read_json(stage_folder(project, "sft") / "result.json")["digest"]
    expected = str(champion) if champion != sft or (current and current.digest == sft) else None
    return _done(candidate, CHAMPION), registry.promote(
        version, expected, "plumbline", "all gates passed", force
    )


def unchanged(project: Path, params: Params) -> bool:
    """True when the registry is already where the published decision wants it."""
    written = stage_folder(project, "register") / "register.json"
    decided = stage_folder(project, "promote") / "decision.json"
    if not written.is_file() or not decided.is_file():
        return False
    known, decision = read_json(written), read_json(decided)
    if decision.get("promote") is not True:
        return known.get("registered") is False
    versions = peek(project, params.registry.name)
    version = next((known for known in versions if known.digest == decision["candidate"]), None)
    if version is None:
        return False
    if version.rolled_back:
        return known.get("alias") is None
    return known.get("alias") in version.aliases


def _done(candidate: str, alias: str) -> Json:
    return {"registered": True, "alias": alias, "candidate": candidate, "reason": "all gates passed"}


def _tags(project: Path, decision: Json) -> dict[str, str]:
    evaluate = read_json(stage_folder(project, "evaluate") / "result.json")
    lock = project / "dvc.lock"
    return {
        "plumbline.baseline": str(decision.get("champion")),
        "plumbline.win_rate": json.dumps(evaluate.get("win_rate")),
        "plumbline.interval": json.dumps(evaluate.get("interval")),
        "plumbline.dvc_lock": file_digest(lock) if lock.is_file() else "none",
    }


def summary_metrics(project: Path) -> dict[str, float]:
    """The numbers by which runs are compared in the tracking UI."""
    wanted = {
        "reward": ("accuracy",),
        "judge": ("accuracy",),
        "optimize": ("reward_before", "reward_after", "kl"),
        "evaluate": ("win_rate", "n", "kl"),
    }
    found: dict[str, float] = {}
    for stage, keys in wanted.items():
        result = read_json(stage_folder(project, stage) / "result.json")
        for key in keys:
            value = result.get(key)
            if isinstance(value, int | float):
                found[f"{stage}.{key}"] = float(value)
    return found


def _report(project: Path) -> list[Path]:
    """The page for the pipeline's run. The decision is carried out already, so a page that can not be made
    is told and fails nothing; `plumbline report` shows why."""
    try:
        return [newest(project)]
    except (PlumblineError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"register: the report could not be made: {type(error).__name__}: {error}", file=sys.stderr)
        return []


def body(stage: Stage) -> None:
    """Register, write the report, close the pipeline's run."""
    decision = stage.result_of("promote", "decision.json")
    outcome, version = carry_out(stage.project, stage.params, decision)
    stage.publish_result(outcome, file="register.json")
    report = _report(stage.project)
    where = f" as {version.name} version {version.version}" if version is not None else ""
    print(f"register: {outcome['alias'] or 'not promoted'}{where}: {outcome['reason']}")
    files = [*report, *(stage.project / name for name in ("params.yaml", "dvc.yaml", "dvc.lock"))]
    metrics = summary_metrics(stage.project)
    stage.afterwards = lambda: lineage.close_parent(stage.project, stage.pipeline, metrics, files)


if __name__ == "__main__":
    run("register", body, outer=True)
