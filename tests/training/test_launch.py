"""What a launch leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_launch_leaves_no_folder_in_the_system_temp_nor_its_own_in_the_work_folder(tmp_path: Path) -> None:
    work, temp = tmp_path / "work", tmp_path / "temp"
    work.mkdir(), temp.mkdir()
    command = [sys.executable, "-m", "training.launch", "--processes", "2", "-m", "training.sft", str(work)]
    environment = {**os.environ, "TMPDIR": str(temp), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 10, done.stderr[-2000:]
    assert json.loads((work / "error.json").read_text())["kind"] == "configuration"
    assert sorted(path.name for path in work.iterdir()) == ["error.json"]
    assert list(temp.iterdir()) == []
