from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training import lifeline

ROOT = Path(__file__).resolve().parents[2]
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def gone(pid: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not lifeline.start_of(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_process_is_known_by_pid_and_start() -> None:
    process = subprocess.Popen(SLEEP)
    try:
        value = lifeline.watch_value(process.pid)
        assert lifeline.alive(value)
        assert not lifeline.alive(f"{process.pid}:1"), "a reused pid is another process"
        assert process.pid in lifeline.children(os.getpid()) and process.pid in lifeline.descendants(
            os.getpid()
        )
    finally:
        process.kill()
    assert gone(process.pid), "a zombie does not count as alive"
    assert not lifeline.alive(value)
    process.wait()


@pytest.mark.parametrize("value", ["", ":", "x:1", "999999999:1", "1:"])
def test_nonsense_is_not_alive(value: str) -> None:
    assert not lifeline.alive(value)


CHILD = """
import subprocess, sys, time
from training import lifeline
lifeline.bind(interval=0.1); lifeline.bind(interval=0.1)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(grandchild.pid, flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_its_bound_child_along(signal_number: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert parent.stdout is not None
    child, grandchild = (int(pid) for pid in parent.stdout.readline().split())
    try:
        parent.send_signal(signal_number)
        parent.wait()
        assert gone(child)
    finally:
        for pid in (child, grandchild):
            if lifeline.start_of(pid):
                os.kill(pid, signal.SIGKILL)
    parent.stdout.close()


def test_a_lost_watched_process_ends_the_bound_one_and_its_children() -> None:
    watched = subprocess.Popen(SLEEP)
    env = {**os.environ, lifeline.WATCH: lifeline.watch_value(watched.pid)}
    bound = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    )
    assert bound.stdout is not None
    grandchild = int(bound.stdout.readline())
    assert lifeline.start_of(grandchild)
    watched.kill()
    watched.wait()
    assert bound.wait(timeout=10) == 13, "the loss of a neighbour is an infrastructure failure"
    assert gone(grandchild), "even one in a session of its own"
    bound.stdout.close()
