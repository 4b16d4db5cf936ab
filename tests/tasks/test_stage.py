"""A stage runs its program to a published output, tells how it failed, and leaves nothing behind when it
is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.lineage import client, sweep
from tasks.places import read_json
from tasks.publish import tidy
from tests.tasks.conftest import surroundings
from tests.tasks.fake_program import STEPS

FAKE = [sys.executable, "-m", "tests.tasks.fake_stage"]


def start(project: Path, command: list[str] = FAKE, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=project,
        env=surroundings(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(project: Path, **extra: str) -> tuple[int, str]:
    process = start(project, **extra)
    text, _ = process.communicate(timeout=120)
    return process.returncode, text


def work(project: Path) -> Path:
    (folder,) = (project / ".plumbline" / "work" / "sft").iterdir()
    return folder


def wait_for_step(project: Path, step: int) -> None:
    """Until the program has written this step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list((project / ".plumbline" / "work").glob("sft/*/metrics.jsonl"))
        if found and len(found[0].read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def wait_for_run(project: Path) -> None:
    """Until the tracking store has the stage's run."""
    deadline = time.monotonic() + 60
    file = project / ".plumbline" / "status" / "sft.json"
    while time.monotonic() < deadline:
        if file.is_file() and read_json(file)["run_id"]:
            return
        time.sleep(0.05)
    raise AssertionError("no run was opened")


def pids(project: Path) -> list[int]:
    return [int(pid) for pid in (work(project) / "pids").read_text().split()]


def recorders(project: Path) -> list[int]:
    """Lineage programs of this project that still run."""
    here, found = str(project), psutil.process_iter(["cmdline", "cwd"])
    return [p.pid for p in found if p.info["cwd"] == here and "tasks.recorder" in (p.info["cmdline"] or [])]


def all_gone(numbers: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = [
            n for n in numbers if psutil.pid_exists(n) and psutil.Process(n).status() != psutil.STATUS_ZOMBIE
        ]
        if not left:
            return True
        time.sleep(0.05)
    return False


def runs(project: Path) -> list[tuple[str, str, int]]:
    """Status, stage and number of loss points of each child run."""
    tracking = client(project)
    found = tracking.search_runs(["1"], "tags.`plumbline.kind` = 'stage'")
    return [
        (
            r.info.status,
            r.data.tags["plumbline.stage"],
            len(tracking.get_metric_history(r.info.run_id, "loss")),
        )
        for r in found
    ]


@pytest.mark.slow
def test_a_stage_publishes_and_is_recorded(project: Path) -> None:
    code, text = finished(project)
    assert code == 0, text
    output = project / "data" / "stages" / "sft"
    assert sorted(f.name for f in output.iterdir()) == [
        "journal.jsonl",
        "metrics.jsonl",
        "model",
        "result.json",
    ]
    assert (output / "model" / "weights").samefile(work(project) / "model" / "weights")
    status = read_json(project / ".plumbline" / "status" / "sft.json")
    assert (status["state"], status["progress"]) == ("done", {"step": STEPS, "total": STEPS, "unit": "step"})
    assert runs(project) == [("FINISHED", "sft", STEPS)]
    (run,) = client(project).search_runs(["1"], "tags.`plumbline.kind` = 'stage'")
    assert {key: value for key, value in run.data.metrics.items() if key.startswith("result.")} == {
        "result.loss_last": 1 / STEPS,
        "result.accuracy": 0.75,
        "result.interval_lower": 0.5,
        "result.interval_upper": 0.9,
    }
    assert run.data.metrics["loss"] == 1 / STEPS
    parents = client(project).search_runs(["1"], "tags.`plumbline.kind` = 'pipeline'")
    assert [run.info.status for run in parents] == ["RUNNING"]
    assert sweep(project) == [parents[0].info.run_id]
    # Finished work is only published again; the program is not started a second time.
    (output / "result.json").unlink()
    assert finished(project)[0] == 0
    assert (output / "result.json").is_file()
    assert (work(project) / "starts").read_text() == "0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "kind", "words"),
    [("divergence", 12, "divergence", "nan at step 3"), ("crash", 13, "infrastructure", "last words")],
)
def test_a_failure_has_a_kind(project: Path, mode: str, code: int, kind: str, words: str) -> None:
    found, text = finished(project, FAKE=mode)
    assert found == code, text
    status = read_json(project / ".plumbline" / "status" / "sft.json")
    assert (status["state"], status["kind"]) == ("failed", kind)
    assert words in str(status["message"])
    assert not (project / "data" / "stages" / "sft").exists()
    assert [run[0] for run in runs(project)] == ["FAILED"]


@pytest.mark.slow
def test_a_wrong_parameter_fails_before_anything_starts(project: Path) -> None:
    file = project / "params.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("lr: 1e-3", "lr: -1"), encoding="utf-8")
    code, text = finished(project)
    assert code == 10
    assert "params.yaml: sft.lr = -1: input should be greater than 0" in text
    assert not (project / ".plumbline" / "work").exists()


@pytest.mark.slow
def test_a_stop_signal_reaches_the_program_and_the_work_goes_on(project: Path) -> None:
    process = start(project, FAKE="hold")
    wait_for_run(project)
    wait_for_step(project, 5)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 14, text
    assert all_gone(pids(project))
    assert runs(project)[0][0] == "KILLED"
    assert finished(project)[0] == 0
    assert runs(project) == [("FINISHED", "sft", STEPS)]


@pytest.mark.slow
def test_a_program_that_does_not_listen_is_killed_after_the_grace_time(project: Path) -> None:
    file = project / "params.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("grace_seconds: 5", "grace_seconds: 1"), "utf-8")
    process = start(project, FAKE_STEP="20", FAKE="deaf")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not list((project / ".plumbline").glob("work/sft/*/pids")):
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 14
    assert all_gone(pids(project), 1)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["stage", "launcher", "program"])
def test_kill_9_leaves_no_process_and_the_next_run_goes_on(project: Path, whom: str) -> None:
    process = start(project, FAKE="hold")
    wait_for_run(project)
    wait_for_step(project, 5)
    launcher, program = pids(project)
    os.kill({"stage": process.pid, "launcher": launcher, "program": program}[whom], signal.SIGKILL)
    process.communicate(timeout=30)
    assert all_gone([process.pid, launcher, program, *recorders(project)])
    if whom == "stage":
        assert runs(project)[0][0] == "RUNNING"
        sweep(project)
        assert runs(project)[0][0] == "KILLED"
    code, text = finished(project)
    assert code == 0, text
    assert (work(project) / "starts").read_text() == "0\n4\n"
    assert runs(project) == [("FINISHED", "sft", STEPS)]
    lines = (project / "data" / "stages" / "sft" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS


@pytest.mark.slow
def test_kill_9_of_dvc_and_of_a_watched_flow(dvc_project: Path) -> None:
    dvc = [sys.executable, "-m", "dvc", "repro", "sft"]
    with subprocess.Popen(["sleep", "300"]) as flow:
        from training.lifeline import watch_value

        for victim in ("dvc", "flow"):
            watch = {"PLUMBLINE_WATCH": watch_value(flow.pid)} if victim == "flow" else {}
            (dvc_project / "code.py").write_text(f"# {victim}\n")
            process = start(dvc_project, dvc, FAKE="hold", **watch)
            stage = _started(dvc_project)
            wait_for_step(dvc_project, 5)
            below = [stage, *pids(dvc_project)]
            os.kill(process.pid if victim == "dvc" else flow.pid, signal.SIGKILL)
            assert all_gone(below), victim
            process.communicate(timeout=30)
            for file in (dvc_project / ".plumbline" / "work").glob("sft/*/metrics.jsonl"):
                file.parent.rename(dvc_project / victim)
        flow.wait()


@pytest.mark.slow
def test_work_is_kept_until_dvc_has_the_output(dvc_project: Path) -> None:
    assert finished(dvc_project)[0] == 0
    assert tidy(dvc_project) == []
    command = [sys.executable, "-m", "dvc", "repro", "sft"]
    done = subprocess.run(
        command, cwd=dvc_project, env=surroundings(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights = dvc_project / "data" / "stages" / "sft" / "model" / "weights"
    assert weights.stat().st_nlink == 3  # work, output, cache: one copy on disk
    assert tidy(dvc_project) == ["sft"]
    assert not (dvc_project / ".plumbline" / "work" / "sft").exists()


def _started(project: Path) -> int:
    """The pid of the stage that writes the status file now."""
    file = project / ".plumbline" / "status" / "sft.json"
    before = time.time()
    while time.time() < before + 60:
        if file.is_file() and float(str(read_json(file)["started"])) >= before - 0.5:
            return int(str(read_json(file)["pid"]))
        time.sleep(0.02)
    raise AssertionError("the stage did not start")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("params.yaml", "lr: 1e-3", "lr: 2e-3", "params.yaml: sft.lr was 0.001, is 0.002"),
        ("params.yaml", "seed: 0", "seed: {", "params.yaml"),
        ("code.py", "# the", "# another", "code.py is another file now"),
        ("dvc.yaml", "[seed, sft]", "[seed, sft, model]", "model.source was 'not there', is 'base'"),
    ],
)
def test_what_is_edited_while_a_stage_runs_is_not_noted_as_what_made_its_output(
    dvc_project: Path, file: str, old: str, new: str, said: str
) -> None:
    repro = [sys.executable, "-m", "dvc", "repro", "sft"]
    running = start(dvc_project, repro)
    wait_for_step(dvc_project, 1)
    path = dvc_project / file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(old, new), encoding="utf-8")
    text, _ = running.communicate(timeout=120)
    assert running.returncode != 0, text
    assert said in text
    assert not (dvc_project / "dvc.lock").exists()
    assert read_json(dvc_project / ".plumbline" / "status" / "sft.json")["kind"] == "configuration"
    path.write_text(before, encoding="utf-8")
    programs = (work(dvc_project) / "pids").read_text()
    assert subprocess.run(repro, cwd=dvc_project, env=surroundings(), check=False).returncode == 0
    assert (work(dvc_project) / "pids").read_text() == programs  # only published, nothing ran again
