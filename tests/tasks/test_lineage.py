"""Runs tell what happened: batched metrics, no point twice, orphans closed, a store that several may write
to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.lineage import client, close_parent, keep_file, record, sweep
from tasks.places import read_json
from tasks.process import gone, identity
from tasks.recorder import Ending, Entry, Recorder
from tasks.status import Status
from tests.tasks.conftest import surroundings


def entry(
    project: Path, stage: str = "sft", pipeline: str = "p1", who: str | None = None, **more: Any
) -> Entry:
    me = who or identity(os.getpid())
    work = project / ".plumbline" / "work" / stage / "f"
    return Entry(project, stage, pipeline, "f", me, me, work, "tiny", **more)


def write_steps(project: Path, steps: int, stage: str = "sft") -> None:
    work = project / ".plumbline" / "work" / stage / "f"
    work.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, steps + 1)]
    (work / "metrics.jsonl").write_text("".join(lines))


def recorded(
    project: Path, end: Ending | None = None, steps: int = 3, stage: str = "sft", **more: Any
) -> str:
    """The run of a stage; without an ending it is left open, as a kill would."""
    write_steps(project, steps, stage)
    waits = 0

    def ending(seconds: float) -> Ending | None:
        nonlocal waits
        waits += 1
        if end is None and waits > 1:
            raise EOFError
        return end

    try:
        return record(entry(project, stage, **more), ending)
    except EOFError:
        return str(read_json(project / ".plumbline" / "work" / stage / "f" / "run.json")["run_id"])


def loss_points(project: Path, run_id: str | None) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client(project).get_metric_history(run_id, "loss")]


def test_a_stage_is_a_child_of_its_pipeline(project: Path) -> None:
    one = recorded(
        project, Ending("FINISHED", outputs={"data/stages/sft/model": "d1"}), inputs={"rows": "d0"}
    )
    two = recorded(project, Ending("FAILED", "data: rows.jsonl is empty"), stage="reward", params={"lr": 1})
    tracking = client(project)
    runs = [tracking.get_run(run_id) for run_id in (one, two)]
    parents = {run.data.tags["mlflow.parentRunId"] for run in runs}
    assert len(parents) == 1
    assert [run.info.status for run in runs] == ["FINISHED", "FAILED"]
    assert runs[0].data.tags["plumbline.out.data/stages/sft/model"] == "d1"
    assert [d.dataset.digest for d in runs[0].inputs.dataset_inputs] == ["d0"]
    assert runs[1].data.params == {"lr": "1"}
    assert runs[1].data.tags["plumbline.reason"] == "data: rows.jsonl is empty"
    assert close_parent(project, "p1", {"evaluate.win_rate": 0.6}, [project / "params.yaml"]) in parents
    (parent,) = (tracking.get_run(p) for p in parents)
    assert (parent.info.status, parent.data.metrics) == ("FINISHED", {"result.evaluate.win_rate": 0.6})
    assert close_parent(project, "p1", {}, []) is None


def test_no_point_is_logged_twice_after_a_kill(project: Path) -> None:
    first = recorded(project, steps=3)
    assert len(loss_points(project, first)) == 3
    # The process died here; its successor reads the same metrics file from the start and goes on.
    second = recorded(project, Ending("FINISHED"), steps=5)
    assert second == first
    assert loss_points(project, second) == [(step, 1 / step) for step in range(1, 6)]


def test_a_run_whose_process_is_gone_is_closed(project: Path) -> None:
    host, pid, created = identity(os.getpid()).rsplit("/", 2)
    dead = f"{host}/{pid}/{float(created) - 100}"
    recorded(project, who=dead)
    recorded(project, stage="reward", pipeline="p2")
    tracking = client(project)
    found = {
        (run.data.tags["plumbline.kind"], run.data.tags["plumbline.pipeline"]): run
        for run in tracking.search_runs(["1"], "")
    }
    # The second one swept at its start: child and parent of the dead process are closed, its own are not.
    assert {key: run.info.status for key, run in found.items()} == {
        ("stage", "p1"): "KILLED",
        ("pipeline", "p1"): "KILLED",
        ("stage", "p2"): "RUNNING",
        ("pipeline", "p2"): "RUNNING",
    }
    assert sweep(project) == []
    again = recorded(project, Ending("FINISHED"))
    assert again == found["stage", "p1"].info.run_id
    assert tracking.get_run(found["pipeline", "p1"].info.run_id).info.status == "RUNNING"


def test_an_orphan_whose_stage_said_that_it_failed_is_failed(project: Path) -> None:
    host, pid, created = identity(os.getpid()).rsplit("/", 2)
    run_id = recorded(project, who=f"{host}/{pid}/{float(created) - 100}")
    Status(project, "sft").update(state="failed", kind="data", run_id=run_id)
    assert len(sweep(project)) == 2
    assert {run.info.status for run in client(project).search_runs(["1"], "")} == {"FAILED"}


@pytest.mark.slow
def test_a_store_that_fails_never_fails_the_stage(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / ".plumbline" / "mlflow.db").write_bytes(b"this is no data base" * 100)
    Recorder(entry(project)).finish(Ending("FINISHED"))
    assert "sft: lineage is incomplete" in capfd.readouterr().err


def test_files_are_kept_as_links_and_found_after_a_move(project: Path, tmp_path: Path) -> None:
    weights = project / "model" / "weights"
    weights.parent.mkdir()
    weights.write_bytes(b"w" * 10)
    run_id = recorded(project, Ending("FINISHED", files=[(project / "model", "model")]))
    tracking = client(project)
    kept = Path(keep_file(tracking, run_id, project / "model", "model"))
    assert (kept / "weights").samefile(weights)
    moved = tmp_path / "elsewhere ü"
    shutil.move(project, moved)
    uri = client(moved).get_run(run_id).info.artifact_uri
    assert (Path(uri) / "model" / "weights").is_file()
    assert str(moved) in uri


def test_gone_judges_only_processes_of_this_host() -> None:
    me = identity(os.getpid())
    host, pid, created = me.rsplit("/", 2)
    assert not gone(me)
    assert gone(f"{host}/{pid}/{float(created) - 100}")
    assert gone(f"{host}/999999999/{created}")
    assert not gone(f"other-host/999999999/{created}")
    assert not gone("")


@pytest.mark.slow
def test_eight_processes_on_an_empty_store(tmp_path: Path) -> None:
    # Forked when mlflow is loaded already, so that all eight meet at the data base and not at the import.
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mlflow import MlflowClient\n"
        "from tasks.recorder import Ending\n"
        "from tests.tasks.test_lineage import recorded\n"
        "def work(stage):\n"
        "    recorded(Path(sys.argv[1]), Ending('FINISHED'), steps=100, stage=stage)\n"
        "    os._exit(0)\n"
        "pids = [pid for n in range(8) if (pid := os.fork()) or work(f's{n}')]\n"
        "sys.exit(sum(os.waitpid(pid, 0)[1] for pid in pids))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=surroundings(), cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    runs = client(tmp_path).search_runs(["1"], "tags.`plumbline.kind` = 'stage'")
    assert len(runs) == 8
    assert all(len(loss_points(tmp_path, run.info.run_id)) == 100 for run in runs)
    assert len({run.data.tags["mlflow.parentRunId"] for run in runs}) == 1
