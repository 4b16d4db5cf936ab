"""What is to do, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flows.changes import NEVER, changes, outer_reason
from flows.dag import Dag, read_dag
from tasks.places import stage_folder, write_json

ROOT = Path(__file__).parents[2]


def test_a_stage_that_never_ran_says_just_that(fake_project: Path) -> None:
    dag = read_dag(fake_project)
    assert changes(fake_project, dag) == {step.name: [NEVER] for step in dag}


def test_outer_steps_that_never_ran_say_so_too(fake_project: Path) -> None:
    dag = Dag({step.name: replace(step, always=True) for step in read_dag(fake_project)})
    assert any(step.always for step in read_dag(ROOT))
    assert changes(fake_project, dag) == {step.name: [NEVER] for step in dag}


def test_a_champion_that_stands_as_published_is_up_to_date_before_register_has_run(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("{}\n")
    for stage, digest in (("sft", "5f7"), ("optimize", "0b7")):
        write_json(stage_folder(tmp_path, stage) / "result.json", {"digest": digest})
    published = stage_folder(tmp_path, "champion") / "champion.json"
    write_json(published, {"digest": "5f7", "source": "sft"})
    assert (outer_reason(tmp_path, "champion"), outer_reason(tmp_path, "register")) == ("", NEVER)
    write_json(published, {"digest": "another", "source": "registry"})
    assert outer_reason(tmp_path, "champion") == "the world outside has changed"
