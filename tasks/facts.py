"""The circumstances of a run that are no parameters: commit, versions, hardware. They go to lineage, never
to an output.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from tasks.places import file_digest

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "deepspeed",
    "datasets",
    "numpy",
    "mlflow",
    "dvc",
    "prefect",
)


def gather(project: Path) -> dict[str, str]:
    """Tags for a run: git commit and whether it was changed, digest of dvc.lock, versions, hardware."""
    lock = project / "dvc.lock"
    commit = _git(project, "rev-parse", "HEAD")
    return {
        "mlflow.source.git.commit": commit or "none",
        "plumbline.git_changed": str(bool(_git(project, "status", "--porcelain", "-uno"))).lower(),
        "plumbline.dvc_lock": file_digest(lock) if lock.is_file() else "none",
        "plumbline.versions": json.dumps(versions(), sort_keys=True),
        "plumbline.hardware": json.dumps(hardware(), sort_keys=True),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


@functools.cache
def hardware() -> dict[str, str]:
    """CPU model, cores, memory and accelerators of this machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": str(os.cpu_count() or 1),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.0f}",
        "accelerators": _accelerators(),
        "system": platform.platform(),
    }


def _accelerators() -> str:
    for tool, arguments in (
        ("nvidia-smi", ["-L"]),
        ("rocm-smi", ["--showproductname"]),
        ("npu-smi", ["info", "-l"]),
    ):
        if shutil.which(tool):
            done = _run([tool, *arguments])
            if done:
                return done[:1000]
    return "none"


def _git(project: Path, *arguments: str) -> str:
    return _run(["git", "-C", str(project), *arguments])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
