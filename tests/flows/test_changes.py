"""What is to do, and why."""

from __future__ import annotations

from pathlib import Path

from flows.changes import NEVER, changes
from flows.dag import read_dag


def test_a_stage_that_never_ran_says_just_that(fake_project: Path) -> None:
    dag = read_dag(fake_project)
    assert changes(fake_project, dag) == {step.name: [NEVER] for step in dag}
