"""No process outlives the one that needs it.

torchrun gives its workers sessions of their own and a killed `dvc` orphans its command, so a signal to a
process group reaches neither. Every process of a training run binds itself: the kernel kills it when its
parent dies (Linux), and a thread watches the parent and the processes named in PLUMBLINE_WATCH
("pid:start,..."; the start time keeps a reused pid from passing for the old process). On a loss the thread
kills the descendants and leaves with the exit code of an infrastructure failure.

The kernel's signal follows the parent's thread, not its process: start children from a thread that lives on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from data.errors import EXIT_CODES

WATCH = "PLUMBLINE_WATCH"
_PR_SET_PDEATHSIG = 1
_bound = threading.Event()


def start_of(pid: int) -> str:
    """Start time of a living process as an opaque text, "" when there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            return "unknown"
        return "unknown"
    return "" if fields[0] == "Z" else fields[19]


def watch_value(pid: int) -> str:
    """How PLUMBLINE_WATCH names a living process; join several with commas."""
    return f"{pid}:{start_of(pid)}"


def alive(value: str) -> bool:
    """Whether the process that `watch_value` named still runs."""
    pid, _, start = value.partition(":")
    return pid.isdigit() and start != "" and start_of(int(pid)) == start


def children(pid: int) -> list[int]:
    """Pids of the direct children of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """Pids of all processes below one, nearest first."""
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children(parent)]
        found += level
    return found


def bind(interval: float = 0.5) -> None:
    """Ties this process to its parent and to PLUMBLINE_WATCH; a second call changes nothing."""
    if _bound.is_set():
        return
    _bound.set()
    parent = os.getppid()
    watched = [value for value in os.environ.get(WATCH, "").split(",") if value]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    thread = threading.Thread(target=_watch, args=(parent, watched, interval), name="lifeline", daemon=True)
    thread.start()


def _watch(parent: int, watched: list[str], interval: float) -> None:
    while os.getppid() == parent and all(alive(value) for value in watched):
        time.sleep(interval)
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(EXIT_CODES["infrastructure"])
