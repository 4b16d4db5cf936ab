"""The stage program: reads params.yaml, publishes all or nothing, leaves with the code of its failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.errors import EXIT_CODES
from data.pipeline import OUTPUTS
from tests.conftest import ROOT
from tests.data.samples import pair, pairs, write_jsonl

pytestmark = pytest.mark.slow

DAG = """
stages:
  validate:
    cmd: python -m tasks.validate
    deps: [rows.jsonl]
    params: [data, seed]
    outs: [data/stages/validate]
"""


def _project(folder: Path, params: str) -> Path:
    (folder / "dvc.yaml").write_text(DAG, encoding="utf-8")
    (folder / "params.yaml").write_text(params, encoding="utf-8")
    return folder


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    surroundings.pop("PLUMBLINE_HOME", None)
    command = [sys.executable, "-m", "tasks.validate"]
    return subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False)


def test_the_program_publishes_its_files_and_docs(tmp_path: Path) -> None:
    folder = tmp_path / "my projét"
    folder.mkdir()
    write_jsonl(folder / "rows.jsonl", [*pairs(40), pair(rejected=True)])
    _project(folder, "seed: 1\ndata: {files: [rows.jsonl], eval_prompts: [], min_pairs: 40}\n")
    done = _run(folder)
    assert done.returncode == 0, done.stderr
    published = folder / "data" / "stages" / "validate"
    assert sorted(path.name for path in published.iterdir()) == sorted([*OUTPUTS, "result.json"])
    result = json.loads((published / "result.json").read_text("utf-8"))
    assert (result["rows_kept"], result["reasons"]) == (40, {"not_text": 1})
    assert (folder / ".plumbline" / "docs" / "data" / "index.html").is_file()
    status = json.loads((folder / ".plumbline" / "status" / "validate.json").read_text("utf-8"))
    assert status["state"] == "done"


def test_refused_data_leave_no_output_and_exit_as_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", pairs(5))
    _project(tmp_path, "seed: 1\ndata: {files: [rows.jsonl], eval_prompts: [], min_pairs: 6}\n")
    done = _run(tmp_path)
    assert done.returncode == EXIT_CODES["data"], done.stderr
    assert "5 preference pairs were kept, the floor is 6" in done.stderr
    assert not (tmp_path / "data" / "stages" / "validate").exists()
    status = json.loads((tmp_path / ".plumbline" / "status" / "validate.json").read_text("utf-8"))
    assert (status["state"], status["kind"]) == ("failed", "data")
