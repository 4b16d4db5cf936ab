from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from data.errors import ConfigurationError, DivergenceError, InfrastructureError
from tests.training.tiny import workdir
from training.checkpoint import Checkpoints
from training.config import EngineParams
from training.engine import Engine
from training.rundir import RunDir

OPTIONS: dict[str, Any] = {
    "lr": 0.1, "total_steps": 10, "warmup": 0.0, "min_lr_share": 0.1, "weight_decay": 0.01, "clip_norm": 1.0,
}  # fmt: skip


def make(path: Path, keep: int = 2, seed: int = 0) -> tuple[RunDir, Engine, Checkpoints]:
    if not (path / "config.json").exists():
        workdir(path, "sft", {}, {}, seed=seed)
    run = RunDir.open(path, 0)
    torch.manual_seed(0)
    engine = Engine(torch.nn.Linear(3, 2), EngineParams(backend="torch"), **OPTIONS)
    return run, engine, Checkpoints(run, engine, keep)


def step(engine: Engine, value: float = 1.0) -> None:
    engine.backward(engine.module(torch.full((1, 3), value)).square().sum(), last=True)
    engine.step()


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def test_everything_comes_back(tmp_path: Path) -> None:
    run, engine, checkpoints = make(tmp_path)
    assert checkpoints.resume() is None
    step(engine)
    run.metrics(1, {"loss": 1.0})
    checkpoints.save(1, {"counter": 7, "losses": [0.5]})
    expected = (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    step(engine)
    run.metrics(2, {"loss": 0.9})
    weights = [p.detach().clone() for p in engine.module.parameters()]

    run, engine, checkpoints = make(tmp_path)
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    resumed = checkpoints.resume()
    assert resumed == (1, {"counter": 7, "losses": [0.5]})
    assert (random.random(), float(numpy.random.rand()), float(torch.rand(()))) == expected
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 1
    step(engine)
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters(), strict=True))
    assert "resumed" in (run.path / "timing.jsonl").read_text(), (
        "a resume is no part of the deterministic files"
    )


def test_numbers_decide_not_names_or_dates(tmp_path: Path) -> None:
    run, _, checkpoints = make(tmp_path, keep=5)
    checkpoints.save(10_000, {"n": 10_000})
    checkpoints.save(900, {"n": 900})
    assert checkpoints.resume() == (10_000, {"n": 10_000})
    assert names(run) == ["step-00000900", "step-00010000"]


def test_torn_and_foreign_checkpoints_are_not_taken(tmp_path: Path) -> None:
    run, _, checkpoints = make(tmp_path / "a", keep=5)
    for number in (1, 2, 3):
        checkpoints.save(number, {"n": number})
    folder = run.path / "checkpoints"
    (folder / "step-00000003" / "COMPLETE").unlink()
    torn = folder / "step-00000002" / "engine.pt"
    torn.write_bytes(torn.read_bytes()[:-10])
    other, _, theirs = make(tmp_path / "b", seed=1)
    theirs.save(99_999, {"n": 99_999})
    shutil.copytree(other.path / "checkpoints" / "step-00099999", folder / "step-00099999")
    assert checkpoints.resume() == (1, {"n": 1})
    (folder / ".step-00000007.unfinished").mkdir()
    checkpoints.save(4, {"n": 4})
    assert names(run) == ["step-00000001", "step-00000004"], "what can't be resumed from is cleared away"


def test_the_best_and_the_last_healthy_stay(tmp_path: Path) -> None:
    run, _, checkpoints = make(tmp_path, keep=1)
    for number, (healthy, score) in enumerate(
        [(True, 0.2), (True, 0.9), (True, 0.3), (False, 0.1), (False, 0.0)], 1
    ):
        checkpoints.save(number, {"n": number}, healthy=healthy, score=score)
    assert names(run) == ["step-00000002", "step-00000003", "step-00000005"]
    assert checkpoints.rollback() == (3, {"n": 3})
    assert names(run) == ["step-00000002", "step-00000003"], "a restart must not find the unhealthy one"


def test_rolling_back_keeps_the_logs(tmp_path: Path) -> None:
    run, _engine, checkpoints = make(tmp_path)
    assert checkpoints.rollback() is None
    checkpoints.save(1, {})
    run.metrics(2, {"loss": 1.0})
    checkpoints.rollback()
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_broken_state_is_not_kept(tmp_path: Path) -> None:
    _run, engine, checkpoints = make(tmp_path)
    checkpoints.save(1, {})
    with torch.no_grad():
        next(engine.module.parameters())[0] = float("nan")
    with pytest.raises(InfrastructureError, match="non-finite"):
        checkpoints.save(2, {})
    _, _, again = make(tmp_path)
    resumed = again.resume()
    assert resumed is not None and resumed[0] == 1


def test_a_full_disk_is_seen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, checkpoints = make(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(InfrastructureError, match="MiB free"):
        checkpoints.save(1, {})


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    _run, _, checkpoints = make(tmp_path)
    checkpoints.save(1, {})
    _, engine, again = make(tmp_path)
    engine.world = 2
    with pytest.raises(ConfigurationError, match="processes: 1"):
        again.resume()


def test_marker_is_written_last_and_lists_every_file(tmp_path: Path) -> None:
    run, _, checkpoints = make(tmp_path)
    checkpoints.save(1, {}, score=0.5)
    folder = run.path / "checkpoints" / "step-00000001"
    marker = json.loads((folder / "COMPLETE").read_text())
    assert (
        set(marker["sizes"]) == {p.name for p in folder.iterdir()} - {"COMPLETE"} and marker["score"] == 0.5
    )


def test_a_nan_moves_nothing_and_three_in_a_row_end_it(tmp_path: Path) -> None:
    _, engine, _ = make(tmp_path)
    step(engine)
    before = [p.detach().clone() for p in engine.module.parameters()]
    for _ in range(2):
        engine.backward(engine.module(torch.full((1, 3), float("nan"))).sum(), last=True)
        assert not engine.step().finite
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    engine.backward(engine.module(torch.full((1, 3), float("inf"))).sum(), last=True)
    with pytest.raises(DivergenceError, match="3 steps in a row"):
        engine.step()


@pytest.mark.parametrize("damage", ["bit", "marker", "bytes"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    run, engine, checkpoints = make(tmp_path)
    for number in (1, 2):
        step(engine)
        checkpoints.save(number, {"n": number})
    folder = run.path / "checkpoints" / "step-00000002"
    if damage == "bit":
        whole = bytearray((folder / "engine.pt").read_bytes())
        whole[len(whole) // 2] ^= 1
        (folder / "engine.pt").write_bytes(whole)
    else:
        (folder / "COMPLETE").write_bytes(b"{}" if damage == "marker" else b"\xff\xfe")
    _, _, again = make(tmp_path)
    assert again.resume() == (1, {"n": 1})


def with_params(path: Path, **params: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "params": params}))


@pytest.mark.parametrize("other", [{"processes": 2}, {"processes": 2, "engine": {"tensor_parallel": 2}}])
def test_other_processes_in_the_configuration_are_refused_and_remove_nothing(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    workdir(tmp_path, "sft", {}, {})
    with_params(tmp_path, processes=1, engine={"tensor_parallel": 1})
    run, _, checkpoints = make(tmp_path)
    checkpoints.save(1, {"n": 1})
    with_params(tmp_path, **{"engine": {"tensor_parallel": 1}, **other})
    _, engine, again = make(tmp_path)
    engine.world = 2
    with pytest.raises(ConfigurationError, match="resume with processes: 1, or remove"):
        again.resume()
    assert names(run) == ["step-00000001"]


def test_a_run_that_starts_anew_beside_strangers_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir(tmp_path, "sft", {}, {})
    with_params(tmp_path, lr=0.1)
    _, _, checkpoints = make(tmp_path)
    checkpoints.save(3, {})
    assert "another configuration" not in capsys.readouterr().out
    with_params(tmp_path, lr=0.2)
    assert make(tmp_path)[2].resume() is None
    assert "1 checkpoints are of another configuration" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["metrics.jsonl", "journal.jsonl"])
def test_lost_lines_of_a_log_give_way_to_the_checkpoint_that_has_them_all(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, checkpoints = make(tmp_path, keep=3)
    for number in (1, 2):
        run.metrics(number, {"loss": 1.0})
        run.journal("x", step=number)
        checkpoints.save(number, {"n": number})
    whole = (run.path / name).read_bytes()
    (run.path / name).write_bytes(whole[:-3])
    assert make(tmp_path)[2].resume() == (1, {"n": 1})
    assert f"{name} holds {len(whole) - 3} bytes" in capsys.readouterr().out
    assert len((run.path / name).read_text().splitlines()) == 1
    (run.path / name).unlink()
    with pytest.raises(ConfigurationError, match=rf"{name} holds 0 bytes, .* put the file back"):
        make(tmp_path)[2].resume()
    assert names(run) == ["step-00000001", "step-00000002"]


FAULTS: dict[str, Any] = {
    "is missing": lambda module: module.pop("weight"),
    "is empty": lambda module: module.update(weight=torch.zeros(0, 3)),
    "is not what was trained": lambda module: module["weight"][0].mul_(1 + 1e-6),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_weights_that_read_back_otherwise_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, backend: str
) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    run, _, _ = make(tmp_path)
    engine = Engine(torch.nn.Linear(3, 2), EngineParams.model_validate({"backend": backend}), **OPTIONS)
    checkpoints = Checkpoints(run, engine, 2)
    step(engine)
    checkpoints.save(1, {})
    save = Engine.save

    def broken(self: Engine, folder: Path) -> None:
        save(self, folder)
        names = ("engine.pt", "mp_rank_00_model_states.pt")
        (file,) = [path for path in folder.rglob("*.pt") if path.name in names]
        state = torch.load(file, weights_only=False)
        FAULTS[fault](state["module"])
        torch.save(state, file)

    monkeypatch.setattr(Engine, "save", broken)
    with pytest.raises(InfrastructureError, match=f"weight {fault}; the checkpoint was not kept"):
        checkpoints.save(2, {})
    assert (tmp_path / "checkpoints" / "step-00000001" / "COMPLETE").exists()
    assert not (tmp_path / "checkpoints" / "step-00000002").exists()
