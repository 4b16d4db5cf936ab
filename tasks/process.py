"""Starting a training program so that it can be stopped, and so that nothing of it outlives the stage.

Three nets, because each has a hole: the program is a process group of its own that gets our signals; the
stage is a sub-reaper (Linux), so that what torchrun leaves behind becomes our child and is found; and every
process watches the processes above it by pid and start time, which still works when the stage itself is
killed with -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from training import lifeline

_PR_SET_CHILD_SUBREAPER = 36

OFFLINE = {
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR_QUIET": "1",
}


SPARED: set[int] = set()
"""Our own children that outlive a training program: the recorder."""
ALONE = frozenset({"optimize", "evaluate"})
"""Stages beside which no other one trains."""
SPIN = 10_000


def identity(pid: int) -> str:
    """`host/pid/create_time`, which no other process can have, not even after a restart; empty when it is
    gone.
    """
    try:
        return f"{socket.gethostname()}/{pid}/{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return ""


def gone(who: str) -> bool:
    """True when the process named by `identity` was one of this host and runs no more; others can not be
    judged.
    """
    parts = who.rsplit("/", 2)
    if len(parts) != 3 or parts[0] != socket.gethostname():
        return False
    try:
        process = psutil.Process(int(parts[1]))
        return abs(process.create_time() - float(parts[2])) >= 1 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False


def dvc_ancestor() -> int | None:
    """The pid of the `dvc` that runs this stage; a shell may stand between."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):
                words = [Path(word).stem for word in process.cmdline()[:3]]
                if process.name() == "dvc" or "dvc" in words:
                    return process.pid
    return None


def watch_list() -> str:
    """Whom this stage and all it starts must not outlive: those named by the caller, and the dvc above us."""
    names = [name for name in os.environ.get(lifeline.WATCH, "").split(",") if name]
    dvc = dvc_ancestor()
    if dvc is not None and not any(name.split(":")[0] == str(dvc) for name in names):
        names.append(lifeline.watch_value(dvc))
    return ",".join(names)


def owner() -> str:
    """The process whose life is the pipeline's: the flow if there is one, else dvc, else this process."""
    first = watch_list().split(",")[0].split(":")[0]
    return identity(int(first) if first.isdigit() else os.getpid())


def bind() -> None:
    """Tie this stage to the dvc, the flow and the parent above it; what it starts then watches it too."""
    os.environ[lifeline.WATCH] = watch_list()
    lifeline.bind()
    _adopt_orphans()


def _adopt_orphans() -> None:
    """Become the parent of whatever our descendants leave behind (Linux; elsewhere the watching has to
    do).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spin_of(stage: str, threads: int) -> int:
    """How often a stage's waiting threads look before they sleep; `threads`: of all its processes.

    Looking takes the core from a neighbour (3.5 times slower, both busy), so the stages that may run side by
    side sleep at once. One that has the machine for itself looks for about half a millisecond: to wake a
    thread takes longer than many a product (decoding 8 answers on two threads 2.3 to 3.1 against 3.9 to
    4.2 s).
    """
    return SPIN if stage in ALONE and threads <= (os.cpu_count() or 1) else 0


def environment(threads: int, hub_offline: bool, spin: int = 0) -> dict[str, str]:
    """The surroundings of a training program: no telemetry, no network for local models, a fixed thread
    count; `spin`: how often a waiting thread looks before it sleeps.
    """
    return {
        **os.environ,
        **OFFLINE,
        "HF_HUB_OFFLINE": "1" if hub_offline else os.environ.get("HF_HUB_OFFLINE", "0"),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(spin),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        lifeline.WATCH: ",".join(filter(None, (watch_list(), lifeline.watch_value(os.getpid())))),
    }


class Program:
    """One running training program: its launcher, the launcher's workers and its log."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                list(command), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip

    def poll(self, seconds: float) -> int | None:
        """The exit code when it ends within `seconds`, else None."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_stop(self) -> None:
        """SIGTERM to the launcher, which hands it to the workers: they write a checkpoint and leave."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything that this process started and that is still there."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            below = psutil.Process().children(recursive=True)
            left = [child for child in below if child.pid not in SPARED and _runs(child)]
            if not left:
                return
            for child in left:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            psutil.wait_procs(left, timeout=0.5)

    def last_words(self, lines: int = 30) -> str:
        """The end of the log, for the message of a failure that left no error.json."""
        try:
            text = self.log.read_bytes()[-20_000:].decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
