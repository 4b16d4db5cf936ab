"""What the doctor finds."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from data.config import DataParams
from data.errors import ConfigurationError
from flows import doctor, inputs
from flows.finding import Finding
from flows.inputs import files
from flows.run import Request, run
from tasks.params import load
from tests.conftest import ROOT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project's parameters and DAG, with a model folder and one file of records."""
    for name in ("dvc.yaml", "params.yaml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "data" / "sample").mkdir(parents=True)
    for name in ("preferences.jsonl", "eval_prompts.jsonl"):
        (tmp_path / "data" / "sample" / name).write_text("{}\n")
    return tmp_path


def found(project: Path) -> dict[str, Finding]:
    return {one.what: one for one in doctor.look(project)}


def test_a_missing_dependency_a_missing_file_and_an_empty_one(project: Path) -> None:
    (project / "data" / "sample" / "eval_prompts.jsonl").write_text("")
    (project / "data" / "sample" / "preferences.jsonl").unlink()
    seen = found(project)
    assert seen["dvc.yaml"].verdict == "broken"  # the code is not in this folder
    assert "tasks/base.py" in seen["dvc.yaml"].seen
    assert (seen["data.files"].verdict, seen["data.files"].kind) == ("broken", "data")
    assert "empty" in seen["data.eval_prompts"].remedy
    assert seen["DVC"].verdict == "broken"


def test_a_folder_without_git_is_told_before_anything_starts(project: Path) -> None:
    shutil.copytree(ROOT / ".dvc", project / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
    said = found(project)["git"]
    assert (said.verdict, said.kind) == ("broken", "configuration")
    assert "`git init`" in said.remedy
    with pytest.raises(ConfigurationError, match="no git repository"):
        run(project, Request(here=project), Console())
    assert not (project / ".plumbline" / "prefect").exists()
    (project / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n")
    assert "git" not in found(project)
    (project / ".dvc" / "config.local").unlink()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    assert "git" not in found(project)


def test_a_wrong_parameter_ends_the_examination(project: Path) -> None:
    (project / "params.yaml").write_text("seed: -1\n")
    findings = list(doctor.look(project))
    assert findings[-1].what == "parameters"
    assert findings[-1].verdict == "broken"
    assert "seed = -1" in findings[-1].seen


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("optimize: {ppo: {lam: 0.5}}", "optimize.ppo.lam (only ppo has a critic)"),
        ("optimize: {algorithm: dpo, group: 1, rewards: {penalty: 0.1}}", "optimize.rewards"),
        ("optimize: {kl: {horizon: 5}}", "optimize.kl.horizon"),
    ],
)
def test_dead_settings(project: Path, text: str, dead: str) -> None:
    (project / "params.yaml").write_text(text + "\n")
    assert dead in found(project)["dead settings"].seen


def test_no_dead_setting_in_what_is_shipped(project: Path) -> None:
    assert "dead settings" not in found(project)


def test_models(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(project / "cache"))
    (project / "params.yaml").write_text("model: {source: owner/name}\n")
    seen = found(project)["model.source"]
    assert (seen.verdict, "not in the cache" in seen.seen) == ("broken", True)
    (project / "cache" / "hub" / "models--owner--name").mkdir(parents=True)
    assert found(project)["model.source"].verdict == "fine"
    (project / "params.yaml").write_text("model: {source: gguf:no_such_package}\n")
    assert "not installed" in found(project)["model.source"].seen
    (project / "models").mkdir()
    (project / "params.yaml").write_text("model: {source: models/tiny}\nreward: {model: models/encoder}\n")
    assert found(project)["model.source"].seen == "models/tiny: no such file or folder"
    assert found(project)["reward.model"].verdict == "broken"
    (project / "models" / "tiny").mkdir()
    assert "without config.json" in found(project)["model.source"].seen


def test_another_temperature_than_the_trained_one_is_worth_a_look(project: Path) -> None:
    (project / "params.yaml").write_text("optimize: {temperature: 0.7}\n")
    assert found(project)["temperature"].verdict == "look"
    (project / "params.yaml").write_text("optimize: {temperature: 0.7}\nevaluate: {temperature: 0.7}\n")
    assert "temperature" not in found(project)


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("owner/pairs-3.1-mix", True),
        ("owner/rows.jsonl.gz", False),
        ("data/nosuch", False),
        ("nosuch", False),
    ],
)
def test_what_may_be_a_data_set_of_the_hub(
    project: Path, name: str, hub: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(project / "cache"))
    (project / "data").mkdir(exist_ok=True)
    (seen,) = [one for one in files(project, DataParams(files=(name,))) if one.what == "data.files"]
    assert (seen.verdict, "as a hub id" in seen.seen) == ("broken", hub)


@pytest.mark.parametrize(
    ("text", "what", "says"),
    [
        ("sft: {max_length: 65}", "sft length", "max_length = 65 tokens, the model has 64 positions"),
        (
            "optimize: {max_prompt: 40, max_new_tokens: 25}",
            "optimize length",
            "max_prompt + max_new_tokens = 65 tokens",
        ),
        ("evaluate: {max_prompt: 40, max_new_tokens: 25}", "evaluate length", "has 64 positions"),
        ("reward: {max_length: 513}", "reward length", "has 512 positions"),
        ("reward: {model: models/encoder, max_length: 31}", "reward length", "has 30 positions"),
        ("judge: {model: policy, max_length: 65}", "judge length", "has 64 positions"),
    ],
)
def test_lengths_that_a_model_has_no_positions_for(project: Path, text: str, what: str, says: str) -> None:
    own = project / "models" / "tiny"
    own.mkdir(parents=True)
    (own / "config.json").write_text('{"model_type": "gpt2", "n_positions": 64}')
    (own / "model.safetensors").write_text("")
    encoder = project / "models" / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(
        '{"model_type": "roberta", "max_position_embeddings": 32, "pad_token_id": 1}'
    )
    (encoder / "model.safetensors").write_text("")
    short: dict[str, dict[str, Any]] = {
        "model": {"source": "models/tiny"},
        "sft": {"max_length": 64, "max_prompt": 32},
        "reward": {"max_length": 64},
        "judge": {"max_length": 64},
        "optimize": {"max_prompt": 32, "max_new_tokens": 32},
        "evaluate": {"max_prompt": 32, "max_new_tokens": 32},
    }
    (project / "params.yaml").write_text(yaml.safe_dump(short))
    assert not [name for name in found(project) if name.endswith(" length")]
    for name, values in yaml.safe_load(text).items():
        short[name].update(values)
    (project / "params.yaml").write_text(yaml.safe_dump(short))
    findings = {name: one for name, one in found(project).items() if name.endswith(" length")}
    assert list(findings) == [what]
    assert (findings[what].verdict, findings[what].kind) == ("broken", "configuration")
    assert says in findings[what].seen and "lower it" in findings[what].remedy
    with pytest.raises(ConfigurationError, match=re.escape(f"{what}: ")):
        inputs.require(project, load(project))
