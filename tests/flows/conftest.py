"""Projects for the flow's tests, in folders with spaces and accents in their names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import yaml

from flows import dvc
from tests.conftest import ROOT

FOLDER = "ein Projekt é è"
PARAMS = "seed: {seed}\npipeline: {{retries: 1, grace_seconds: 20}}\n"
CALLS_OUTSIDE = Path(tempfile.gettempdir()) / f"calls-outside-{os.getpid()}.txt"
"""Tries to leave this machine, by any process that a test's command starts (loopback/sitecustomize.py)."""
QUIET = {"core.analytics": "false", "core.check_update": "false"}


def plan(project: Path, **stages: Mapping[str, object]) -> None:
    """What the pretended stages do."""
    (project / "plan.json").write_text(json.dumps(stages))


def make_fake(project: Path) -> Path:
    """A git and DVC workspace with pretended stages: a, then b and c side by side, then d."""
    project.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("fake.py"), project / "fake.py")
    (project / "params.yaml").write_text(PARAMS.format(seed=0))
    edges: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    stages = {
        name: {
            "cmd": f"python fake.py {name}",
            "deps": ["fake.py", *(f"data/stages/{other}" for other in above)],
            "params": ["seed"],
            "outs": [f"data/stages/{name}"],
        }
        for name, above in edges.items()
    }
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    plan(project)
    around = dvc.environment(project)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run(dvc.command("init", "-q"), cwd=project, check=True, env=around)
    for key, value in QUIET.items():
        subprocess.run(dvc.command("config", key, value), cwd=project, check=True, env=around)
    return project


def again(project: Path, seed: int) -> None:
    """All stages have something to do once more, and none has tried yet."""
    (project / "params.yaml").write_text(PARAMS.format(seed=seed))
    for file in project.glob("tries-*"):
        file.unlink()
    (project / "log.txt").unlink(missing_ok=True)


def ran(project: Path) -> list[str]:
    """What the pretended stages wrote to their common log, without times."""
    file = project / "log.txt"
    return [" ".join(line.split()[:2]) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def fake_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretended stages, and we are in their folder."""
    project = make_fake(tmp_path / FOLDER)
    monkeypatch.chdir(project)
    monkeypatch.delenv("PLUMBLINE_HOME", raising=False)
    return project


def copy_project(target: Path) -> Path:
    """The working tree as git knows it (what is untracked but not ignored included), as a repository of its
    own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.decode("utf-8").split("\0"):
        source = ROOT / name
        if name and source.is_file() and not name.startswith("tests/"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)
    (target / "dvc.lock").unlink(missing_ok=True)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)
    subprocess.run(["git", "add", "-A"], cwd=target, check=True)
    subprocess.run(["git", *identity, "commit", "-q", "-m", "start"], cwd=target, check=True)
    return target


def environment() -> dict[str, str]:
    """Surroundings of a command in a copied project: its packages, not this checkout's."""
    known = {
        k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "PLUMBLINE_", "MLFLOW_TRACKING"))
    }
    return {
        **known, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).with_name("loopback")),
        "CALLS_OUTSIDE": str(CALLS_OUTSIDE),
    }  # fmt: skip


def command(project: Path, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """`plumbline` of the copied project, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments], cwd=project, env=environment(), text=True,
        encoding="utf-8", stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip


def started(project: Path, *arguments: str) -> subprocess.Popen[str]:
    """`plumbline` of the copied project, running; its output goes to run.log."""
    with (project / "run.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments], cwd=project, env=environment(), text=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def calls_outside() -> list[str]:
    """Tries of commands in copied projects to reach anything but loopback; all were refused."""
    return CALLS_OUTSIDE.read_text(encoding="utf-8").splitlines() if CALLS_OUTSIDE.exists() else []


def processes_of(project: Path) -> list[psutil.Process]:
    """All living processes whose working directory is in a project."""
    found = []
    for process in psutil.process_iter():
        try:
            inside = Path(process.cwd()).is_relative_to(project)
            if inside and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a failed test left in its folder is ended, so that it can not disturb the next."""
    yield
    for process in processes_of(tmp_path):
        process.kill()
