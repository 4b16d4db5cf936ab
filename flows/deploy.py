"""Scheduled and remote runs: the deployments of prefect.yaml, served by a process worker of this project.

    plumbline worker                       server, work pool, deployments and worker on this machine
    PREFECT_API_URL=... plumbline worker   the same against a server elsewhere

A deployed run executes the same flow in the project folder; its parameters are those of
`flows.retrain.retrain`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from rich.console import Console

from data.errors import InfrastructureError
from flows import servers
from training import lifeline

POOL = "plumbline"


def work(project: Path, console: Console) -> int:
    """Deploy, then run a worker until it is stopped; its exit code."""
    with _api(project) as api:
        environment = {
            **os.environ, **servers.prefect_environment(project, api),
            lifeline.WATCH: lifeline.watch_value(os.getpid()),
        }  # fmt: skip
        console.print(f"server: {api}", markup=False)
        _prefect(project, environment, "work-pool", "create", POOL, "--type", "process", "--overwrite")
        _prefect(project, environment, "deploy", "--all")
        console.print("deployments are up to date; the worker starts, Ctrl-C ends it")
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
        worker = subprocess.Popen(command, cwd=project, env=environment, start_new_session=True)

        def stop(number: int, frame: FrameType | None) -> None:
            worker.send_signal(signal.SIGTERM)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        return worker.wait()


@contextlib.contextmanager
def _api(project: Path) -> Iterator[str]:
    given = os.environ.get("PREFECT_API_URL")
    if given:
        yield given
        return
    with servers.server(project, "prefect") as server:
        os.environ.update(servers.prefect_environment(project, server.api))
        from flows import orphans

        orphans.mark_crashed()
        yield server.api


def _prefect(project: Path, environment: Mapping[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments], cwd=project, env=dict(environment),
        capture_output=True, text=True, encoding="utf-8", stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        words = " ".join((done.stdout + done.stderr).split())[-800:]
        raise InfrastructureError(f"prefect {' '.join(arguments[:2])} failed: {words}")
