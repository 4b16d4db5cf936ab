"""Local servers on SQLite: Prefect's for a run, MLflow's pages for `plumbline ui`.

A server is a process of its own (flows/keeper.py) on a free loopback port, found again by a state file with
pid, start time and port. Whoever needs it registers as a client; the last one to leave stops it, and a
killed one counts as gone; a server that is killed while it is needed is started again (`Guard`).
Prefect's ephemeral mode is not used: it was measured to lose task runs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from filelock import FileLock, Timeout

from data.errors import InfrastructureError
from tasks.places import home, read_json
from tasks.process import OFFLINE, gone
from training import lifeline

HOST = "127.0.0.1"
_START_SECONDS = 180.0
_STARTS = 2
_LOOK_SECONDS = 1.0
_ASK_EVERY = 15
_PATIENCE_SECONDS = 60.0
_REVIVALS = 3
_DAMAGED = ("file is not a database", "database disk image is malformed")
_HEALTH = {"prefect": "/api/health", "mlflow": "/health"}


def prefect_environment(project: Path, api: str | None = None) -> dict[str, str]:
    """What Prefect needs to know before it is imported; all it writes stays below the project's home."""
    known = {
        **OFFLINE,
        "PREFECT_HOME": str(home(project) / "prefect"),
        "PREFECT_PROFILES_PATH": str(home(project) / "prefect" / "profiles.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLIENT_MAX_RETRIES": "10",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
        "PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "false",
    }
    return {**known, "PREFECT_API_URL": api} if api else known


@dataclass(frozen=True)
class Server:
    """A running server."""

    kind: str
    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def api(self) -> str:
        return f"{self.url}/api"


class Place:
    """Where one kind of server keeps its state file, its log and its clients."""

    def __init__(self, project: Path, kind: str) -> None:
        self.kind = kind
        self.folder = home(project) / ("prefect" if kind == "prefect" else f"{kind}-server")
        self.state = self.folder / "server.json"
        self.log = self.folder / "server.log"
        self._clients = self.folder / "clients"
        self._clients.mkdir(parents=True, exist_ok=True)

    def lock(self) -> FileLock:
        """Held while a server is started or ended."""
        return FileLock(self.folder / "server.lock", timeout=_START_SECONDS + 60)

    def join(self) -> Path:
        """Register this process as a client."""
        file = self._clients / str(os.getpid())
        file.write_text(lifeline.watch_value(os.getpid()), encoding="utf-8")
        return file

    def clients(self) -> list[str]:
        """Clients that live; the files of the others are removed."""
        living: list[str] = []
        for file in self._clients.iterdir():
            with contextlib.suppress(OSError):
                value = file.read_text(encoding="utf-8")
                if lifeline.alive(value):
                    living.append(value)
                elif value or time.time() - file.stat().st_mtime > 5:
                    file.unlink()
        return living

    def running(self) -> Server | None:
        """The server of the state file, None when it is gone or was never there."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if self.state.is_file():
                state = read_json(self.state)
                if not gone(str(state["owner"])):
                    return Server(self.kind, int(str(state["pid"])), int(str(state["port"])))
        return None


@contextlib.contextmanager
def server(
    project: Path,
    kind: str,
    say: Callable[[str], None] | None = None,
    lost: Callable[[str], None] | None = None,
) -> Iterator[Server]:
    """A server of this kind: the running one, or a new one; stopped when its last client leaves.

    say and lost hear of its death and of its loss from a thread (see `Guard`).
    """
    place = Place(project, kind)
    mine = place.join()
    try:
        with place.lock():
            found = place.running()
            if found is not None and not _healthy(found, 20):
                _end(found.pid)
                found = None
            if found is None:
                found = _start(project, place)
        with Guard(project, found, say or tell, lost or tell):
            yield found
    finally:
        mine.unlink(missing_ok=True)
        with place.lock():
            present = place.running()
            if present is not None and not place.clients():
                _end(present.pid)


def _start(project: Path, place: Place) -> Server:
    """Start a server and wait until it answers, once more when it is killed meanwhile; the caller holds the
    lock.

    Raises InfrastructureError with the last words of its log when it does not.
    """
    place.log.unlink(missing_ok=True)
    for _ in range(_STARTS):
        process = _keeper(project, place)
        found = _answering(place, process)
        if found is not None:
            return found
        code = process.poll()
        _end(process.pid)
        if code is None or code >= 0:
            break  # it hangs, or found a fault that the next one would find too
    words = place.log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
    if code is None:
        how = f"did not answer within {_START_SECONDS:.0f} s"
    elif code < 0:
        how = f"was killed by signal {-code} while it started, {_STARTS} times (want of memory?)"
    else:
        how = f"ended with code {code} while it started"
    said = " / ".join(words) or "none"
    if place.kind == "prefect" and any(word in said for word in _DAMAGED):
        how += f", for {place.log.with_name('prefect.db')} is damaged: move it away, it is history alone"
    raise InfrastructureError(f"the {place.kind} server {how} (log {place.log}); its last words: {said}")


def _keeper(project: Path, place: Place) -> subprocess.Popen[bytes]:
    with place.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.keeper", place.kind], cwd=project, env=_plain_environment(),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _answering(place: Place, process: subprocess.Popen[bytes]) -> Server | None:
    """The server once it answers; None when its process ends first, or it takes too long."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = place.running()
        if found is not None and found.pid == process.pid and _healthy(found, 2):
            return found
        time.sleep(0.2)
    return None


def _plain_environment() -> dict[str, str]:
    """This environment without another project's Prefect settings, and with the packages found from any
    folder."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return {**known, **OFFLINE}


def _healthy(found: Server, seconds: float) -> bool:
    """Whether the server answers within some seconds; a loaded machine may need several tries."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while True:
        try:
            with opener.open(found.url + _HEALTH[found.kind], timeout=max(0.5, seconds)) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, TimeoutError):
            if time.monotonic() >= deadline or not psutil.pid_exists(found.pid):
                return False
            time.sleep(0.2)


def _end(pid: int) -> None:
    """SIGTERM, and SIGKILL after a while, to a server and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, left = psutil.wait_procs(family, timeout=8)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=5)


def end_unused(project: Path) -> list[str]:
    """End servers that no living process needs; what was done, one line each."""
    done: list[str] = []
    for kind in _HEALTH:
        place = Place(project, kind)
        with place.lock():
            found = place.running()
            if found is not None and not place.clients():
                _end(found.pid)
                done.append(f"{kind} server (pid {found.pid}): nobody needed it, ended")
    return done


def tell(text: str) -> None:
    """The default listener: standard error."""
    print(text, file=sys.stderr, flush=True)


class Guard:
    """Watches one server from a thread for as long as the `with` block lasts; starts it again when it dies.

    It comes back on the same port and store, and Prefect's client tries each request again for minutes: the
    flow goes on as if nothing had happened.

    say hears that the server was started again; lost, that it is gone for good (it died more than three
    times, its port is taken, or it does not start).
    """

    def __init__(
        self, project: Path, found: Server, say: Callable[[str], None], lost: Callable[[str], None]
    ) -> None:
        self.project = project
        self.found = found
        self.say = say
        self.lost = lost
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"{found.kind}-guard", daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()

    def _watch(self) -> None:
        place = Place(self.project, self.found.kind)
        looks = deaths = 0
        while not self._done.wait(_LOOK_SECONDS):
            looks += 1
            if self._well(place, ask=looks % _ASK_EVERY == 0):
                continue
            deaths += 1
            try:
                if deaths > _REVIVALS:
                    raise InfrastructureError(f"it died {deaths} times during this command")
                with place.lock():
                    self._revive(place)
            except (InfrastructureError, OSError, Timeout) as error:
                self.lost(f"the {place.kind} server is gone and can not be brought back: {error}")
                return

    def _well(self, place: Place, ask: bool) -> bool:
        """Whether its process lives and, when asked, answers (one that hangs counts as dead)."""
        present = place.running()
        if present is None or present.port != self.found.port:
            return False
        return not ask or _healthy(present, _PATIENCE_SECONDS)

    def _revive(self, place: Place) -> None:
        present = place.running()
        if self._done.is_set() or (present is not None and self._well(place, ask=True)):
            return  # nobody needs it any more, or another command was quicker
        if present is None or present.port == self.found.port:
            if present is not None:
                _end(present.pid)
            self.say(f"the {place.kind} server was killed; starting it again on port {self.found.port}")
            present = _start(self.project, place)
        if present.port != self.found.port:
            raise InfrastructureError(f"another program has taken its port {self.found.port}")
