"""One stage through dvc: how each kind of end is seen, and how a stop reaches it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from flows.stages import Outcome, Work
from tasks.places import Json
from tests.flows.conftest import again, plan, processes_of, ran

pytestmark = pytest.mark.slow


def run(work: Work, stage: str, seen: list[Json] | None = None) -> Outcome:
    lines: list[str] = []
    return work.run(stage, lines.append, (seen if seen is not None else []).append, poll=0.1)


def test_done_skipped_and_restored(fake_project: Path) -> None:
    work = Work(fake_project, 20)
    seen: list[Json] = []
    outcome = run(work, "a", seen)
    assert (outcome.state, outcome.good, outcome.metrics) == (
        "done",
        True,
        {"last step: loss": 0.5, "value": 0.0},
    )
    assert seen[-1]["progress"] == {"step": 2, "total": 2, "unit": "step"}
    assert run(work, "a").state == "skipped"
    again(fake_project, seed=1)
    plan(fake_project, a={"value": 1})
    assert run(Work(fake_project, 20), "a").state == "done"
    again(fake_project, seed=0)
    # Back to what was computed before: DVC has it in its run cache.
    assert run(Work(fake_project, 20), "a").state == "restored"
    assert ran(fake_project) == []
    assert json.loads((fake_project / "data" / "stages" / "a" / "result.json").read_text())["value"] == 0


@pytest.mark.parametrize("kind", ["data", "configuration", "divergence", "infrastructure"])
def test_the_kind_of_a_failure_comes_from_the_status_file(fake_project: Path, kind: str) -> None:
    plan(fake_project, a={"fail": kind})
    outcome = run(Work(fake_project, 20), "a")
    assert (outcome.state, outcome.kind, outcome.good) == ("failed", kind, False)
    assert outcome.message.startswith("a can not do it")


def test_a_stage_that_dies_is_infrastructure(fake_project: Path) -> None:
    plan(fake_project, a={"fail": "data", "die": True})
    outcome = run(Work(fake_project, 20), "a")
    assert (outcome.state, outcome.kind) == ("failed", "infrastructure")
    assert "it was killed" in outcome.message


def test_a_status_of_an_earlier_run_does_not_count(fake_project: Path) -> None:
    status = fake_project / ".plumbline" / "status" / "a.json"
    status.parent.mkdir(parents=True)
    status.write_text(
        json.dumps({"state": "failed", "kind": "data", "message": "old", "started": 1.0, "pid": 1})
    )
    (fake_project / "fake.py").write_text("raise SystemExit('no such luck')\n")
    outcome = run(Work(fake_project, 20), "a")
    assert (outcome.kind, outcome.state) == ("infrastructure", "failed")
    assert "no such luck" in outcome.message


def test_a_stop_reaches_the_stage_and_waits_for_its_checkpoint(fake_project: Path) -> None:
    plan(fake_project, a={"steps": 600, "seconds": 0.1})
    work = Work(fake_project, 20)
    seen: list[Json] = []
    ends: list[Outcome] = []
    thread = threading.Thread(target=lambda: ends.append(run(work, "a", seen)))
    thread.start()
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        time.sleep(0.1)
    work.stopping.set()
    thread.join(60)
    assert (ends[0].state, ends[0].kind) == ("stopped", "stopped")
    assert ran(fake_project) == ["a start", "a checkpoint"]
    assert processes_of(fake_project) == []
    assert run(work, "a").state == "stopped"  # nothing new is started


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("params.yaml", "seed: 0", "seed: 1", "params.yaml (seed)"),
        ("params.yaml", "retries: 1", "retries: 2", "params.yaml (pipeline.retries)"),
        ("params.yaml", "seed: 0", "seed: [", "params.yaml"),
        ("dvc.yaml", "python fake.py b", "python  fake.py b", "dvc.yaml (stages.b.cmd)"),
    ],
)
def test_an_edit_during_the_run_starts_no_further_stage(
    fake_project: Path, file: str, old: str, new: str, named: str
) -> None:
    work = Work(fake_project, 20)
    path = fake_project / file
    before = path.read_text()
    path.write_text("# a comment changes nothing\n" + before)
    assert run(work, "a").state == "done"
    path.write_text(before.replace(old, new))
    outcome = run(work, "b")
    assert (outcome.state, outcome.kind) == ("failed", "configuration")
    assert named in outcome.message
    assert ran(fake_project) == ["a start", "a end"]
