"""The flow on pretended stages, as a command against a real server: order, retries, kinds, stops, kills,
masking."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows import servers
from tests.flows.conftest import FOLDER, again, command, make_fake, plan, processes_of, ran, started

pytestmark = pytest.mark.slow
SECRET = "s3cr3t-value-1234"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One project for the module, and one server that its commands share."""
    folder = make_fake(tmp_path_factory.mktemp("flow") / FOLDER)
    here = Path.cwd()
    os.chdir(folder)
    try:
        with servers.server(folder, "prefect"):
            yield folder
    finally:
        os.chdir(here)
    assert servers.Place(folder, "prefect").running() is None


def rows(project: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(project / ".plumbline" / "prefect" / "prefect.db", timeout=30) as connection:
        return list(connection.execute(query))


def task_states(project: Path) -> dict[str, tuple[str, int]]:
    """Name -> state and tries, of the newest flow run."""
    newest = "(select id from flow_run order by created desc limit 1)"
    found = rows(project, f"select name, state_name, run_count from task_run where flow_run_id = {newest}")
    return {str(name): (str(state), int(str(count))) for name, state, count in found}


def flow_state(project: Path) -> str:
    return str(rows(project, "select state_name from flow_run order by created desc limit 1")[0][0])


def test_runs_in_order_side_by_side_and_then_has_nothing_to_do(project: Path) -> None:
    plan(project, b={"steps": 30, "seconds": 0.2}, c={"steps": 30, "seconds": 0.2})
    done = command(project, "run")
    assert done.returncode == 3, done.stdout + done.stderr  # pretended stages register nothing
    log = ran(project)
    assert log[:2] == ["a start", "a end"]
    assert log[-2:] == ["d start", "d end"]
    assert sorted(log[2:4]) == ["b start", "c start"]  # both before either ended
    assert task_states(project) == dict.fromkeys("abcd", ("Completed", 1))
    keys = {str(key) for (key,) in rows(project, "select key from artifact")}
    assert {"b-progress", "b-metrics", "stages", "report"} <= keys
    assert flow_state(project) == "Completed"

    begun = time.monotonic()
    idle = command(project, "run")
    assert (idle.returncode, time.monotonic() - begun < 30) == (0, True)
    assert "Nothing to do" in idle.stdout
    assert rows(project, "select count(*) from flow_run") == [(1,)]

    forced = command(project, "run", "--set", "pipeline.max_parallel_stages=1", "--force")
    assert forced.returncode == 3
    assert ran(project)[len(log) :][:4] == ["a start", "a end", "b start", "b end"]


def test_up_to_date_stages_are_shown_as_skipped(project: Path) -> None:
    out = project / "data" / "stages" / "d" / "result.json"
    out.unlink()
    plan(project)
    (project / "dvc.lock").write_text(
        "".join((project / "dvc.lock").read_text().partition("  d:\n")[:1]), encoding="utf-8"
    )
    assert command(project, "run").returncode == 3
    states = task_states(project)
    assert {name: state for name, (state, _) in states.items() if name != "d"} == dict.fromkeys(
        "abc", "Skipped"
    )
    assert states["d"][0] in ("Completed", "Cached")


def test_only_infrastructure_failures_are_tried_again(project: Path) -> None:
    again(project, seed=1)
    plan(project, a={"fail": "infrastructure", "times": 1}, b={"fail": "data"})
    done = command(project, "run")
    assert done.returncode == 11
    assert task_states(project) == {
        "a": ("Completed", 2),
        "b": ("Failed (data)", 1),
        "c": ("Completed", 1),
        "d": ("NotRun", 1),
    }
    assert flow_state(project) == "Failed (data)"
    assert "b failed (data)" in done.stdout
    assert "why:  b can not do it" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "d" not in {line.split()[0] for line in ran(project)}


def test_a_stage_that_dies_is_tried_again(project: Path) -> None:
    again(project, seed=2)
    plan(project, a={"fail": "data", "die": True, "times": 1})
    assert command(project, "run").returncode == 3
    assert task_states(project)["a"] == ("Completed", 2)


def test_no_credential_is_shown_or_stored(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    again(project, seed=3)
    plan(project, a={"fail": "data"})
    done = command(project, "--debug", "run")
    assert done.returncode == 11
    assert SECRET not in done.stdout + done.stderr
    for file in project.rglob("*"):
        if file.is_file() and file.name != "fake.py":
            assert SECRET.encode() not in file.read_bytes(), file
    refused = command(project, "run", "--set", f"model.source={SECRET}")
    assert refused.returncode == 10
    assert SECRET not in refused.stdout + refused.stderr


def test_sigterm_lets_the_stage_write_its_checkpoint(project: Path) -> None:
    again(project, seed=4)
    plan(project, a={"steps": 900, "seconds": 0.1})
    running = started(project, "run")
    wait_for(project, "a start")
    running.send_signal(signal.SIGTERM)
    assert running.wait(90) == 14
    assert ran(project) == ["a start", "a checkpoint"]
    assert flow_state(project) == "Cancelled"
    assert left(project) == []


def test_a_flow_that_dies_leaves_no_process_and_is_marked_by_the_next(project: Path) -> None:
    again(project, seed=5)
    plan(project, a={"steps": 900, "seconds": 0.1})
    running = started(project, "run")
    wait_for(project, "a start")
    running.kill()
    running.wait()
    wait_until(lambda: left(project) == [])
    assert flow_state(project) == "Running"
    plan(project)
    done = command(project, "run")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "marked as crashed" in done.stdout
    states = [str(name) for (name,) in rows(project, "select state_name from flow_run order by created")]
    assert states[-2:] == ["Crashed", "Completed"]
    assert rows(project, "select count(*) from task_run where state_type in ('RUNNING','PENDING')") == [(0,)]


def test_a_second_run_waits_and_names_the_first(project: Path) -> None:
    again(project, seed=6)
    plan(project, a={"steps": 200, "seconds": 0.1})
    running = started(project, "run")
    wait_for(project, "a start")
    refused = command(project, "run", "--wait", "1")
    assert refused.returncode == 13
    assert f"pid {running.pid}" in refused.stdout + refused.stderr
    assert "--wait" in refused.stderr
    patient = command(project, "run", "--wait", "120")
    assert running.wait(10) == 3
    assert patient.returncode == 0
    assert "Nothing to do" in patient.stdout


def test_a_killed_server_comes_back_and_the_run_goes_on(project: Path) -> None:
    again(project, seed=7)
    plan(project, a={"steps": 100, "seconds": 0.1})
    running = started(project, "run")
    wait_for(project, "a start")
    server = servers.Place(project, "prefect").running()
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    assert running.wait(180) == 3
    assert task_states(project) == dict.fromkeys("abcd", ("Completed", 1))
    assert flow_state(project) == "Completed"
    fresh = servers.Place(project, "prefect").running()
    assert fresh is not None
    assert (fresh.port, fresh.pid != server.pid) == (server.port, True)


def test_a_server_that_can_not_come_back_ends_the_run_at_a_checkpoint(project: Path) -> None:
    again(project, seed=8)
    plan(project, a={"steps": 900, "seconds": 0.1})
    state = servers.Place(project, "prefect").state
    running = started(project, "run")
    wait_for(project, "a start")
    server = servers.Place(project, "prefect").running()
    assert server is not None
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: takes(taken, server.port))
        assert running.wait(180) == 13
    assert ran(project) == ["a start", "a checkpoint"]
    assert state.is_file()


def test_a_second_signal_ends_the_run_at_once(project: Path) -> None:
    again(project, seed=9)
    plan(project, a={"steps": 900, "seconds": 0.1, "deaf": True})
    running = started(project, "run")
    wait_for(project, "a start")
    running.send_signal(signal.SIGINT)
    time.sleep(2)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    assert running.wait(10) == 14
    wait_until(lambda: left(project) == [])


def takes(listening: socket.socket, port: int) -> bool:
    with contextlib.suppress(OSError):
        listening.bind((servers.HOST, port))
        listening.listen()
        return True
    return False


def left(project: Path) -> list[psutil.Process]:
    """Processes in the project's folder, the shared server apart."""
    server = servers.Place(project, "prefect").running()
    assert server is not None
    return [process for process in processes_of(project) if process.pid != server.pid]


def wait_for(project: Path, line: str) -> None:
    wait_until(lambda: line in ran(project))
    time.sleep(1)


def wait_until(true: object, seconds: float = 90) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
