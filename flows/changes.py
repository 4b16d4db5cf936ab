"""Whether anything is to do, found out in a few seconds and before any server is started.

DVC says which stages changed. The outer steps run at every repro, so for them DVC's word means nothing: each
has a check of its own that compares what it published with what the world holds now. The registry's answer is
remembered together with a digest of all that it depends on, because importing mlflow alone takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from data.errors import PlumblineError
from flows import dvc
from flows.dag import Dag
from tasks.params import Params, load
from tasks.places import digest_of, file_digest, home, read_json, stage_folder, write_json
from tasks.publish import read_lock
from tasks.store import database

NEVER = "has not run yet"
_REGISTRY = ("registered_models", "registered_model_aliases", "model_versions", "model_version_tags")
_PUBLISHED = (
    "champion/champion.json",
    "promote/decision.json",
    "register/register.json",
    "optimize/result.json",
    "sft/result.json",
)


def changes(project: Path, dag: Dag) -> dict[str, list[str]]:
    """Stage -> why it has to run; an empty answer means that the pipeline is up to date."""
    asked = dvc.start_status(project)
    try:
        known = read_lock(project)
        outer = {
            step.name: reason for step in dag if step.always and (reason := outer_reason(project, step.name))
        }
    except BaseException:
        asked.kill()
        raise
    try:
        found = dvc.read_status(asked)
    except PlumblineError as error:
        # Not knowing is a reason to run: the stages themselves will say what is wrong.
        found = {"dvc": [str(error)]}
    for step in dag:
        if step.name not in known and (step.name in found or step.name in outer):
            found[step.name] = [NEVER]
        elif step.name in outer:
            found.setdefault(step.name, []).append(outer[step.name])
    return found


def outer_reason(project: Path, name: str) -> str:
    """Why an outer step has to run, "" when it would change nothing."""
    if not stage_folder(project, name).is_dir():
        return NEVER
    try:
        if name == "sources":
            from tasks import sources

            same = sources.unchanged(project)
        else:
            same = registry_agrees(project) or (name == "champion" and _same_champion(project))
        return "" if same else "the world outside has changed"
    except PlumblineError as error:
        return str(error)


def _same_champion(project: Path) -> bool:
    """Asked where the two outer steps do not both agree: the champion may, with `register` still to come."""
    from tasks import champion

    return champion.unchanged(project, load(project).registry.name)


def registry_agrees(project: Path) -> bool:
    """True when champion and register have published what they would publish now."""
    params = load(project)
    key = _registry_key(project, params)
    memory = home(project) / "registry-check.json"
    if key and memory.is_file() and read_json(memory).get("key") == key:
        return True
    from tasks import champion, register

    agrees = champion.unchanged(project, params.registry.name) and register.unchanged(project, params)
    if agrees and key:
        write_json(memory, {"key": key, "version": _version(project, params)})
    return agrees


def registered_version(project: Path) -> str | None:
    """The candidate's version in the registry, None when it is not registered."""
    try:
        params = load(project)
        memory = home(project) / "registry-check.json"
        key = _registry_key(project, params)
        if key and memory.is_file() and (known := read_json(memory)).get("key") == key:
            version = known.get("version")
            return str(version) if version else None
        return _version(project, params)
    except (PlumblineError, KeyError, OSError):
        return None


def _version(project: Path, params: Params) -> str | None:
    written = read_json(stage_folder(project, "register") / "register.json")
    if not written.get("registered"):
        return None
    from tasks.registry import Registry

    version = Registry(project, params.registry.name).by_digest(str(written["candidate"]))
    return f"{version.name} {version.version}" if version is not None else None


def _registry_key(project: Path, params: Params) -> str:
    """Digest of the registry's rows and of what was published; "" when the rows can not be read this way."""
    file = database(project)
    if os.environ.get("MLFLOW_TRACKING_URI") or not file.is_file():
        return ""
    try:
        opened = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        with contextlib.closing(opened) as connection:
            rows = {
                table: sorted(map(repr, connection.execute(f"SELECT * FROM {table}"))) for table in _REGISTRY
            }
    except sqlite3.Error:
        return ""
    files = [stage_folder(project, name.partition("/")[0]) / name.partition("/")[2] for name in _PUBLISHED]
    published = [file_digest(file) if file.is_file() else "" for file in files]
    asked = [params.registry.name, params.promote.require_human]
    return digest_of({"rows": rows, "published": published, "asked": asked})
