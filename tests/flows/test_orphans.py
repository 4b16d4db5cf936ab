"""Flow runs of dead processes are closed, and their concurrency slots are free again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import servers
from tests.flows.conftest import FOLDER, environment

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, time
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Pending, Running
from flows.orphans import OWNER, mark_crashed, owner_tag

with get_client(sync_client=True) as client:
    flow_id = client.create_flow_from_name("retrain")
    deployment = client.create_deployment(flow_id, "one", concurrency_limit=1)

    def begin(tag):
        run = client.create_flow_run_from_deployment(deployment, tags=[tag] if tag else [])
        return run, client.set_flow_run_state(run.id, Pending())

    def answer(order):
        return order.status.value

    dead, first = begin(OWNER + os.environ["DEAD"])
    client.set_flow_run_state(dead.id, Running())
    waiting, second = begin(owner_tag())
    marked = mark_crashed()
    third = client.set_flow_run_state(waiting.id, Pending())
    deadline = time.monotonic() + 120  # a run that was sent away is due again half a minute later
    while (living := client.set_flow_run_state(waiting.id, Running())) and answer(living) == "WAIT":
        if time.monotonic() > deadline:
            break
        time.sleep(2)
    again = mark_crashed()
    print(json.dumps({
        "first": answer(first), "second": answer(second), "third": answer(third), "living": answer(living),
        "marked": marked == [dead.name], "again": again,
        "dead": client.read_flow_run(dead.id).state.name,
        "alive": client.read_flow_run(waiting.id).state.name,
    }))
"""


def test_the_slot_of_a_dead_run_is_given_back(tmp_path: Path) -> None:
    project = tmp_path / FOLDER
    project.mkdir()
    for name in ("dvc.yaml", "params.yaml"):
        (project / name).touch()
    identity = [
        sys.executable,
        "-c",
        "import os; from tasks.process import identity; print(identity(os.getpid()))",
    ]
    dead = subprocess.run(identity, capture_output=True, text=True, check=True).stdout.strip()
    with servers.server(project, "prefect") as server:
        around = {**environment(), **servers.prefect_environment(project, server.api), "DEAD": dead}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=project,
            env=around,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["first"] == "ACCEPT"
    assert said["second"] in ("WAIT", "REJECT")  # the only slot is taken
    assert said["marked"]
    assert said["third"] == "ACCEPT"
    assert said["living"] == "ACCEPT", said
    assert (said["dead"], said["alive"], said["again"]) == ("Crashed", "Running", [])
    assert os.environ.get("PREFECT_API_URL") is None
