from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.errors import ConfigurationError, DataError, Stopped
from data.records import Feedback, Preference, digest, read_records, to_line
from tests.training.tiny import byte_tokenizer, llama, prompt, save_policy, workdir, write_pairs
from training import preference
from training.batches import Tree
from training.config import EngineParams, LoraParams
from training.config_optimize import ON_PAIRS, OptimizeParams
from training.engine import Engine
from training.logprobs import AnswerLogprobs
from training.models import add_lora, load_causal
from training.pairs import Item, encode, mismatched
from training.reference import Forward, choose_layout, reference_logps
from training.rundir import RunDir, seed_everything

PARAMS: dict[str, Any] = {
    "steps": 4, "prompts": 4, "lr": 3e-3, "beta": 0.1, "token_budget": 400, "precision": "fp32",
    "checkpoint_every": 2, "lora": {"rank": 4, "alpha": 8.0}, "engine": {"backend": "torch"},
}  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_feedback(path: Path, count: int = 7) -> Path:
    made = [
        Feedback(
            prompt=prompt(f"well {n}?"),
            id=digest("f", str(n)),
            group=f"f{n}",
            answer="ab" * (1 + n % 3),
            label=n % 3 > 0,
        )
        for n in range(count)
    ]
    path.write_text("".join(map(to_line, made)), encoding="utf-8")
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "none.jsonl").write_text("")
    return {
        "model": save_policy(tmp_path / "policy"),
        "pairs": write_pairs(tmp_path / "pairs.jsonl", 16),
        "test": write_pairs(tmp_path / "test.jsonl", 6),
        "feedback": tmp_path / "none.jsonl",
    }


Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path, inputs: dict[str, Path]) -> Train:
    def go(name: str = "w", stop_at: int = 0, die_at: int = 0, seed: int = 0, **changes: Any) -> Path:
        work = workdir(tmp_path / "work" / name, "preference", {**PARAMS, **changes}, inputs, seed)
        run = RunDir.open(work, 0)
        seed_everything(run.seed)
        keep = run.metrics

        def metrics(step: int, values: Any) -> None:
            keep(step, values)
            run.stop_requested = step == stop_at - 1
            if step == die_at:
                raise MemoryError

        run.metrics = metrics  # type: ignore[method-assign]
        preference.main(run)
        return work

    return go


@pytest.mark.parametrize("algorithm", sorted(ON_PAIRS))
def test_every_method_runs_from_rows_to_a_model(train: Train, algorithm: str) -> None:
    work = train(algorithm=algorithm, preference={"smoothing": 0.1})
    result = json.loads((work / "result.json").read_text())
    assert result["status"] == "trained" and result["algorithm"] == algorithm and result["guards"] == []
    assert {"digest", "steps", "reward_before", "reward_after", "kl", "kl_target", "kl_estimator"} <= set(
        result
    )
    metrics = rows(work / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    wanted = {"loss", "chosen_reward", "rejected_reward", "accuracy", "margin", "grad_norm", "lr"}
    assert all(wanted <= set(line) and math.isfinite(line["loss"]) for line in metrics)
    assert metrics[0]["grad_norm"] > 0 and result["kl"] >= 0
    (start,) = rows(work / "journal.jsonl")
    assert start["event"] == "start" and start["prompts_shared"] and start["ratio_off"] <= 1e-5
    load_causal(work / "model", torch.float32)
    if algorithm in ("orpo", "simpo"):
        assert result["reward_before"] != 0
    else:
        assert (result["reward_before"], result["accuracy_before"]) == (0, 0.5), (
            "policy and reference are one"
        )
        assert metrics[0]["margin"] == pytest.approx(0, abs=1e-5)


def test_the_first_dpo_loss_is_ln_2_and_the_held_out_pairs_are_learned(train: Train) -> None:
    work = train(algorithm="dpo", steps=20, lr=1e-2, preference={"epochs": 9})
    metrics = rows(work / "metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics[-1]["loss"] < 0.6
    result = json.loads((work / "result.json").read_text())
    assert result["accuracy_after"] == 1.0 and result["reward_after"] > 0.2 and result["kl"] > 0
    assert result["interval_after"][0] < 1.0 and result["held_out"] == 6


@pytest.mark.parametrize("changes", [{}, {"lora": None}, {"algorithm": "kto"}, {"temperature": 0.7}])
def test_a_stopped_run_goes_on_bit_for_bit(train: Train, changes: dict[str, Any]) -> None:
    settings = {"algorithm": "dpo", **changes}
    whole = train("whole", **settings)
    with pytest.raises(Stopped, match="after step 3 of 4"):
        train("cut", stop_at=3, **settings)
    assert not (whole.parent / "cut" / "result.json").exists()
    cut = train("cut", **settings)
    for name in ("metrics.jsonl", "journal.jsonl", "result.json"):
        assert (whole / name).read_text() == (cut / name).read_text(), name
    assert any("resumed" in line for line in rows(cut / "timing.jsonl"))


def test_a_killed_run_leaves_no_gap_and_no_double_line(train: Train) -> None:
    whole = train("whole", algorithm="dpo", seed=3)
    for died in (1, 3):
        with pytest.raises(MemoryError):
            train("cut", algorithm="dpo", seed=3, die_at=died)
    cut = train("cut", algorithm="dpo", seed=3)
    for name in ("metrics.jsonl", "journal.jsonl", "result.json"):
        assert (whole / name).read_text() == (cut / name).read_text(), name


def test_how_a_step_is_split_does_not_show(train: Train) -> None:
    runs = [
        train(f"b{budget}", algorithm=algorithm, token_budget=budget, steps=2, lora=None)
        for algorithm in ("dpo", "kto")
        for budget in (1, 300, 5000)
    ]
    for same in (runs[:3], runs[3:]):
        losses = [[line["loss"] for line in rows(work / "metrics.jsonl")] for work in same]
        norms = [[line["grad_norm"] for line in rows(work / "metrics.jsonl")] for work in same]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] == pytest.approx(
            losses[2], rel=1e-5
        )
        assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] == pytest.approx(norms[2], rel=1e-4)


def test_weights_of_pairs_are_the_divisor(train: Train, inputs: dict[str, Path]) -> None:
    plain = train("plain", algorithm="dpo", steps=2)
    made = [row.model_copy(update={"weight": 3.0}) for row in read_records(inputs["pairs"], Preference)]
    inputs["pairs"].write_text("".join(map(to_line, made)))
    heavy = train("heavy", algorithm="dpo", steps=2)
    assert rows(plain / "metrics.jsonl")[1]["loss"] == pytest.approx(
        rows(heavy / "metrics.jsonl")[1]["loss"], rel=1e-5
    )


def test_the_reference_is_asked_once_and_found_again(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train("a", algorithm="dpo")
    asked: list[int] = []
    real = Forward.logps

    def counted(self: Forward, trees: list[Tree], *rest: Any) -> list[Tensor]:
        asked.append(len(trees))
        return real(self, trees, *rest)

    monkeypatch.setattr(Forward, "logps", counted)
    second = train("b", algorithm="dpo")
    assert asked == [6], (
        "only the held-out pairs after training; the reference is kept beside the work folder"
    )
    assert (first / "result.json").read_text() == (second / "result.json").read_text()
    assert any(line.get("reference") == "kept" for line in rows(second / "timing.jsonl"))
    train("c", algorithm="ipo", beta=0.3)
    assert asked == [6, 6], "another loss and beta read the same reference"
    train("d", algorithm="dpo", temperature=0.5)
    assert len(asked) == 4, "another temperature does not"
    (file, *_) = sorted((first.parent / "reference").glob("*.safetensors"))
    file.write_bytes(b"torn")
    train("e", algorithm="dpo")
    train("f", algorithm="dpo", temperature=0.5)
    assert len(asked) == 7, "a torn file is computed anew"


def test_kto_learns_from_feedback_without_pairs(
    train: Train, inputs: dict[str, Path], tmp_path: Path
) -> None:
    inputs["feedback"] = write_feedback(tmp_path / "feedback.jsonl")
    work = train("both", algorithm="kto")
    (start,) = rows(work / "journal.jsonl")
    assert start["rows"] == 16 + 7
    assert all("kl_point" in line for line in rows(work / "metrics.jsonl"))
    inputs["pairs"].write_text("")
    alone = train("alone", algorithm="kto")
    metrics = rows(alone / "metrics.jsonl")
    assert len(metrics) == 2 and all("accuracy" not in line for line in metrics)
    assert json.loads((alone / "result.json").read_text())["rows"] == 7
    with pytest.raises(DataError, match="none of 0 rows"):
        train("dpo", algorithm="dpo")


def test_ktos_first_loss_is_one_half(train: Train) -> None:
    work = train(algorithm="kto", steps=1, preference={"desirable": 1.5, "undesirable": 0.5})
    (line,) = rows(work / "metrics.jsonl")
    assert line["loss"] == pytest.approx(0.5, abs=1e-6) and line["kl_point"] == pytest.approx(0, abs=1e-4)


def test_a_mismatch_is_the_next_row_with_another_prompt() -> None:
    def item(name: int, answer: int) -> Item:
        return Item(Tree(str(answer), [name], [[answer, 1]]), (True,), 1.0)

    items = [item(1, 10), item(1, 11), item(2, 12), item(3, 13), item(3, 14), item(1, 15)]
    partners = mismatched(items)
    assert [tree.prompt for tree in partners] == [[1], [1], [2], [3], [3], [1]]
    assert [tree.answers[0][0] for tree in partners] == [12, 12, 13, 15, 15, 12]
    with pytest.raises(DataError, match="same one"):
        mismatched(items[:2])


def test_rows_over_a_limit_are_left_out_and_counted(inputs: dict[str, Path]) -> None:
    made = list(read_records(inputs["pairs"], Preference))[:2]
    bad = [
        made[0].model_copy(update={"prompt": prompt("x" * 500)}),
        made[0].model_copy(update={"rejected": "y" * 900}),
        made[0].model_copy(update={"chosen": ""}),
        made[0].model_copy(update={"rejected": made[0].chosen}),
    ]
    items, dropped = encode(byte_tokenizer(), [*made, *bad], OptimizeParams(algorithm="dpo"))
    assert [item.tree.key for item in items] == [row.id for row in made]
    assert dropped == {
        "prompt over max_prompt": 1,
        "prompt and answer over preference.max_length": 1,
        "empty answer": 1,
        "equal answers": 1,
    }
    assert items[0].tree.answers[0][-1] == 1 and items[0].wanted == (True, False)


def forward_of(model: Any, shared: bool = True) -> Forward:
    engine = Engine(
        AnswerLogprobs(model), EngineParams(backend="torch"), lr=1e-3, total_steps=2, warmup=0.0,
        min_lr_share=1.0, weight_decay=0.0, clip_norm=1.0,
    )  # fmt: skip
    return Forward(engine, 1, shared, 60, 1.0, "fp32")


TREES = [Tree("a", [5, 6, 7], [[8, 9, 1], [10, 1]]), Tree("b", [11, 12], [[13, 1], [14, 15, 16, 1]])]


def test_the_preflight_meets_a_policy_that_is_not_the_reference(tmp_path: Path) -> None:
    model = add_lora(llama(), LoraParams(rank=2))
    forward = forward_of(model)
    params = OptimizeParams(algorithm="dpo")
    ref, found = reference_logps(forward, model, TREES, "id", tmp_path)
    assert not found
    seen = preference.check_start(params, forward, TREES, ref)
    assert seen["ratio_off"] == 0 and seen["kl"] == 0 and seen["dpo_loss_off"] < 1e-6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.02)
    again, found = reference_logps(forward, model, TREES, "other", tmp_path)
    assert not found and all(map(torch.equal, ref, again)), "adapters are off when the reference is asked"
    with pytest.raises(ConfigurationError, match="not the reference"):
        preference.check_start(params, forward, TREES, ref)


def test_prompts_are_repeated_where_sharing_is_impossible_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = forward_of(llama())
    assert choose_layout(forward, TREES, None) == (True, "")
    assert choose_layout(forward, TREES, "sliding window") == (False, "sliding window")
    real = Forward.micro
    monkeypatch.setattr(
        Forward, "micro", lambda self, trees, shared: real(self, trees, shared) + 0.1 * shared
    )
    shared, reason = choose_layout(forward, TREES, None)
    assert not shared and "0.1 nats" in reason


def test_dropout_repeats_the_prompts_and_says_so(train: Train) -> None:
    work = train(algorithm="dpo", lora={"rank": 2, "dropout": 0.1}, steps=2)
    (start,) = rows(work / "journal.jsonl")
    assert (
        not start["prompts_shared"] and "dropout" in start["repeated_because"] and start["ratio_off"] <= 1e-5
    )


def test_a_method_on_rollouts_is_refused(train: Train) -> None:
    with pytest.raises(ConfigurationError, match=r"training\.rl"):
        train(algorithm="rloo")


def test_the_drift_of_the_chosen_answers_is_k3() -> None:
    items = [Item(tree, (True, False), 1.0) for tree in TREES]
    ref = [torch.full((5,), -1.0, dtype=torch.float64), torch.full((6,), -1.0, dtype=torch.float64)]
    moved = [part.clone() for part in ref]
    moved[0][:3] += 0.5
    moved[1][2:] -= 0.5
    seen = preference.held_out(OptimizeParams(algorithm="dpo", beta=0.1), items, moved, ref)
    assert seen["kl"] == pytest.approx(3 * (math.exp(-0.5) - 1 + 0.5) / 2, rel=1e-6)
    assert seen["accuracy"] == 1.0 and seen["margin"] == pytest.approx(
        0.1 * (3 * 0.5 + 4 * 0.5) / 2, rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_as_a_program_with_two_ranks_and_a_signal(
    tmp_path: Path, inputs: dict[str, Path], backend: str
) -> None:
    changes = {
        **PARAMS,
        "algorithm": "dpo",
        "engine": {"backend": backend, "zero": 2 * (backend == "deepspeed")},
    }

    def launch(name: str, processes: int) -> subprocess.Popen[bytes]:
        work = workdir(tmp_path / name / "w", "preference", {**changes, "processes": processes}, inputs)
        command = [sys.executable, "-m", "training.launch", "--processes", str(processes)]
        return subprocess.Popen([*command, "-m", "training.preference", str(work)], env={**os.environ})

    assert launch("one", 1).wait() == 0 and launch("two", 2).wait() == 0
    one, two = (rows(tmp_path / name / "w" / "metrics.jsonl") for name in ("one", "two"))
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in two], rel=1e-4)
    stopped = launch("stop", 1)
    followed = tmp_path / "stop" / "w" / "metrics.jsonl"
    while stopped.poll() is None and not (followed.exists() and followed.read_text()):
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() in (0, 14)
    assert launch("stop", 1).wait() == 0
    assert followed.read_text() == (tmp_path / "one" / "w" / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "stop")


@pytest.mark.slow
def test_two_ranks_that_hold_one_model_learn_from_pairs_as_one(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    seen = []
    for count in (1, 2):
        changes = {**PARAMS, "algorithm": "dpo", "lora": None, "processes": count}
        changes["engine"] = {"zero": 1, "tensor_parallel": count}
        work = workdir(tmp_path / str(count) / "w", "preference", changes, inputs)
        command = [sys.executable, "-m", "training.launch", "--processes", str(count)]
        done = subprocess.run([*command, "-m", "training.preference", str(work)], check=False)
        assert done.returncode == 0
        seen.append([line["loss"] for line in rows(work / "metrics.jsonl")])
    assert seen[0] == pytest.approx(seen[1], rel=1e-3) and seen[0][0] == pytest.approx(math.log(2), abs=1e-5)
