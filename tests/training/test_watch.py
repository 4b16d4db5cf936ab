"""Runs on given data: what their guards see, and how many broken steps they bear."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import DivergenceError, Stopped
from tests.training.test_preference import PARAMS as PAIRS
from tests.training.test_reward import prepare as prepare_reward
from tests.training.test_sft import prepare as prepare_sft
from tests.training.tiny import run_program, save_policy, workdir, write_pairs
from training import preference, reward, sft, watch
from training.config import EngineParams, SpikeParams
from training.engine import Engine, StepInfo
from training.guards import review_given
from training.rundir import RunDir


def prepare_pairs(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "none.jsonl").write_text("")
    inputs = {
        "model": save_policy(folder / "policy"), "pairs": write_pairs(folder / "pairs.jsonl", 40),
        "test": write_pairs(folder / "test.jsonl", 6), "feedback": folder / "none.jsonl",
    }  # fmt: skip
    guards = changes.pop("guards", {})
    params = {**PAIRS, "algorithm": "dpo", "steps": 12, "preference": {"epochs": 2, "guards": guards}}
    return workdir(folder / "run", "preference", {**params, **changes}, inputs)


PROGRAMS: list[tuple[Any, Callable[..., Path]]] = [
    (sft, lambda folder, **changes: prepare_sft(folder, epochs=4, **changes)),
    (reward, prepare_reward),
    (preference, prepare_pairs),
]


def lines(path: Path, event: str) -> list[dict[str, Any]]:
    text = (path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, text) if line["event"] == event]


@pytest.fixture
def break_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the gradients of some optimizer steps `factor` times what they were."""

    def change(chosen: Callable[[int], bool], factor: float) -> None:
        original = Engine.step

        def step(self: Engine, decay: bool = True) -> StepInfo:
            if chosen(self.steps + 1):
                for weight in self.module.parameters():
                    if weight.grad is not None:
                        weight.grad.mul_(factor)
            return original(self, decay)

        monkeypatch.setattr(Engine, "step", step)

    return change


@pytest.mark.parametrize(("program", "prepare"), PROGRAMS)
def test_every_second_broken_step_ends_the_run(
    tmp_path: Path, program: Any, prepare: Any, break_steps: Any
) -> None:
    path = prepare(tmp_path)
    break_steps(lambda step: step % 2 == 0, math.nan)
    with pytest.raises(DivergenceError, match=r"in 3 of 12 in all \(engine\.nonfinite_share: 0\.1\)"):
        run_program(program.main, path)
    found = lines(path, "non-finite gradient")
    assert [(line["step"], line["total"]) for line in found] == [(2, 1), (4, 2)]
    assert not (path / "result.json").exists()


def test_broken_steps_are_counted_across_a_restart(tmp_path: Path, break_steps: Any) -> None:
    path = prepare_sft(tmp_path, epochs=4)
    break_steps(lambda step: step in (2, 5, 9), math.nan)
    with pytest.raises(Stopped):
        run_program(sft.main, path, stop_at=6)
    with pytest.raises(DivergenceError, match="in 3 of 12 in all"):
        run_program(sft.main, path)


@pytest.mark.parametrize(
    ("share", "total", "borne"), [(0.1, 100, 10), (0.1, 12, 2), (0.5, 12, 6), (0.0, 50, 2)]
)
def test_how_many_broken_steps_a_run_bears(share: float, total: int, borne: int) -> None:
    engine = Engine(
        torch.nn.Linear(2, 1), EngineParams(backend="torch", nonfinite_share=share), lr=0.1,
        total_steps=total, warmup=0.0, min_lr_share=1.0, weight_decay=0.0, clip_norm=1.0,
    )  # fmt: skip

    def one(value: float) -> None:
        engine.backward(engine.module(torch.full((1, 2), value)).sum(), last=True)
        engine.step()

    for _ in range(borne):
        one(math.nan), one(1.0)
    with pytest.raises(DivergenceError, match=f"in {borne + 1} of {total} in all"):
        one(math.nan)


@pytest.mark.parametrize(("program", "prepare"), PROGRAMS)
def test_a_gradient_that_explodes_is_in_the_journal(
    tmp_path: Path, program: Any, prepare: Any, break_steps: Any
) -> None:
    path = prepare(tmp_path)
    break_steps(lambda step: step in (8, 9), 1e4)
    result = run_program(program.main, path)
    (line,) = [line for line in lines(path, "guard") if line["guard"] == "grad_norm"]
    assert (line["step"], line["asked"], line["action"], line["bound"]) == (8, "warn", "warn", 20.0)
    assert line["value"] > 1e3
    assert [(seen["step"], seen["guard"]) for seen in result["guards"]] == [(8, "grad_norm")]


@pytest.mark.parametrize(("program", "prepare"), PROGRAMS)
def test_a_guard_may_halve_the_rate_or_end_the_run(
    tmp_path: Path, program: Any, prepare: Any, break_steps: Any
) -> None:
    break_steps(lambda step: step == 8, 1e4)
    path = prepare(tmp_path / "a", guards={"action": "lower_lr"})
    run_program(program.main, path)
    assert lines(path, "settings") == [{"event": "settings", "step": 8, "lr_scale": 0.5}]
    path = prepare(tmp_path / "b", guards={"action": "stop"})
    with pytest.raises(DivergenceError, match="step 8: guard grad_norm"):
        run_program(program.main, path)
    assert lines(path, "guard")[0]["action"] == "stop" and not (path / "result.json").exists()


def history(*losses: float) -> list[dict[str, float]]:
    return [{"loss": loss, "grad_norm": 1.0} for loss in losses]


def test_a_loss_that_rises_is_seen_and_told_once_a_window() -> None:
    bounds = SpikeParams(window=3, loss=2.0)
    assert review_given(history(1.0, 9.0), bounds, {}) == [], "fewer steps than a window"
    assert review_given(history(1.0, 2.0, 2.0, 2.0), bounds, {}) == [], "twice the first is not over it"
    (found,) = review_given(history(1.0, 2.0, 2.0, 2.3), bounds, {})
    assert (found.guard, found.action, found.bound) == ("loss", "warn", 2.0)
    assert found.value == pytest.approx(2.1)
    rising = history(1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)
    assert review_given(rising[:6], bounds, {"loss": 4}) == []
    assert [one.guard for one in review_given(rising, bounds, {"loss": 4})] == ["loss"]
    assert review_given(history(-1.0, 9.0, 9.0, 9.0), bounds, {}) == [], "no factor of a loss below 0"
    assert review_given(rising, SpikeParams(window=3, loss=None), {}) == []


def test_a_loss_is_never_reported_that_is_none(tmp_path: Path, break_steps: Any) -> None:
    assert watch.ends([math.nan, 2.0, 1.0, math.nan]) == {"loss_first": 2.0, "loss_last": 1.0}
    with pytest.raises(DivergenceError, match="none of 2 steps had a finite loss"):
        watch.ends([math.nan, math.inf])


def test_pairs_without_any_weight_train_nothing_and_say_so(tmp_path: Path) -> None:
    for number, (share, error) in enumerate(((1.0, "none of 2 steps"), (0.5, None))):
        path = prepare_reward(tmp_path / str(number), max_steps=2)
        file = Path(RunDir.open(path, 0).config["inputs"]["pairs"])
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows[: int(share * len(rows))]:
            row["weight"] = 0.0
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if error:
            with pytest.raises(DivergenceError, match=error):
                run_program(reward.main, path)
            assert len(lines(path, "non-finite gradient")) == 2
        else:
            assert math.isfinite(run_program(reward.main, path)["train_accuracy"])
