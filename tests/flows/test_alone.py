"""One flow at a time in a workspace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.errors import InfrastructureError
from flows.alone import alone

HOLDER = """
import sys, time
from pathlib import Path
from flows.alone import alone
with alone(Path(sys.argv[1]), 0, print):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the workspace."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_waits_and_then_says_whom_for(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    said: list[str] = []
    with (
        pytest.raises(InfrastructureError, match=rf"pid {holder.pid}.*--wait.*second checkout"),
        alone(tmp_path, 0.5, said.append),
    ):
        pass
    assert f"pid {holder.pid}" in said[0]


def test_a_killed_holder_leaves_nothing_behind(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    said: list[str] = []
    with alone(tmp_path, 5, said.append):
        pass
    assert said == []


def test_the_same_process_may_hold_it_twice(tmp_path: Path) -> None:
    with alone(tmp_path, 0, print):
        with alone(tmp_path, 0, print):
            pass
        assert (tmp_path / ".plumbline" / "locks" / "flow.json").is_file()
    with alone(tmp_path, 0, print):
        pass
