"""The process of one local server: `python -m flows.keeper prefect|mlflow`.

It lives as long as one of its clients does (files named by pid and start time in a folder), so a command
that is killed with -9 leaves no server behind, and two commands share one. Prefect's server runs in this
very process; MLflow's runs in children, which are ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tasks.places import read_json, root, write_json
from tasks.process import identity
from tasks.store import artifacts, tracking_uri
from training import lifeline

from . import servers

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 8.0


def main() -> None:
    """Bind a free loopback port, tell it in the state file, serve until no client is left."""
    kind = sys.argv[1]
    project = root()
    place = servers.Place(project, kind)
    listening = _bind(place)
    port = int(listening.getsockname()[1])
    state = {"pid": os.getpid(), "owner": identity(os.getpid()), "port": port}
    {"prefect": _prefect, "mlflow": _mlflow}[kind](
        project, place, listening, lambda: write_json(place.state, state)
    )


def _bind(place: servers.Place) -> socket.socket:
    """The port of the last time where it is free, so that open pages stay valid; else any."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    known = read_json(place.state).get("port") if place.state.is_file() else None
    for port in (known, 0):
        with contextlib.suppress(OSError):
            if isinstance(port, int):
                listening.bind((servers.HOST, port))
                break
    return listening


def _watch(place: servers.Place, end: Callable[[], None]) -> None:
    """Ends the server when nobody is left who needs it."""
    while True:
        time.sleep(_POLL_SECONDS)
        if place.clients():
            continue
        with place.lock():
            if place.clients():
                continue  # somebody came while we were waiting for the lock
            end()
            threading.Event().wait(_GRACE_SECONDS)
            _kill_children()
            os._exit(0)


def _kill_children() -> None:
    for pid in lifeline.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _prefect(
    project: Path, place: servers.Place, listening: socket.socket, ready: Callable[[], None]
) -> None:
    port = listening.getsockname()[1]
    os.environ.update(servers.prefect_environment(project))
    os.environ.pop("PREFECT_API_URL", None)
    os.environ.update(
        PREFECT_SERVER_UI_API_URL=f"http://{servers.HOST}:{port}/api",
        PREFECT_UI_STATIC_DIRECTORY=str(place.folder / "ui"),
        PREFECT_LOGGING_SERVER_LEVEL="WARNING",
        PREFECT_API_BLOCKS_REGISTER_ON_START="false",
    )
    import uvicorn
    from prefect.server.api.server import create_app

    server = uvicorn.Server(
        uvicorn.Config(create_app(final=True), timeout_keep_alive=10, log_level="warning", access_log=False)
    )

    def end() -> None:
        server.should_exit = True

    threading.Thread(target=_watch, args=(place, end), name="clients", daemon=True).start()
    listening.listen(128)
    ready()
    server.run(sockets=[listening])


def _mlflow(project: Path, place: servers.Place, listening: socket.socket, ready: Callable[[], None]) -> None:
    port = listening.getsockname()[1]
    listening.close()
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking_uri(project),
         "--artifacts-destination", artifacts(project).as_uri(), "--host", servers.HOST, "--port", str(port),
         "--workers", "1"],
        env=environment,
    )  # fmt: skip
    threading.Thread(target=_watch, args=(place, process.terminate), name="clients", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    ready()
    process.wait()
    _kill_children()


if __name__ == "__main__":
    main()
