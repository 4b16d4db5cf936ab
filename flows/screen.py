"""What a person sees while stages run: bars on a terminal, a line now and then elsewhere. Never a
credential."""

from __future__ import annotations

import threading
import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flows.secrets import mask
from flows.stages import Outcome
from tasks.places import Json

_LINE_SECONDS: Final = 30.0
_WORDS = {
    "done": "done",
    "skipped": "up to date",
    "restored": "restored from the run cache",
    "failed": "FAILED",
    "stopped": "stopped",
    "not_run": "not run",
}


class Screen:
    """Shows several stages at once; its methods may be called from any thread."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._guard = threading.Lock()
        self._bars: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._progress: Progress | None = None
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.fields[stage]:<10}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )

    def __enter__(self) -> Screen:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """One line above the bars."""
        with self._guard:
            self.console.print(mask(text), markup=False)

    def started(self, stage: str) -> None:
        """A stage began."""
        self._begun[stage] = time.monotonic()
        if self._progress is None:
            self.say(f"{stage}: started")
            return
        with self._guard:
            self._bars[stage] = self._progress.add_task("starting", total=None, stage=stage)

    def status(self, stage: str, status: Json) -> None:
        """The newest status file of a running stage."""
        step, total, words = described(status)
        if self._progress is not None and stage in self._bars:
            with self._guard:
                self._progress.update(
                    self._bars[stage], completed=step, total=total or None, description=words
                )
        elif self._progress is None and time.monotonic() - self._last.get(stage, 0.0) > _LINE_SECONDS:
            now = self._last[stage] = time.monotonic()
            self.say(f"{stage}: {words} ({now - self._begun.get(stage, now):.0f} s)")

    def ended(self, outcome: Outcome) -> None:
        """A stage ended; its bar makes room for one line."""
        if self._progress is not None and outcome.stage in self._bars:
            with self._guard:
                self._progress.remove_task(self._bars.pop(outcome.stage))
        words = _WORDS.get(outcome.state, outcome.state)
        after = f" after {outcome.seconds:.0f} s" if outcome.state in ("done", "failed", "stopped") else ""
        reason = f": {outcome.message}" if outcome.message and not outcome.good else ""
        self.say(f"{outcome.stage}: {words}{after}{reason}")


def described(status: Json) -> tuple[float, float, str]:
    """Step, total, and both in words with the newest metrics."""
    progress = status.get("progress")
    known = progress if isinstance(progress, dict) else {}
    step, total = float(known.get("step") or 0), float(known.get("total") or 0)
    unit = known.get("unit") or "step"
    words = f"{unit} {step:.0f} of {total:.0f}" if total else f"{step:.0f} {unit}" if step else "working"
    metrics = status.get("metrics")
    wanted = ("loss", "reward", "kl", "accuracy")
    for name in wanted if isinstance(metrics, dict) else ():
        value = metrics.get(name) if isinstance(metrics, dict) else None
        if isinstance(value, int | float):
            words += f", {name} {value:.3g}"
    return step, total, words
