"""Local servers: shared while somebody needs them, gone when nobody does, orphans included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

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
