"""Whether anything is to do, found out in a few seconds and before any server is started.

DVC says which stages changed. The outer steps run at every repro, so for them DVC's word means nothing:
each has a check of its own that compares what it published with what the world holds now.
"""

from __future__ import annotations

from pathlib import Path

from data.errors import PlumblineError
from flows import dvc
from flows.dag import Dag
from tasks.params import load
from tasks.places import stage_folder


def changes(project: Path, dag: Dag) -> dict[str, list[str]]:
    """Stage -> why it has to run; an empty answer means that the pipeline is up to date."""
    asked = dvc.start_status(project)
    try:
        outer = {step.name: reason for step in dag if step.always and (reason := _outer(project, step.name))}
    except BaseException:
        asked.kill()
        raise
    try:
        found = dvc.read_status(asked)
    except PlumblineError as error:
        # Not knowing is a reason to run: the stages themselves will say what is wrong.
        found = {"dvc": [str(error)]}
    for stage, reason in outer.items():
        found.setdefault(stage, []).append(reason)
    return found


def _outer(project: Path, name: str) -> str:
    """Why an outer step has to run, "" when it would change nothing."""
    if not stage_folder(project, name).is_dir():
        return "has not run yet"
    try:
        return "" if _unchanged(project, name) else "the world outside has changed"
    except PlumblineError as error:
        return str(error)


def _unchanged(project: Path, name: str) -> bool:
    params = load(project)
    if name == "sources":
        from tasks import sources

        return sources.unchanged(project)
    if name == "champion":
        from tasks import champion

        return champion.unchanged(project, params.registry.name)
    if name == "register":
        from tasks import register

        return register.unchanged(project, params)
    return False
