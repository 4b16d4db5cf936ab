"""Local servers: shared while somebody needs them, gone when nobody does, orphans included."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from data.errors import InfrastructureError
from flows import servers
from tests.flows.conftest import FOLDER, processes_of
from training import lifeline

pytestmark = pytest.mark.slow

CLIENT = """
import sys, time
from pathlib import Path
from flows import servers
with servers.server(Path(sys.argv[1]), sys.argv[2]) as found:
    print(found.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name in ("dvc.yaml", "params.yaml"):
        (folder / name).touch()
    return folder


def client(project: Path, kind: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", CLIENT, str(project), kind]
    process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(pid: int, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while lifeline.start_of(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    return lifeline.start_of(pid) == ""


def test_shared_by_two_and_ended_with_the_last_even_by_kill(project: Path) -> None:
    one, first = client(project, "prefect")
    two, second = client(project, "prefect")
    assert first == second
    one.kill()
    one.wait()
    time.sleep(2)
    assert lifeline.start_of(first)  # the other one still needs it
    two.kill()
    two.wait()
    assert gone(first)
    assert processes_of(project) == []


def test_pages_know_their_api_and_nothing_is_written_elsewhere(project: Path) -> None:
    with servers.server(project, "prefect") as server:
        with urllib.request.urlopen(f"{server.url}/ui-settings") as answer:
            assert server.api in answer.read().decode()
        assert (project / ".plumbline" / "prefect" / "prefect.db").is_file()
    assert servers.Place(project, "prefect").running() is None
    assert processes_of(project) == []


def test_an_orphan_that_answers_no_more_is_replaced(project: Path) -> None:
    process, pid = client(project, "prefect")
    os.kill(pid, signal.SIGSTOP)  # lives, but does not answer
    process.kill()
    process.wait()
    with servers.server(project, "prefect") as fresh:
        assert fresh.pid != pid
    os.kill(pid, signal.SIGCONT) if lifeline.start_of(pid) else None
    assert gone(pid)


def test_mlflow_pages_end_with_all_their_processes(project: Path) -> None:
    from tasks import lineage

    lineage.client(project)
    with servers.server(project, "mlflow") as server:
        with urllib.request.urlopen(server.url) as answer:
            assert b"<html" in answer.read().lower()
        assert len(processes_of(project)) >= 2
    deadline = time.monotonic() + 20
    while processes_of(project) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(project) == []


@pytest.mark.parametrize("kills", [1, 2])
def test_a_keeper_that_is_killed_while_it_starts_is_started_once_more(project: Path, kills: int) -> None:
    killed: list[int] = []

    def kill() -> None:
        while len(killed) < kills:
            for process in processes_of(project):
                with contextlib.suppress(psutil.Error):
                    if "flows.keeper" in process.cmdline() and process.pid not in killed:
                        process.kill()
                        killed.append(process.pid)
            time.sleep(0.05)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    begun = time.monotonic()
    if kills == 1:
        with servers.server(project, "prefect") as found:
            assert found.pid not in killed
    else:
        said = "was killed by signal 9 while it started, 2 times"
        with pytest.raises(InfrastructureError, match=said), servers.server(project, "prefect"):
            raise AssertionError("it can not have started")
        assert time.monotonic() - begun < 30
    killer.join(5)
    assert len(killed) == kills


def test_a_damaged_history_of_flow_runs_is_named_with_its_remedy(project: Path) -> None:
    history = project / ".plumbline" / "prefect" / "prefect.db"
    history.parent.mkdir(parents=True)
    history.write_bytes(b"no data base" * 1000)
    said = r"prefect\.db is damaged: move it away"
    with pytest.raises(InfrastructureError, match=said), servers.server(project, "prefect"):
        raise AssertionError("it can not have started")


def test_a_keeper_that_ends_by_itself_is_told_at_once(project: Path) -> None:
    (project / ".plumbline").mkdir()
    (project / ".plumbline" / "prefect").mkdir()
    (project / ".plumbline" / "prefect" / "prefect.db").mkdir()  # no file to open
    said = r"prefect server ended with code [1-9]"
    with pytest.raises(InfrastructureError, match=said), servers.server(project, "prefect"):
        raise AssertionError("it can not have started")
