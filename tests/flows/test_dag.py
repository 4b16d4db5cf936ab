"""The DAG is read as DVC reads it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from data.errors import ConfigurationError
from flows import dvc
from flows.dag import read_dag
from tasks import process
from tests.conftest import ROOT

TEMPLATED = """
vars:
  - out: data/stages
  - more.yaml:sizes
stages:
  base: {cmd: "python x.py ${model.source}", params: [model], outs: ["${out}/base"]}
  train:
    foreach: [1, 2]
    do:
      cmd: python t.py ${item}
      deps: ["${out}/base/model"]
      outs: ["${out}/train-${item}"]
  grid:
    matrix: {size: "${sizes}", kind: [x]}
    cmd: python g.py ${item.size} ${item.kind}
    deps: ["${out}/train-1"]
    params: [{more.yaml: [sizes]}, seed]
    outs: ["${out}/grid-${item.size}"]
  join: {cmd: j, deps: ["${out}/grid-5", "${out}/train-2"], outs: ["${out}/join"], always_changed: true}
"""


def project_of(folder: Path, text: str) -> Path:
    (folder / "dvc.yaml").write_text(text, encoding="utf-8")
    (folder / "params.yaml").write_text("model: {source: 'é'}\nseed: 0\n", encoding="utf-8")
    (folder / "more.yaml").write_text("sizes: [5, 7]\n", encoding="utf-8")
    return folder


def test_templating_foreach_and_matrix(tmp_path: Path) -> None:
    dag = read_dag(project_of(tmp_path, TEMPLATED))
    assert list(dag.steps) == ["base", "train@1", "train@2", "grid@5-x", "grid@7-x", "join"]
    assert dag.steps["base"].command == "python x.py é"
    assert dag.steps["grid@7-x"].command == "python g.py 7 x"
    assert dag.steps["grid@7-x"].params == ("more.yaml:sizes", "seed")
    assert dag.steps["train@2"].above == ("base",)
    assert dag.steps["join"].above == ("train@2", "grid@5-x")
    assert dag.steps["join"].always
    assert not dag.steps["base"].always
    assert dag.below("train@1") == ["grid@5-x", "grid@7-x", "join"]
    assert dag.below("join") == []


@pytest.mark.parametrize("other", ["out/a", "out/a/part", "out"])
def test_two_stages_that_write_one_place_are_refused(tmp_path: Path, other: str) -> None:
    text = f"stages:\n  a: {{cmd: a, outs: [out/a]}}\n  b: {{cmd: b, metrics: [{other}]}}\n"
    with pytest.raises(
        ConfigurationError, match=f"stages a and b write the same place .outs: out/a and {other}"
    ):
        read_dag(project_of(tmp_path, text))


def test_names_that_only_share_a_beginning_are_no_edge(tmp_path: Path) -> None:
    text = "stages:\n  a: {cmd: a, outs: [out/a]}\n  b: {cmd: b, deps: [out/ab, out], outs: [b]}\n"
    dag = read_dag(project_of(tmp_path, text))
    assert dag.steps["b"].above == ("a",)  # by `out`, the folder around it
    text = "stages:\n  a: {cmd: a, outs: [out/a]}\n  b: {cmd: b, deps: [out/ab], outs: [b]}\n"
    assert read_dag(project_of(tmp_path, text)).steps["b"].above == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "stages:\n  a: {cmd: a, deps: [y], outs: [x]}\n  b: {cmd: b, deps: [x], outs: [y]}\n",
            "a, b wait for each",
        ),
        ("stages:\n  a: {cmd: 'a ${sft.lrr}'}\n", r"\$\{sft.lrr\} names nothing"),
        ("stages: {}\n", "there are no stages"),
        ("stages: [\n", "not valid YAML"),
    ],
)
def test_faults_are_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_dag(project_of(tmp_path, text))


@pytest.mark.slow
def test_edges_are_those_of_dvc(tmp_path: Path) -> None:
    """The project's own DAG, against `dvc dag`."""
    done = subprocess.run(
        dvc.command("dag", "--dot"), cwd=ROOT, capture_output=True, text=True, check=True,
        env=dvc.environment(tmp_path),
    )  # fmt: skip
    theirs = set(re.findall(r'"?([\w@-]+)"? -> "?([\w@-]+)"?', done.stdout))
    ours = {(above, step.name) for step in read_dag(ROOT) for above in step.above}
    assert ours == theirs
    assert {"base", "validate", "sft", "reward", "judge", "optimize", "evaluate", "promote"} <= set(
        read_dag(ROOT).steps
    )


def test_what_has_the_machine_for_itself_may_spin_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that looks for work instead of sleeping takes the core of a stage beside it."""
    dag = read_dag(ROOT)
    launched = {"sft", "reward", "judge", "optimize", "evaluate"}
    for name in launched:
        beside = [
            other
            for other in launched - {name}
            if other not in dag.below(name) and name not in dag.below(other)
        ]
        assert (name in process.ALONE) == (not beside), (name, beside)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert process.spin_of("optimize", 2) == process.SPIN
    assert process.spin_of("optimize", 3) == process.spin_of("sft", 1) == 0
    assert process.environment(2, True, 7)["GOMP_SPINCOUNT"] == "7"
    assert process.environment(2, True)["GOMP_SPINCOUNT"] == "0"
