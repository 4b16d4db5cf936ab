"""Whether DVC's cache still holds what dvc.lock says.

Files in data/stages are hard links into the cache, so that a model lies on the disk once. Whoever edits one
in place edits the cache too, and DVC takes a cache file that is read-only for good without looking (root may
write it all the same). So each object that dvc.lock names is compared with its md5: once, and again only when
its size, time of change or inode is another than it was then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.errors import ConfigurationError, DataError, InfrastructureError
from flows import dvc
from tasks.places import STAGES, Json, home, read_json, write_json
from tasks.publish import PUBLISHED, Lock, link_or_copy, read_lock
from tasks.store import artifacts

_MEMORY = "cache-check.json"
_FETCH_SECONDS = 600
_LOCK_SECONDS = 5.0
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Object:
    """A file of a stage's output and what the cache keeps of it."""

    stage: str
    md5: str
    """As dvc.lock has it; that of a folder's listing ends in .dir."""
    file: Path
    """Where it lies in the project; for a listing the folder."""
    cached: Path


@dataclass(frozen=True)
class Memory:
    """What the last look left."""

    seen: Json
    """md5 -> size, time of change and inode of its cache file when its bytes were right."""
    lost: Json
    """Kept file below the home -> md5 of the damaged object that it was a link to."""


def mend(project: Path, stage: str | None = None) -> list[str]:
    """Drop the damaged objects of all stages, or of one, and fetch them where a remote has them; one line a
    file that was damaged.

    What can not be fetched is gone from data/stages too, so that DVC runs its stage again. Kept files of
    runs and registered models that were links to a damaged object are linked again once it is back.
    """
    with _one_at_a_time:
        memory = _remembered(project)
        bad = [one for one in _objects(project, stage) if not _sound(one, memory)]
        _drop(project, bad, memory)
        fetched = _fetch(project, sorted({one.stage for one in bad}))
        good = {one for one in bad if fetched and one.cached.is_file() and _sound(one, memory)}
        for one in bad:
            if one not in good:
                one.cached.unlink(missing_ok=True)
        _link_again(project, memory)
        write_json(home(project) / _MEMORY, {"seen": memory.seen, "lost": memory.lost})
    return [_told(project, one, one in good) for one in bad]


def _told(project: Path, one: Object, fetched: bool) -> str:
    then = "fetched again from the remote" if fetched else f"{one.stage} runs again"
    return (
        f"{one.file.relative_to(project)}: it was changed after stage {one.stage} had made it, and with it "
        f"its copy in DVC's cache; both are dropped, {then}"
    )


def _objects(project: Path, stage: str | None) -> Iterator[Object]:
    """The objects below data/stages that dvc.lock names and the cache has."""
    for name, entry in _lock(project, stage).items():
        for out in entry.get("outs") or ():
            md5, path = str(out.get("md5")), Path(str(out.get("path")))
            if not path.is_relative_to(STAGES) or len(md5) < 32:
                continue
            whole = Object(name, md5, project / path, _cached(project, md5))
            for one in (whole, *_listed(project, whole)):
                if one.cached.is_file():
                    yield one


def _cached(project: Path, md5: str) -> Path:
    return project / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]


def _listed(project: Path, folder: Object) -> Iterator[Object]:
    if not folder.md5.endswith(".dir"):
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a broken listing is found as such
        for entry in json.loads(folder.cached.read_text(encoding="utf-8")):
            md5 = str(entry["md5"])
            yield Object(folder.stage, md5, folder.file / entry["relpath"], _cached(project, md5))


def _lock(project: Path, stage: str | None) -> dict[str, Lock]:
    """dvc.lock, or one stage of it, for which a stage that ends beside it and is half through writing the
    file is waited for."""
    if stage is None:
        return read_lock(project)
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(InfrastructureError):
            lock = read_lock(project)
            if stage in lock:
                return {stage: lock[stage]}
        time.sleep(0.1)
    return {}


def _remembered(project: Path) -> Memory:
    with contextlib.suppress(DataError):
        known = read_json(home(project) / _MEMORY)
        seen, lost = known.get("seen"), known.get("lost")
        if isinstance(seen, dict) and isinstance(lost, dict):
            return Memory(seen, lost)
    return Memory({}, {})


def _sound(one: Object, memory: Memory) -> bool:
    """Whether the bytes are those of the md5; notes how the file looks, when they are."""
    status = one.cached.stat()
    looks = [status.st_size, status.st_mtime_ns, status.st_ino]
    if memory.seen.get(one.md5) == looks:
        return True
    memory.seen.pop(one.md5, None)
    with one.cached.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != one.md5.removesuffix(".dir"):
        return False
    memory.seen[one.md5] = looks
    return True


def _drop(project: Path, bad: Sequence[Object], memory: Memory) -> None:
    """Remove the cache files and whatever is the same file: in data/stages (DVC may take it for known), in
    the stages' finished work, and among the kept files of runs, which are noted."""
    damaged = {(status.st_dev, status.st_ino): one.md5 for one in bad for status in [one.cached.stat()]}
    if not damaged:
        return
    for one in bad:
        if _which(one.file, damaged):
            one.file.unlink()
        for work in (home(project) / "work" / one.stage).glob("*"):
            if any(work.glob(PUBLISHED)) or any(work.glob(f"*/{PUBLISHED}")):
                shutil.rmtree(work, ignore_errors=True)
    for kept in artifacts(project).rglob("*"):
        if md5 := _which(kept, damaged):
            memory.lost[kept.relative_to(home(project)).as_posix()] = md5
            kept.unlink()
    for one in bad:
        one.cached.unlink(missing_ok=True)


def _which(file: Path, damaged: Mapping[tuple[int, int], str]) -> str | None:
    """The damaged object that a file is a link to."""
    if not file.is_file():
        return None
    status = file.stat()
    return damaged.get((status.st_dev, status.st_ino))


def _link_again(project: Path, memory: Memory) -> None:
    for name, md5 in list(memory.lost.items()):
        cached = _cached(project, str(md5))
        if cached.is_file() and _sound(Object("", str(md5), cached, cached), memory):
            if not (home(project) / name).exists():
                link_or_copy(cached, home(project) / name)
            del memory.lost[name]


def _fetch(project: Path, stages: Sequence[str]) -> bool:
    """Whether a remote was asked for the outputs of these stages; one that lacks them is no failure."""
    if not stages:
        return False
    try:
        dvc.check(["fetch", *stages], project, _FETCH_SECONDS)
    except (InfrastructureError, ConfigurationError, subprocess.TimeoutExpired):
        return False
    return True
