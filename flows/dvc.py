"""DVC as a command: never imported, always this environment's, quiet towards the network.

Also its files where no command tells enough: `dvc.lock` (two runs are equal when their parsed locks are),
and the read-write lock that a kill can leave broken.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from data.errors import ConfigurationError, InfrastructureError
from tasks.places import home
from tasks.process import OFFLINE
from tasks.publish import Lock


def command(*arguments: str) -> list[str]:
    """This environment's dvc with arguments."""
    return [sys.executable, "-m", "dvc", *arguments]


def environment(project: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Surroundings of dvc and, through it, of the stages: this Python first, no telemetry, caches in the
    project."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    known = {**os.environ, **OFFLINE, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    known.setdefault("DVC_SITE_CACHE_DIR", str(home(project) / "dvc"))
    return {**known, **(extra or {})}


def start_status(project: Path) -> subprocess.Popen[str]:
    """Begin `dvc status`, so that the caller can look at other things meanwhile."""
    return subprocess.Popen(
        command("status", "--json"), cwd=project, env=environment(project), text=True, encoding="utf-8",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def read_status(running: subprocess.Popen[str], timeout: float = 120) -> dict[str, list[str]]:
    """Stage -> what changed for it, as `dvc status` sees it; "always changed" is left to the outer steps'
    own checks."""
    try:
        out, err = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        running.kill()
        raise InfrastructureError(
            f"dvc status gave no answer within {timeout:.0f} s; look for a busy disk"
        ) from error
    if running.returncode != 0:
        raise _failure("dvc status", err)
    found: dict[str, list[str]] = {}
    for stage, entries in json.loads(out or "{}").items():
        reasons = [text for entry in entries for text in _reasons(entry) if text != "always changed"]
        if reasons:
            found[str(stage)] = reasons
    return found


def _reasons(entry: object) -> list[str]:
    if not isinstance(entry, dict):
        return [str(entry)]
    return [
        f"{name}: {how if isinstance(how, str) else ', '.join(f'{k} {v}' for k, v in how.items())}"
        for group in entry.values()
        for name, how in group.items()
    ]


def _failure(what: str, text: str) -> ConfigurationError | InfrastructureError:
    lines = [line for line in text.splitlines() if line.strip()]
    message = f"{what} failed: " + (" ".join(lines[-6:]) or "it said nothing")
    return ConfigurationError(message) if refused(text) else InfrastructureError(message)


def refused(text: str) -> bool:
    """Whether dvc, by what it printed, found fault with dvc.yaml or params.yaml, which repeating does not
    mend."""
    faults = (
        "validation failed",
        "is invalid",
        "are missing from",
        "is missing from",
        "failed to parse",
        "not inside of a DVC repository",
        "is not a git repository",
    )
    return any(word in text for word in faults) and "busy" not in text


def differences(one: Mapping[str, Lock], other: Mapping[str, Lock]) -> list[str]:
    """What two parsed locks do not share, one line a fact; no line: the two runs are equal."""
    lines: list[str] = []
    for stage in sorted({*one, *other}):
        if stage not in one or stage not in other:
            lines.append(f"{stage}: only in the {'first' if stage in one else 'second'}")
            continue
        for part in ("cmd", "deps", "params", "outs"):
            here, there = _facts(one[stage].get(part)), _facts(other[stage].get(part))
            for name in sorted({*here, *there}):
                if here.get(name) != there.get(name):
                    where = f"{stage}: {part}{': ' + name if name else ''}"
                    lines.append(f"{where}: {here.get(name)!r} against {there.get(name)!r}")
    return lines


def _facts(part: object) -> dict[str, object]:
    """Path or key -> digest or value; sizes follow from digests."""
    if isinstance(part, list):
        return {str(entry["path"]): entry.get("md5", entry.get("hash")) for entry in part}
    if isinstance(part, dict):
        return {f"{file}:{key}": value for file, keys in part.items() for key, value in dict(keys).items()}
    return {"": part}


def mend_locks(project: Path) -> list[str]:
    """Undo what a kill left in DVC's read-write lock; what was done, one line each.

    The file is rewritten in place, so a kill can leave half of it, and an entry stands for a pid that
    another program may have by now (in a container all of them are small numbers).
    """
    path = project / ".dvc" / "tmp" / "rwlock"
    if not path.is_file():
        return []
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        entries = [("write", p, info) for p, info in tree.get("write", {}).items()]
        entries += [("read", p, info) for p, infos in tree.get("read", {}).items() for info in infos]
    except (ValueError, AttributeError, TypeError):
        path.unlink(missing_ok=True)
        return [f"{path}: was broken by a kill, removed"]
    held = [(mode, name, info) for mode, name, info in entries if _is_dvc(int(info["pid"]))]
    if len(held) == len(entries):
        return []
    fresh: dict[str, dict[str, object]] = {"write": {}, "read": {}}
    for mode, name, info in held:
        if mode == "write":
            fresh["write"][name] = info
        else:
            known = fresh["read"].setdefault(name, [])
            assert isinstance(known, list)
            known.append(info)
    partial = path.with_name("rwlock.partial")
    partial.write_text(json.dumps(fresh), encoding="utf-8")
    partial.replace(path)
    return [f"{path}: {len(entries) - len(held)} entries of processes that are gone, removed"]


_DVC = re.compile(r"(^|/)dvc(\s|$)")


def _is_dvc(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and any(map(_DVC.search, process.cmdline()))
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def check(arguments: Sequence[str], project: Path, timeout: float | None = None) -> str:
    """Run dvc to its end and return what it printed; a failure carries its last lines."""
    done = subprocess.run(
        command(*arguments), cwd=project, env=environment(project), text=True, encoding="utf-8",
        stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise _failure(f"dvc {arguments[0]}", done.stderr + done.stdout)
    return done.stdout
