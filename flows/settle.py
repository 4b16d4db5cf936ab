"""What Prefect's client still holds at the end (events, logs) is sent before its server is stopped.

Its services send from threads and wait without limit when the process leaves, so a server that is stopped
too early, or that died, would keep the command from ever ending.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker

_SECONDS = 30.0


def settle() -> bool:
    """Send the rest; False when it did not work out in time."""
    settled = True
    for service in (EventsWorker, APILogWorker):
        answer = service.drain_all(timeout=_SECONDS)
        if isinstance(answer, tuple):
            waiting: set[concurrent.futures.Future[bool]] = answer[1]
            settled = settled and not waiting
    return settled


def leave(code: int) -> None:
    """End the process at once, without the services' own waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
