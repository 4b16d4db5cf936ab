"""One flow at a time in a workspace: the second waits, and says for whom and until when."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from data.errors import InfrastructureError
from tasks.places import home, read_json, write_json

_held: dict[Path, int] = {}


@contextlib.contextmanager
def alone(project: Path, wait_seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the workspace. The kernel frees the lock of a killed holder, so it is never stale; a nested use
    is free."""
    file = home(project) / "locks" / "flow.lock"
    if _held.get(file):
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    note = file.with_name("flow.json")
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another run ({_holder(note)}) uses this folder; waiting for it up to {wait_seconds:.0f} s")
        try:
            lock.acquire(timeout=wait_seconds, poll_interval=0.5)
        except Timeout as error:
            raise InfrastructureError(
                f"{project}: another run ({_holder(note)}) still uses this folder after "
                f"{wait_seconds:.0f} s; wait for it, "
                "stop it with Ctrl-C, allow more time with --wait, or work in a second checkout of "
                "the project"
            ) from error
    _held[file] = 1
    try:
        write_json(note, {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        yield
    finally:
        _held.pop(file, None)
        note.unlink(missing_ok=True)
        lock.release()


def _holder(note: Path) -> str:
    try:
        known = read_json(note)
        return f"pid {known['pid']}, since {known['since']}"
    except (ValueError, KeyError):
        return "pid unknown"
