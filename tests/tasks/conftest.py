"""A small project of its own in a folder with spaces and accents, and a tracking store that is set up
once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.lineage import client
from tests.conftest import ROOT

PARAMS = """\
# comments survive
seed: 0  # of everything
model: {source: base, dtype: float32}
data: {files: [rows.jsonl]}
sft:
  lr: 1e-3  # peak
reward: {model: minilm}
judge: {model: minilm}
optimize: {steps: 3}
evaluate: {prompts: 5}
promote: {min_prompts: 2}
registry: {name: tiny}
pipeline: {grace_seconds: 5}
"""

DAG = """\
stages:
  sft:
    cmd: '"{python}" -m tests.tasks.fake_stage'
    deps: [code.py]
    params: [seed, sft]
    outs: [data/stages/sft]
"""


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a project that holds a store without runs."""
    project = tmp_path_factory.mktemp("store")
    client(project)
    return project


@pytest.fixture
def project(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one stage, its store moved here from elsewhere."""
    folder = tmp_path / "my project é"
    folder.mkdir()
    shutil.copytree(empty_store / ".plumbline", folder / ".plumbline")
    (folder / "params.yaml").write_text(PARAMS, encoding="utf-8")
    (folder / "dvc.yaml").write_text(DAG.format(python=sys.executable), encoding="utf-8")
    (folder / "code.py").write_text("# the stage's code\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PLUMBLINE_HOME", raising=False)
    monkeypatch.delenv("PLUMBLINE_WATCH", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


@pytest.fixture
def dvc_project(project: Path) -> Path:
    """The same as a repository of Git and DVC."""
    for command in (
        ["git", "init", "-q", "."],
        [sys.executable, "-m", "dvc", "init", "-q"],
        [sys.executable, "-m", "dvc", "config", "cache.type", "hardlink,copy"],
    ):
        subprocess.run(command, cwd=project, check=True)
    return project


def surroundings(**extra: str) -> dict[str, str]:
    """The environment of a stage that is started by a test."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **extra}
