"""dvc.yaml says the truth: code that can change a result is a dependency, inputs are outputs of stages
above.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks.params import Params
from tasks.stage import read_dag
from tests.conftest import ROOT

OBSERVERS = {
    *(
        f"tasks/{name}.py"
        for name in ("lineage", "registry", "status", "follow", "facts", "store", "process")
    ),
    *(f"tasks/{name}.py" for name in ("places", "publish", "params", "report", "plots", "history")),
    "tasks/recorder.py",
    "tasks/results.py",
    "data/errors.py",
    "training/lifeline.py",
    "training/launch.py",
}
"""What observes, names or moves results but can not change one."""

OUTER = ("sources", "champion", "register")
PROGRAMS = {
    "sft": ["training/sft.py"],
    "reward": ["training/reward.py", "training/process.py"],
    "judge": ["training/reward.py"],
    "optimize": ["training/rl.py", "training/preference.py"],
    "evaluate": ["training/compare.py"],
}
STAGES = list(read_dag(ROOT))


def imported(file: Path) -> Iterator[str]:
    """Paths of the project's modules that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            path = name.replace(".", "/") + ".py"
            if name.split(".")[0] in ("data", "training", "tasks") and (ROOT / path).is_file():
                yield path


def closure(files: list[str]) -> set[str]:
    """The files and all that they import, observers left out."""
    found: set[str] = set()
    front = list(files)
    while front:
        file = front.pop()
        if file not in found and file not in OBSERVERS:
            found.add(file)
            front += imported(ROOT / file)
    return found


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in OUTER])
def test_code_dependencies_are_what_the_stage_imports(stage: str) -> None:
    code = set(read_dag(ROOT)[stage].code)
    assert code == closure([f"tasks/{stage}.py", *PROGRAMS.get(stage, [])])


def test_every_dependency_exists_or_is_written_by_a_stage_above() -> None:
    before: set[str] = set()
    for name, row in read_dag(ROOT).items():
        assert all((ROOT / path).is_file() for path in row.code), name
        assert {path.split("/")[2] for path in row.inputs} <= before, name
        before.add(name)


def test_parameters_are_sections_that_exist() -> None:
    known = Params().model_dump()
    for name, row in read_dag(ROOT).items():
        for key in row.params:
            value: object = known
            for part in key.split("."):
                assert isinstance(value, dict) and part in value, f"{name}: {key}"
                value = value[part]


def test_only_the_outer_steps_run_always_and_each_output_is_a_folder_of_its_own() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert {name for name, entry in stages.items() if entry.get("always_changed")} == set(OUTER)
    assert [entry["outs"] for entry in stages.values()] == [[f"data/stages/{name}"] for name in stages]


def test_what_a_stage_reads_is_declared() -> None:
    """The paths that a stage's module asks for are below its dependencies."""
    for name, row in read_dag(ROOT).items():
        tree = ast.parse((ROOT / "tasks" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("output_of", "result_of") or not node.args:
                continue
            first = node.args[0]
            if isinstance(first, ast.Constant):
                assert any(path.split("/")[2] == first.value for path in row.inputs), f"{name}: {first.value}"
