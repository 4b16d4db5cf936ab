"""What one stage shows of itself in Prefect while it runs: log lines, a progress bar, a table at the end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.exceptions import PrefectException

from flows.screen import Screen, described
from flows.stages import Outcome
from tasks.places import Json

_PROGRESS_SECONDS = 2.0
_LOG_SECONDS = 30.0


class Shown:
    """What one stage shows of itself in Prefect and on the screen while it runs."""

    def __init__(self, stage: str, screen: Screen) -> None:
        self.stage = stage
        self.screen = screen
        self.log = get_run_logger()
        self._artifact: UUID | None = None
        self._sent = (0.0, -1.0)
        self._logged = time.monotonic()

    def line(self, text: str) -> None:
        """A line that dvc or the stage printed."""
        self.log.info(text)

    def status(self, status: Json) -> None:
        """The newest status file: bar, artifact, and now and then a log line."""
        self.screen.status(self.stage, status)
        step, total, words = described(status)
        share = 100.0 * step / total if total else 0.0
        now = time.monotonic()
        if share != self._sent[1] and (now - self._sent[0] > _PROGRESS_SECONDS or share >= 100.0):
            self._sent = (now, share)
            with shielded(self.log):
                if self._artifact is None:
                    key = f"{key_of(self.stage)}-progress"
                    made = create_progress_artifact(share, key=key, description=words)
                    assert isinstance(made, UUID)
                    self._artifact = made
                else:
                    update_progress_artifact(self._artifact, share, description=words)
        if now - self._logged > _LOG_SECONDS:
            self._logged = now
            self.log.info("%s: %s", self.stage, words)

    def ended(self, outcome: Outcome) -> None:
        """The stage's metrics and duration as a table."""
        self.screen.ended(outcome)
        rows = [{"what": "seconds", "value": f"{outcome.seconds:.1f}"}]
        rows += [{"what": name, "value": f"{value:.6g}"} for name, value in sorted(outcome.metrics.items())]
        if outcome.state in ("done", "failed", "stopped"):
            with shielded(self.log):
                if self._artifact is not None and outcome.good:
                    update_progress_artifact(self._artifact, 100.0)
                create_table_artifact(
                    rows, key=f"{key_of(self.stage)}-metrics", description=outcome.message or None
                )


@contextlib.contextmanager
def shielded(log: logging.Logger | logging.LoggerAdapter[Any]) -> Iterator[None]:
    """A picture that can not be sent is no reason to end a training."""
    try:
        yield
    except (PrefectException, OSError, ValueError, RuntimeError) as error:
        log.warning("an artifact could not be stored: %s", error)


def key_of(stage: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in stage.lower())
