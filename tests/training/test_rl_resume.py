"""On policy: a run that is cut anywhere ends as one that was not, and what its held-out prompts are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.errors import Stopped
from data.records import Prompt, to_line
from tests.training.tiny import prompt, run_program, save_policy, workdir
from training import rl, rl_setting
from training.config_optimize import OptimizeParams
from training.engine import connect
from training.rl_setting import Setting
from training.rundir import RunDir, seed_everything

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
OTHERS = ("kl", "length", "length_corr", "repetition", "entropy", "clipped", "zero_variance", "grad_norm",
          "value_loss", "copying", "phrase")  # fmt: skip
"""Guards that random answers of a few letters may rouse."""


def prepare(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n)) for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
    params = {
        "algorithm": "rloo", "steps": STEPS, "prompts": 2, "group": 4, "max_new_tokens": 6, "lr": 1e-2,
        "warmup": 0.0, "held_out": 3, "held_out_every": 2, "lora": {"rank": 2}, "precision": "fp32",
        "checkpoint_every": 1, "engine": {"backend": "torch"},
        "rewards": {"scorers": [
            {"kind": "function", "name": "f", "path": "tests.training.scorer:vowels"}
        ]},
        "guards": dict.fromkeys(OTHERS), **changes,
    }  # fmt: skip
    if not (folder / "model").exists():
        save_policy(folder / "model")
    return workdir(
        folder / "run", "rl", params, {"model": folder / "model", "prompts": folder / "prompts.jsonl"}
    )


def run(path: Path, stop_at: int | None = None) -> dict[str, Any]:
    """The program, with its scorers' processes ended whatever happens; `stop_at`: it ends after that step."""
    made: list[Setting] = []

    def main(opened: RunDir) -> None:
        set_up = rl.set_up
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rl, "set_up", lambda opened: made.append(set_up(opened)) or made[-1])
            rl.main(opened)

    try:
        return run_program(main, path, None if stop_at is None else stop_at + 1)
    finally:
        for scorer in made[0].scoring.scorers if made else ():
            scorer.close()


def journal(path: Path, event: str) -> list[dict[str, Any]]:
    lines = (path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def scores(path: Path) -> dict[int, float | None]:
    """Score of each checkpoint that is left."""
    markers = [json.loads(file.read_text()) for file in path.glob("checkpoints/step-*/COMPLETE")]
    return {marker["step"]: marker["score"] for marker in markers}


def assert_same(cut: Path, whole: Path) -> None:
    for name in ("metrics.jsonl", "journal.jsonl", "result.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    one, other = (load_file(path / "model" / "model.safetensors") for path in (cut, whole))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


MANY: dict[str, Any] = {"updates": 2, "minibatches": 2}


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({}, (2, 4)),
        ({"algorithm": "ppo", "ppo": {**MANY, "value_warmup": 1}, "lora": None}, (1, 3)),
        ({"algorithm": "dapo", "ppo": MANY, "rounds": 2}, (2,)),
        ({"algorithm": "online_dpo", "beta": 0.1}, (3,)),
        ({"algorithm": "grpo", "kl": {"adaptive": True, "target": 0.01}, "checkpoint_every": 2}, (3, 4)),
    ],
)
def test_a_run_that_is_cut_ends_as_one_that_was_not(
    tmp_path: Path, changes: dict[str, Any], stops: tuple[int, ...]
) -> None:
    whole, cut = prepare(tmp_path / "whole", **changes), prepare(tmp_path / "cut", **changes)
    run(whole)
    for stop in stops:
        with pytest.raises(Stopped, match=f"after step {stop} "):
            run(cut, stop_at=stop)
    run(cut)
    assert_same(cut, whole)


def test_what_fails_in_a_look_costs_no_checkpoint_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = prepare(tmp_path / "whole"), prepare(tmp_path / "cut")
    run(whole)
    asked, original = [], rl.held_out_reward

    def dies(setting: Setting) -> float | None:
        asked.append(setting)
        if len(asked) == 2:
            raise OSError("the machine is gone")
        return original(setting)

    monkeypatch.setattr(rl, "held_out_reward", dies)
    with pytest.raises(OSError, match="is gone"):
        run(cut)
    assert max(scores(cut)) == 2 and scores(cut)[2] is None
    run(cut)
    assert_same(cut, whole)


def test_the_best_checkpoint_by_held_out_reward_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(tmp_path, keep=1)
    rewards = iter([0.1, 0.9, 0.5, 0.2])
    monkeypatch.setattr(rl, "held_out_reward", lambda setting: next(rewards))
    result = run(path)
    assert scores(path) == {2: 0.9, 5: 0.2}
    assert [(line["step"], line["reward"]) for line in journal(path, "held_out")] == [
        (2, 0.9), (4, 0.5), (5, 0.2),
    ]  # fmt: skip
    assert result["reward_best"] == {"step": 2, "reward": 0.9}
    assert (result["reward_before"], result["reward_after"]) == (0.1, 0.2)


def test_looks_change_nothing_else(tmp_path: Path) -> None:
    often, seldom = prepare(tmp_path / "often", held_out_every=1), prepare(tmp_path / "seldom")
    first, second = (run(path) for path in (often, seldom))
    assert (often / "metrics.jsonl").read_bytes() == (seldom / "metrics.jsonl").read_bytes()
    assert first["digest"] == second["digest"] and first["reward_after"] == second["reward_after"]
    seconds = [json.loads(line) for line in (often / "timing.jsonl").read_text().splitlines()]
    assert all(line["held_out"] > 0 for line in seconds if "generate" in line), "the cost is told"


@pytest.mark.parametrize(
    ("checkpoints", "every", "expected"),
    [(1, 10, [10, 20, 23]), (5, 10, [10, 20, 23]), (4, 10, [12, 20, 23]), (5, 2, [5, 10, 15, 20, 23])],
)
def test_looks_fall_on_checkpoints(checkpoints: int, every: int, expected: list[int]) -> None:
    params = OptimizeParams(steps=23, checkpoint_every=checkpoints, held_out_every=every)
    assert [step for step in range(24) if rl.looks(params, step)] == expected


def test_the_held_out_reward_is_never_normalised(tmp_path: Path) -> None:
    found = []
    for normalise in ("none", "batch", "group"):
        path = prepare(tmp_path / normalise)
        config = json.loads((path / "config.json").read_text())
        config["params"]["rewards"]["normalise"] = normalise
        (path / "config.json").write_text(json.dumps(config))
        connect()
        seed_everything(0)
        setting = rl_setting.set_up(RunDir.open(path, 0))
        found.append(rl.held_out_reward(setting))
        for scorer in setting.scoring.scorers:
            scorer.close()
    assert found[0] is not None and found[0] > 0.01 and found == [found[0]] * 3


def launch(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "training.launch", "-m", "training.rl", str(path)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def lines(path: Path) -> int:
    file = path / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, backend: str) -> None:
    changes: dict[str, Any] = {"steps": 40, "held_out_every": 1, "engine": {"backend": backend}}
    whole, cut = prepare(tmp_path / "whole", **changes), prepare(tmp_path / "cut", **changes)
    assert launch(whole).wait(timeout=300) == 0
    for least in (3, 9):
        process = launch(cut)
        end = time.monotonic() + 180
        while lines(cut) < least:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait()
        time.sleep(2)  # its worker ends with it
    assert lines(cut) < 40
    assert launch(cut).wait(timeout=300) == 0
    assert_same(cut, whole)
