"""The shipped profiles, parameters and CI files hold together."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flows.dag import read_dag
from tasks.overrides import read_profile
from tasks.params import parse, read_raw
from tests.conftest import ROOT

PROFILES = sorted(
    str(file) for file in (*(ROOT / "profiles").glob("*.yaml"), Path(__file__).with_name("tiny.yaml"))
)


@pytest.mark.parametrize("name", PROFILES)
def test_each_profile_is_valid(name: str) -> None:
    assert parse(read_profile(ROOT, name), name).registry.name


def test_the_expected_profiles_are_there() -> None:
    assert {Path(name).name for name in PROFILES} >= {
        "default-cpu.yaml",
        "hh.yaml",
        "gpu-8.yaml",
        "multi-node.yaml",
    }


def test_default_cpu_is_what_is_shipped() -> None:
    assert read_raw(ROOT / "profiles" / "default-cpu.yaml") == read_raw(ROOT / "params.yaml")


@pytest.mark.parametrize("name", [None, *PROFILES])
def test_every_parameter_that_a_stage_depends_on_is_written_out(name: str | None) -> None:
    """DVC refuses a stage whose keys are missing from params.yaml, defaults or not."""
    raw = read_raw(ROOT / "params.yaml") if name is None else read_profile(ROOT, name)
    for step in read_dag(ROOT):
        for key in step.params:
            value: object = raw
            for part in key.split("."):
                assert isinstance(value, dict), f"{step.name}: {key}"
                assert part in value, f"{step.name}: {key}"
                value = value[part]


@pytest.mark.parametrize("file", ["github-actions.yml", "gitlab-ci.yml"])
def test_ci_pulls_runs_pushes_and_reports(file: str) -> None:
    text = (ROOT / "infra" / "ci" / file).read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    positions = [text.index(word) for word in ("dvc pull", "dvc repro", "dvc push", "report.md")]
    assert positions == sorted(positions) or file == "gitlab-ci.yml"
    assert "pr create" in text or "merge_requests" in text


def test_deployments_name_the_flow() -> None:
    tree = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
    for deployment in tree["deployments"]:
        path, _, name = deployment["entrypoint"].partition(":")
        assert (ROOT / path).is_file()
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
        assert deployment["concurrency_limit"]["limit"] == 1
    assert Path(tree["pull"][0]["prefect.deployments.steps.set_working_directory"]["directory"]) == Path()
