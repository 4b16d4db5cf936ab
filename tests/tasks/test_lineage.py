"""Runs tell what happened: batched metrics, no point twice, orphans closed, a store that several may write
to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.lineage import Ending, Entry, Recorder, client, close_parent, keep_file, sweep
from tasks.process import gone, identity
from tests.tasks.conftest import surroundings


def entry(project: Path, stage: str = "sft", pipeline: str = "p1", **more: Any) -> Entry:
    return Entry(
        project=project, stage=stage, pipeline=pipeline, fingerprint="f", owner=identity(os.getpid()),
        work=project / ".plumbline" / "work" / stage / "f", registry_name="tiny", **more,
    )  # fmt: skip


def record(project: Path, ending: Ending | None = None, steps: int = 3, **more: Any) -> Recorder:
    recorder = Recorder(entry(project, **more))
    for step in range(1, steps + 1):
        recorder.metrics(step, {"loss": 1 / step})
    if ending is not None:
        recorder.finish(ending)
        assert recorder.error is None
    return recorder


def loss_points(project: Path, run_id: str | None) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client(project).get_metric_history(run_id, "loss")]


def test_a_stage_is_a_child_of_its_pipeline(project: Path) -> None:
    one = record(project, Ending("FINISHED", outputs={"data/stages/sft/model": "d1"}), inputs={"rows": "d0"})
    two = record(project, Ending("FAILED", "data: rows.jsonl is empty"), stage="reward", params={"lr": 1})
    tracking = client(project)
    runs = [tracking.get_run(r.run_id) for r in (one, two)]
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
    first = record(project, steps=3)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (
        first.run_id is None or len(loss_points(project, first.run_id)) < 3
    ):
        time.sleep(0.1)
    # The process "dies" here; its successor reads the same metrics file from the start and goes on.
    second = record(project, Ending("FINISHED"), steps=5)
    assert second.run_id == first.run_id
    assert loss_points(project, second.run_id) == [(step, 1 / step) for step in range(1, 6)]


def test_a_run_whose_process_is_gone_is_closed(project: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.tasks.test_lineage import record\n"
        "recorder = record(Path(sys.argv[1]))\n"
        "while recorder.run_id is None: time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(project)], env=surroundings(), check=False, cwd=project)
    mine = record(project, stage="reward", pipeline="p2")
    while mine.run_id is None:
        time.sleep(0.05)
    tracking = client(project)
    found = {
        (run.data.tags["plumbline.kind"], run.data.tags["plumbline.pipeline"]): run
        for run in tracking.search_runs(["1"], "")
    }
    # Starting the second recorder swept: child and parent of the dead process are closed, mine are not.
    assert {key: run.info.status for key, run in found.items()} == {
        ("stage", "p1"): "KILLED",
        ("pipeline", "p1"): "KILLED",
        ("stage", "p2"): "RUNNING",
        ("pipeline", "p2"): "RUNNING",
    }
    assert sweep(project) == []
    mine.finish(Ending("FINISHED"))
    again = record(project, Ending("FINISHED"))
    assert again.run_id == found["stage", "p1"].info.run_id
    assert tracking.get_run(found["pipeline", "p1"].info.run_id).info.status == "RUNNING"


def test_a_store_that_fails_never_fails_the_stage(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = project / ".plumbline" / "mlflow.db"
    database.write_bytes(b"this is no data base" * 100)
    recorder = record(project)
    recorder.finish(Ending("FINISHED"))
    assert recorder.error is not None
    assert "sft: lineage is incomplete" in capsys.readouterr().err


def test_files_are_kept_as_links_and_found_after_a_move(project: Path, tmp_path: Path) -> None:
    weights = project / "model" / "weights"
    weights.parent.mkdir()
    weights.write_bytes(b"w" * 10)
    recorder = record(project, Ending("FINISHED", files=[(project / "model", "model")]))
    tracking = client(project)
    kept = Path(keep_file(tracking, str(recorder.run_id), project / "model", "model"))
    assert (kept / "weights").samefile(weights)
    moved = tmp_path / "elsewhere ü"
    shutil.move(project, moved)
    uri = client(moved).get_run(recorder.run_id).info.artifact_uri
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
        "from tasks.lineage import Ending\n"
        "from tests.tasks.test_lineage import record\n"
        "def work(stage):\n"
        "    record(Path(sys.argv[1]), Ending('FINISHED'), steps=100, stage=stage)\n"
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
