from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from data.errors import ConfigurationError, DataError, DivergenceError
from tests.training.tiny import workdir
from training import rundir
from training.config import SftParams
from training.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.open(workdir(tmp_path / "w", "sft", {"lr": 1e-3}, {"model": tmp_path}, seed=0), rank=0)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_configuration_is_read_and_checked(run: RunDir, tmp_path: Path) -> None:
    assert run.seed == 0 and run.params(SftParams).lr == 1e-3 and run.input("model") == tmp_path
    with pytest.raises(ConfigurationError, match=r"inputs\.pairs is missing"):
        run.input("pairs")
    run.config["params"]["epoch"] = 2
    with pytest.raises(ConfigurationError, match="epoch"):
        run.params(SftParams)
    run.config["inputs"]["gone"] = str(tmp_path / "gone")
    with pytest.raises(ConfigurationError, match="does not exist"):
        run.input("gone")


@pytest.mark.parametrize("text", ["", "{", '{"stage": "sft"}'])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        RunDir.open(tmp_path, 0)


def test_rewinding_leaves_no_gap_and_no_double_line(run: RunDir) -> None:
    run.metrics(1, {"loss": 2.0})
    run.journal("start", rows=3)
    offsets = run.offsets()
    run.metrics(2, {"loss": 1.0})
    run.journal("late")
    run.rewind(offsets)
    run.metrics(2, {"loss": 1.5})
    assert [line["loss"] for line in lines(run.path / "metrics.jsonl")] == [2.0, 1.5]
    assert [line["event"] for line in lines(run.path / "journal.jsonl")] == ["start"]
    run.rewind({})
    assert (run.path / "metrics.jsonl").read_text() == ""


def test_numbers_that_are_none_stay_valid_json(run: RunDir) -> None:
    run.metrics(1, {"grad_norm": float("nan"), "loss": float("inf"), "lr": 0.1})
    assert lines(run.path / "metrics.jsonl") == [{"step": 1, "grad_norm": None, "loss": None, "lr": 0.1}]


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    run = RunDir.open(workdir(tmp_path / "w", "sft", {}, {}), rank=1)
    run.metrics(1, {"loss": 1.0})
    run.journal("x")
    run.progress(1, 2)
    run.finish({"status": "trained"})
    assert sorted(path.name for path in run.path.iterdir()) == ["config.json"]


def test_files_are_replaced_whole(run: RunDir) -> None:
    run.progress(3, 10)
    run.finish({"status": "trained"})
    assert json.loads((run.path / "progress.json").read_text()) == {"step": 3, "total": 10, "unit": "step"}
    assert list(run.path.glob(".*")) == []


def test_opening_again_removes_how_the_last_try_ended(run: RunDir) -> None:
    run.finish({"status": "trained"})
    (run.path / "error.json").write_text("{}")
    RunDir.open(run.path, 0)
    assert not (run.path / "result.json").exists() and not (run.path / "error.json").exists()


def test_a_stop_signal_is_a_wish(run: RunDir) -> None:
    assert not run.stop_requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.stop_requested


class Exit(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (None, 0, None),
        (ConfigurationError("a"), 10, "configuration"),
        (DataError("row 3"), 11, "data"),
        (DivergenceError("nan"), 12, "divergence"),
        (RuntimeError("disk"), 13, "infrastructure"),
    ],
)
def test_a_failure_becomes_a_file_and_a_code(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: Exception | None, code: int, kind: str | None
) -> None:
    codes = []

    def leave(number: int) -> None:
        codes.append(number)
        raise Exit

    def main(run: RunDir) -> None:
        if error:
            raise error

    monkeypatch.setattr(rundir.lifeline, "bind", lambda: None)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["program", "--local_rank=0", str(run.path)])
    with pytest.raises(Exit):
        rundir.program(main)
    assert codes == [code]
    if kind:
        written = json.loads((run.path / "error.json").read_text())
        assert (
            written["kind"] == kind
            and str(error) in written["message"]
            and "Traceback" in written["traceback"]
        )
    else:
        assert not (run.path / "error.json").exists()


def test_seed_zero_is_a_seed() -> None:
    import torch

    draws = []
    for seed in (0, 0, 1):
        rundir.seed_everything(seed)
        draws.append(float(torch.rand(())))
    assert draws[0] == draws[1] != draws[2]
