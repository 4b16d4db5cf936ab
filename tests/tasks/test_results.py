"""What a stopped run left from the run before it is not told as its own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tasks.places import read_json, stage_folder, write_json
from tasks.publish import dvc_digest, files_below, listing_digest
from tasks.report import build, headline, summary
from tasks.results import ORDER, current, results
from tasks.status import status_file
from tests.tasks.test_report import outputs

INPUTS = {
    "sft": ["base/model", "validate/result.json"],
    "reward": ["base/model"],
    "judge": ["base/model"],
    "optimize": ["sft/model", "reward", "judge/model"],
    "champion": ["optimize", "sft/result.json"],
    "evaluate": ["champion", "judge", "optimize"],
    "promote": ["optimize", "evaluate/result.json"],
    "register": ["promote/decision.json", "optimize"],
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A finished run with the dvc.lock and the cache listings that DVC leaves of it."""
    outputs(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    for stage in ("base", "sft", "judge"):
        model = stage_folder(tmp_path, stage) / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "model.safetensors").write_text(stage)
        (model / "config.json").write_text("{}")
    for stage in ("base", "sft"):
        write_json(stage_folder(tmp_path, stage) / "result.json", {"status": "made"})
    write_json(stage_folder(tmp_path, "champion") / "champion.json", {"digest": "b", "source": "sft"})
    lock(tmp_path, ORDER)
    return tmp_path


def lock(project: Path, stages: tuple[str, ...]) -> None:
    """Note these stages' inputs and outputs as they are now."""
    file = project / "dvc.lock"
    tree = YAML(typ="safe").load(file.read_text()) if file.is_file() else {"schema": "2.0", "stages": {}}
    for stage in stages:
        folder = stage_folder(project, stage)
        md5 = dvc_digest(folder, files_below(folder))
        listing = project / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
        listing.parent.mkdir(parents=True, exist_ok=True)
        entries = [{"md5": dvc_digest_of(folder / name), "relpath": name} for name in files_below(folder)]
        assert listing_digest(entries) == md5
        listing.write_text(json.dumps(entries))
        deps = [
            {"path": f"data/stages/{name}", "md5": digest_at(project, name)} for name in INPUTS.get(stage, ())
        ]
        deps.append({"path": f"tasks/{stage}.py", "md5": "of code"})
        outs = [{"path": f"data/stages/{stage}", "md5": md5}]
        tree["stages"][stage] = {"cmd": f"python -m tasks.{stage}", "deps": deps, "outs": outs}
    with file.open("w") as stream:
        YAML(typ="safe").dump(tree, stream)


def dvc_digest_of(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()


def digest_at(project: Path, name: str) -> str:
    path = project / "data" / "stages" / name
    return dvc_digest_of(path) if path.is_file() else dvc_digest(path, files_below(path))


def began(project: Path, stage: str, state: str = "running") -> None:
    """A stage as DVC starts it: the old output is gone, the status says that it runs."""
    shutil.rmtree(stage_folder(project, stage))
    write_json(status_file(project, stage), {"state": state, "stage": stage})


def test_all_stages_of_a_finished_run_are_current(project: Path) -> None:
    assert current(project) == set(ORDER)
    assert headline(project) == ["Promoted: all gates passed"]


@pytest.mark.parametrize("state", ["running", "failed"])
def test_below_a_stage_that_was_stopped_nothing_is_told(project: Path, state: str) -> None:
    began(project, "optimize", state)
    assert current(project) == {"base", "validate", "sft", "reward", "judge"}
    found = {row.label: row for row in summary(project, version="policy 3")}
    assert found["reward model accuracy"].value == "0.700 [0.600, 0.800]"
    assert found["win rate"].value == "-"
    assert found["decision"].value == "none"
    assert found["decision"].detail.endswith("to come: optimize, champion, evaluate, promote, register")
    assert found["registered version"].value == "none"
    assert not [label for label in found if label.startswith("gate")]
    assert headline(project)[0].startswith("No decision yet: ")
    page = build(project).read_text(encoding="utf-8")
    assert "&lt;script&gt;" not in page  # the sample answers are the former run's
    assert "Win rate by slice" not in page


def test_a_stage_that_ended_with_something_else_makes_those_below_it_old(project: Path) -> None:
    """Stopped between two stages: nothing is missing, the digests alone tell."""
    (stage_folder(project, "sft") / "model" / "model.safetensors").write_text("trained anew")
    lock(project, ("sft",))
    assert current(project) == {"base", "validate", "sft", "reward", "judge"}


def test_a_part_that_is_the_same_leaves_those_that_read_it_current(project: Path) -> None:
    result = stage_folder(project, "judge") / "result.json"
    write_json(result, {**read_json(result), "seconds": 4})
    lock(project, ("judge",))
    assert current(project) == set(ORDER) - {"evaluate", "promote", "register"}


def test_outputs_that_were_never_fetched_make_no_other_old(project: Path) -> None:
    shutil.rmtree(stage_folder(project, "sft"))
    assert current(project) == set(ORDER) - {"sft"}


def test_register_is_believed_about_the_candidate_that_was_decided_about(project: Path) -> None:
    """It writes the report before DVC has noted its output."""
    file = stage_folder(project, "promote") / "decision.json"
    write_json(file, {**read_json(file), "note": "other bytes"})
    lock(project, ("promote",))
    assert results(project)["register"]["alias"] == "champion"
    write_json(file, {**read_json(file), "candidate": "another"})
    lock(project, ("promote",))
    assert results(project)["register"] == {}
    assert headline(project)[0].startswith("No decision yet: ")


def test_a_damaged_lock_hides_no_result(project: Path) -> None:
    (project / "dvc.lock").write_text("stages: [")
    assert current(project) == set(ORDER)
