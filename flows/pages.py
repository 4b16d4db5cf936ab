"""`plumbline ui`: the pages of Prefect and MLflow on the project's own stores, until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

from rich.console import Console

from flows import servers
from tasks import lineage


def serve(project: Path, console: Console) -> None:
    """Start (or share) both servers, say where they are, wait for an end."""
    ended = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        ended.set()

    lineage.sweep(project)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    console.print("starting the servers ...")
    with servers.server(project, "prefect") as flows, servers.server(project, "mlflow") as runs:
        console.print(f"Prefect (flow runs, stages, artifacts): {flows.url}", markup=False, soft_wrap=True)
        console.print(f"MLflow (parameters, metrics, models):   {runs.url}", markup=False, soft_wrap=True)
        console.print("Ctrl-C ends both.")
        ended.wait()
        console.print("ending ...")
