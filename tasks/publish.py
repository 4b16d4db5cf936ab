"""Outputs appear complete or not at all, and cost no second copy of a model on disk.

A stage works below the project's home, in a folder of its name and fingerprint. What is done is hard-linked
(copied where the file system can not link) into a folder beside the DVC output, which then takes the
output's name in one rename.
The work is kept until `dvc.lock` names exactly these files, so that a kill between publishing and DVC's
commit costs nothing.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from data.errors import InfrastructureError
from data.folders import files_below
from tasks.places import STAGES, home, stage_folder, write_json

PUBLISHED = "published.json"


def link_or_copy(source: Path, target: Path) -> None:
    """One file at another place: a hard link where that works, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """A file or a whole folder at another place, file by file."""
    if source.is_file():
        link_or_copy(source, target)
        return
    for name in files_below(source):
        link_or_copy(source / name, target / name)


def publish(project: Path, stage: str, work: Path, names: Iterable[str]) -> Path:
    """Make `data/stages/STAGE` of the named files and folders below `work`; the old output goes only then."""
    target = stage_folder(project, stage)
    partial = target.with_name(f".{stage}.partial")
    old = target.with_name(f".{stage}.old")
    wanted = list(names)
    try:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in wanted:
            if not (work / name).exists():
                raise InfrastructureError(
                    f"{work / name}: the training program ended without writing it; run the stage again, and "
                    "look at "
                    f"{work / 'output.log'}"
                )
            link_tree(work / name, partial / name)
        if target.exists():
            target.replace(old)
        partial.replace(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InfrastructureError(
            f"{target}: can not publish the output ({error.strerror}); free disk space or make the folder "
            "writable"
        ) from error
    write_json(work / PUBLISHED, {"names": wanted})
    return target


def check_writable(project: Path) -> None:
    """Fail before hours of training when the result could not be written."""
    folder = project / STAGES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InfrastructureError(
            f"{folder}: outputs can not be written there ({error.strerror}); make the folder writable"
        ) from error


def dvc_digest(work: Path, names: Iterable[str]) -> str:
    """The digest that DVC gives the published folder: md5 of the JSON list of its files' md5 sums, then
    `.dir`.
    """
    listed: list[dict[str, str]] = []
    for name in names:
        files = (
            [name] if (work / name).is_file() else [f"{name}/{below}" for below in files_below(work / name)]
        )
        for file in files:
            with (work / file).open("rb") as stream:
                md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            listed.append({"md5": md5, "relpath": file})
    return listing_digest(listed)


def listing_digest(entries: Iterable[Mapping[str, str]]) -> str:
    """DVC's digest of a folder by the md5 and relpath of its files."""
    text = json.dumps(sorted(entries, key=lambda entry: entry["relpath"]), sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest() + ".dir"


Lock = dict[str, Any]
"""A stage's entry in dvc.lock: command, dependencies, parameters and outputs."""


def read_lock(project: Path) -> dict[str, Lock]:
    """dvc.lock, parsed; nothing when there is none."""
    path = project / "dvc.lock"
    return parse_lock(path.read_bytes(), str(path)) if path.is_file() else {}


@functools.lru_cache(maxsize=2)
def parse_lock(content: bytes, where: str) -> dict[str, Lock]:
    """Stage -> its entry, to be read only. YAML 1.2, as DVC writes it (so 1e-05 is a number)."""
    remedy = "restore it with `git checkout dvc.lock` or delete it"
    try:
        tree = YAML(typ="safe").load(content.decode("utf-8")) or {}
    except (YAMLError, UnicodeDecodeError) as error:
        raise InfrastructureError(f"{where}: not valid YAML ({error}); {remedy}") from error
    stages = (tree.get("stages") or {}) if isinstance(tree, dict) else None
    if not isinstance(stages, dict) or not all(isinstance(entry, dict) for entry in stages.values()):
        raise InfrastructureError(f"{where}: has no stages by name, so DVC did not write it; {remedy}")
    return {str(name): entry for name, entry in stages.items()}


def locked_outputs(project: Path) -> dict[str, str]:
    """Stage -> digest of its output folder, as `dvc.lock` has them."""
    try:
        lock = read_lock(project)
    except InfrastructureError:
        return {}  # DVC is the one to complain about its file; nothing is cleaned on its word
    found: dict[str, str] = {}
    for stage, entry in lock.items():
        for out in entry.get("outs") or []:
            if out.get("path") == (STAGES / stage).as_posix():
                found[stage] = str(out.get("md5"))
    return found


def tidy(project: Path) -> list[str]:
    """Drop the work of stages whose output `dvc.lock` has, older fingerprints included; running stages are
    left alone.
    """
    cleaned: list[str] = []
    for stage, locked in locked_outputs(project).items():
        folder = home(project) / "work" / stage
        if not folder.is_dir():
            continue
        try:
            with FileLock(work_lock(project, stage), timeout=0):
                markers = sorted([*folder.glob(f"*/{PUBLISHED}"), *folder.glob(f"*/*/{PUBLISHED}")])
                if any(_is_locked(marker, locked) for marker in markers):
                    shutil.rmtree(folder, ignore_errors=True)
                    cleaned.append(stage)
        except Timeout:
            continue
    return cleaned


def work_lock(project: Path, stage: str) -> Path:
    """The lock that the one running instance of a stage holds; the kernel frees it when the process dies."""
    folder = home(project) / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{stage}.lock"


def _is_locked(marker: Path, locked: str) -> bool:
    try:
        names = json.loads(marker.read_text(encoding="utf-8"))["names"]
        return dvc_digest(marker.parent, names) == locked
    except (OSError, ValueError, KeyError):
        return False
