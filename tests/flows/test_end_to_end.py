"""The whole pipeline on a tiny random model: two ways to run it are equal, and no kill changes the result.

Each workspace is a copy of the project in a folder with spaces and accents, with empty stores of its own.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flows import dvc
from tasks.publish import read_lock
from tests.flows.conftest import FOLDER, calls_outside, command, environment, processes_of, started
from tests.flows.tiny_project import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Makes workspaces; whatever still runs in one at the end is ended."""
    folder = tmp_path_factory.mktemp("whole")
    yield lambda name: make_tiny(folder / f"{FOLDER} {name}")
    for process in processes_of(folder):
        process.kill()


@pytest.fixture(scope="module")
def undisturbed(workspaces: Callable[[str], Path]) -> Path:
    """A workspace after `dvc repro`."""
    project = workspaces("dvc")
    around = {**environment(), **dvc.environment(project)}
    done = subprocess.run(
        dvc.command("repro"), cwd=project, env=around, text=True, encoding="utf-8",
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return project


@pytest.fixture(scope="module")
def by_flow(workspaces: Callable[[str], Path]) -> tuple[Path, str]:
    """A workspace after `plumbline run`, and what it printed."""
    project = workspaces("flow")
    done = command(project, "run", timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return project, done.stdout


def test_two_ways_give_the_same_digests(undisturbed: Path, by_flow: tuple[Path, str]) -> None:
    project, said = by_flow
    assert dvc.differences(read_lock(undisturbed), read_lock(project)) == []
    assert "registered version  " in said
    assert "tiny 1" in said
    assert processes_of(project) == []
    assert no_run_is_open(project)
    assert calls_outside() == []

    begun = time.monotonic()
    idle = command(project, "run")
    seconds = time.monotonic() - begun
    assert idle.returncode == 0
    assert "Nothing to do" in idle.stdout
    assert seconds < 10 * slowness(), f"{seconds:.1f} s"

    chain = command(project, "lineage", "tiny@champion")
    assert chain.returncode == 0, chain.stderr
    wanted = (
        "tiny version 1",
        "data/tiny/preferences.jsonl",
        "models/tiny",
        "changes that are not committed",
    )
    for part in wanted:
        assert part in chain.stdout

    # Champion is now the own candidate: the always-run steps change nothing, by dvc either.
    around = {**environment(), **dvc.environment(project)}
    subprocess.run(dvc.command("repro"), cwd=project, env=around, check=True, capture_output=True)
    assert dvc.differences(read_lock(undisturbed), read_lock(project)) == []


def test_killed_anywhere_it_ends_with_the_same_digests(
    undisturbed: Path, workspaces: Callable[[str], Path]
) -> None:
    project = workspaces("killed")
    running = started(project, "run")
    kill(project, running, "sft", stage_of)
    kill(project, running, "reward", launcher_of)
    kill(project, running, "judge", dvc_of)
    kill(project, running, "optimize", lambda project, stage: running.pid)
    running.wait(60)
    wait_until(lambda: processes_of(project) == [], 60)

    done = command(project, "run", timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert dvc.differences(read_lock(undisturbed), read_lock(project)) == []
    assert processes_of(project) == []
    assert no_run_is_open(project)


def test_a_registered_version_is_rebuilt_bit_for_bit(by_flow: tuple[Path, str]) -> None:
    project, _ = by_flow
    done = command(project, "reproduce", "tiny@1", timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "equal: tiny version 1 was rebuilt bit for bit" in done.stdout
    assert "the way differs" not in done.stdout


def kill(
    project: Path, running: subprocess.Popen[str], stage: str, victim: Callable[[Path, str], int | None]
) -> None:
    """kill -9, as soon as the stage's program has a checkpoint and is not yet done."""
    work = project / ".plumbline" / "work" / stage

    def ready() -> bool:
        assert running.poll() is None, (project / "run.log").read_text()[-3000:]
        assert not list(work.glob("*/result.json")), f"{stage} was done before it could be killed"
        return bool(list(work.glob("*/checkpoints/step-*/COMPLETE")))

    wait_until(ready, 900)
    pid = victim(project, stage)
    assert pid is not None
    os.kill(pid, 9)


def stage_of(project: Path, stage: str) -> int:
    status = json.loads((project / ".plumbline" / "status" / f"{stage}.json").read_text())
    return int(status["pid"])


def launcher_of(project: Path, stage: str) -> int | None:
    return _among(psutil.Process(stage_of(project, stage)).children(recursive=True), "training.launch")


def dvc_of(project: Path, stage: str) -> int | None:
    return _among(psutil.Process(stage_of(project, stage)).parents(), "dvc")


def _among(processes: list[psutil.Process], word: str) -> int | None:
    return next((process.pid for process in processes if word in process.cmdline()), None)


def no_run_is_open(project: Path) -> bool:
    """Neither in MLflow nor in Prefect."""
    with sqlite3.connect(project / ".plumbline" / "mlflow.db", timeout=30) as runs:
        left = list(runs.execute("select name, status from runs where status = 'RUNNING'"))
    with sqlite3.connect(project / ".plumbline" / "prefect" / "prefect.db", timeout=30) as flows:
        left += list(flows.execute("select name, state_name from flow_run where state_type = 'RUNNING'"))
    assert left == []
    return True


def slowness() -> float:
    """How many times slower than alone this machine is now; a time limit is meant for an idle one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) * 2)


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
