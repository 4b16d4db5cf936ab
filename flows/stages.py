"""Running one stage: `dvc repro --single-item STAGE` in a process group of its own, followed by its status
file.

dvc tells only whether it went well (it returns 255 for every failure); what went wrong, and how far the
work is, is in `.plumbline/status/STAGE.json`. Stop signals go to the stage's own process, not to dvc: a dvc
that dies first would take the stage with it before the checkpoint is written.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from data.errors import EXIT_CODES, ConfigurationError, Kind
from flows import cache, dvc
from flows.secrets import mask
from tasks.params import FILE, flat, read_raw
from tasks.places import Json, read_json
from tasks.results import document, headline
from tasks.status import read_status
from training import lifeline

KNOBS = (FILE, "dvc.yaml")
State = str
"""done, skipped (up to date), restored (from the run cache), failed, stopped, not_run"""


@dataclass(frozen=True)
class Outcome:
    """How a stage ended."""

    stage: str
    state: State
    seconds: float = 0.0
    kind: Kind | None = None
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.state in ("done", "skipped", "restored")


class Work:
    """The stages that run now, so that a stop reaches all of them."""

    def __init__(self, project: Path, grace_seconds: float, force: bool = False) -> None:
        self.project = project
        self.grace_seconds = grace_seconds
        self.force = force
        self.stopping = threading.Event()
        self._begun = {name: read_raw(project / name) for name in KNOBS}
        self._busy: dict[str, tuple[subprocess.Popen[str], object]] = {}

    def run(
        self, stage: str, on_line: Callable[[str], None], on_status: Callable[[Json], None], poll: float = 1.0
    ) -> Outcome:
        """Run a stage to its end; a stop request is handed on to it and waited for.

        What DVC restores from its cache is looked at, for DVC does not: damaged files are dropped and made
        again.
        """
        outcome = self._once(stage, on_line, on_status, poll)
        damaged = cache.mend(self.project, stage) if outcome.state == "restored" else []
        for line in damaged:
            on_line(line)
        return self._once(stage, on_line, on_status, poll) if damaged else outcome

    def _once(
        self, stage: str, on_line: Callable[[str], None], on_status: Callable[[Json], None], poll: float
    ) -> Outcome:
        if self.stopping.is_set():
            return Outcome(stage, "stopped", kind="stopped", message="the run was asked to stop")
        if edited := self._edited():
            return Outcome(stage, "failed", kind="configuration", message=edited)
        before = (read_status(self.project, stage) or {}).get("started")
        begun = time.monotonic()
        arguments = ["--wait-for-lock", "repro", "--single-item", stage, *(["--force"] if self.force else [])]
        watch = ",".join(
            filter(None, (lifeline.watch_value(os.getpid()), os.environ.get(lifeline.WATCH, "")))
        )
        process = subprocess.Popen(
            dvc.command(*arguments), cwd=self.project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace", process_group=0,
            env=dvc.environment(self.project, {lifeline.WATCH: watch}),
        )  # fmt: skip
        said: list[str] = []
        self._busy[stage] = (process, before)
        try:
            with _Lines(process) as lines:
                self._follow(process, stage, before, lines, said, on_line, on_status, poll)
        finally:
            _end_group(process)
            self._busy.pop(stage, None)
        return _judge(
            self.project,
            stage,
            before,
            process.returncode,
            time.monotonic() - begun,
            said,
            self.stopping.is_set(),
        )

    def _edited(self) -> str:
        """What is no longer as the run began with it; "" when all is."""
        try:
            now = {name: read_raw(self.project / name) for name in KNOBS}
        except ConfigurationError as error:
            return str(error)
        found: list[str] = []
        for name, before in self._begun.items():
            then, new = flat(before), flat(now[name])
            keys = [key for key in sorted({*then, *new}) if then.get(key) != new.get(key)]
            found += [f"{name} ({', '.join(keys[:5])}{', ...' if keys[5:] else ''})"] if keys else []
        if not found:
            return ""
        return (
            f"{' and '.join(found)} changed while the run was going on, and one run has one set of values; "
            "run again to use the new, or put the old back and run again: what has ended is kept"
        )

    def stop(self) -> None:
        """Ask the stages to write a checkpoint and end, and wait for them as long as they are given.

        Unlike the wish `stopping` this also reaches a stage whose thread hangs at a dead server.
        """
        self.stopping.set()
        deadline = time.monotonic() + self.grace_seconds
        while time.monotonic() < deadline:
            left = [(s, *one) for s, one in list(self._busy.items()) if one[0].poll() is None]
            if not left:
                return
            for stage, process, before in left:
                _ask_to_stop(process, _fresh(self.project, stage, before))
            time.sleep(0.5)

    def _follow(
        self, process: subprocess.Popen[str], stage: str, before: object, lines: _Lines, said: list[str],
        on_line: Callable[[str], None], on_status: Callable[[Json], None], poll: float,
    ) -> None:  # fmt: skip
        asked_at: float | None = None
        while True:
            for line in lines.take(poll):
                said.append(line)
                on_line(line)
            status = _fresh(self.project, stage, before)
            if status is not None:
                on_status(status)
            if process.poll() is not None and lines.ended:
                return
            if self.stopping.is_set():
                asked_at = asked_at or time.monotonic()
                if time.monotonic() - asked_at > self.grace_seconds:
                    return
                _ask_to_stop(process, status)


class _Lines:
    """The lines that a process prints, read by a thread, so that a silent process can be watched too."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.ended = False
        assert process.stdout is not None
        self._stream = process.stdout
        self._thread = threading.Thread(target=self._read, name="lines", daemon=True)

    def __enter__(self) -> _Lines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stream.close() if not self._thread.is_alive() else None

    def _read(self) -> None:
        for line in self._stream:
            self._queue.put(mask(line.rstrip()))
        self._queue.put(None)

    def take(self, seconds: float) -> list[str]:
        """What came within some seconds; returns early when there is something."""
        found: list[str] = []
        with contextlib.suppress(queue.Empty):
            first = self._queue.get(timeout=seconds)
            while True:
                if first is None:
                    self.ended = True
                    return found
                if first:
                    found.append(first)
                first = self._queue.get_nowait()
        return found


def _fresh(project: Path, stage: str, before: object) -> Json | None:
    """The stage's status, once this very run of it has written one."""
    status = read_status(project, stage)
    return status if status is not None and status.get("started") != before else None


def _ask_to_stop(process: subprocess.Popen[str], status: Json | None) -> None:
    """SIGTERM to the stage while it works; to dvc before the stage has begun; dvc's own commit is left in
    peace."""
    with contextlib.suppress(ProcessLookupError, psutil.Error, ValueError):
        if status is None:
            process.terminate()
        elif status.get("state") == "running":
            os.kill(int(str(status["pid"])), signal.SIGTERM)


def _end_group(process: subprocess.Popen[str]) -> None:
    """Nothing of a stage stays behind, however we left."""
    left = []
    with contextlib.suppress(psutil.Error):
        left = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()


def _judge(
    project: Path,
    stage: str,
    before: object,
    code: int | None,
    seconds: float,
    said: list[str],
    stopping: bool,
) -> Outcome:
    status = _fresh(project, stage, before)
    if code == 0:
        text = "\n".join(said)
        if status is not None and status.get("state") == "done":
            last = {f"last step: {name}": value for name, value in _numbers(status.get("metrics")).items()}
            file = document(project, stage)
            found = headline(read_json(file)) if file.is_file() else {}
            return Outcome(stage, "done", seconds, metrics=found | last)
        restored = "is cached - skipping run" in text or "Checking out" in text
        return Outcome(stage, "restored" if restored else "skipped", seconds)
    if stopping:
        return Outcome(
            stage, "stopped", seconds, "stopped", _message(status) or "stopped; run again to go on"
        )
    kind = status.get("kind") if status is not None and status.get("state") == "failed" else None
    if status is not None and kind in EXIT_CODES:
        known: Kind = kind
        state = "stopped" if known == "stopped" else "failed"
        return Outcome(stage, state, seconds, known, _message(status), _numbers(status.get("metrics")))
    words = " / ".join(line for line in said if line.strip())[-800:]
    why = (
        f"its process ended with code {code}"
        if status is None or status.get("state") != "running"
        else "it was killed"
    )
    fault: Kind = "configuration" if status is None and dvc.refused(words) else "infrastructure"
    return Outcome(stage, "failed", seconds, fault, f"{why}: {words}" if words else why)


def _message(status: Json | None) -> str:
    return mask(str((status or {}).get("message") or ""))


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {
        str(k): float(v) for k, v in value.items() if isinstance(v, int | float) and not isinstance(v, bool)
    }
