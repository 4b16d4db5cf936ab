"""What a run on policy watches beside its answers: its generator, its reference, its scorers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import InfrastructureError
from data.records import Prompt, to_line
from tests.training.tiny import prompt, save_policy
from training import rl, rl_setting
from training.engine import connect
from training.experience import Scoring
from training.measure import measure
from training.rl_setting import Setting
from training.rl_watch import answer_guards
from training.rundir import RunDir, seed_everything

STEPS = 3
OTHERS = ("kl", "length", "length_corr", "repetition", "entropy", "clipped", "zero_variance", "grad_norm",
          "value_loss", "copying", "phrase")  # fmt: skip
"""Guards that random answers of a few letters may rouse when one step is a window."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    made: list[Setting] = []

    def open_run(algorithm: str = "rloo", fails: bool = False, **changes: Any) -> Setting:
        rows = [
            Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n), extra={"fails": fails})
            for n in range(6)
        ]
        (tmp_path / "prompts.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
        params = {
            "algorithm": algorithm, "steps": STEPS, "prompts": 2, "group": 4, "max_new_tokens": 6,
            "lr": 1e-2, "warmup": 0.0, "held_out": 0, "lora": None, "precision": "fp32",
            "checkpoint_every": 1, "engine": {"backend": "torch"},
            "rewards": {"scorers": [
                {"kind": "function", "name": "f", "path": "tests.training.scorer:Failing"}
            ]},
            "guards": {"window": 1, **dict.fromkeys(OTHERS)}, **changes,
        }  # fmt: skip
        inputs = {"model": str(save_policy(tmp_path / "model")), "prompts": str(tmp_path / "prompts.jsonl")}
        config = {"stage": "optimize", "program": "training.rl", "seed": 0, "dtype": "float32",
                  "params": params, "inputs": inputs}  # fmt: skip
        connect()
        seed_everything(0)
        made.append(rl_setting.set_up(RunDir(tmp_path, 0, config)))
        return made[-1]

    yield open_run
    for setting in made:
        for scorer in setting.scoring.scorers:
            scorer.close()


def journal(setting: Setting) -> list[dict[str, Any]]:
    lines = (setting.run.path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "guard"]


@pytest.mark.parametrize("algorithm", ["rloo", "ppo", "online_dpo"])
def test_a_healthy_run_differs_by_rounding_only(opened: Any, algorithm: str) -> None:
    setting = opened(algorithm)
    _, state = rl.begin(setting)
    for step in range(1, STEPS + 1):
        assert rl.step_once(setting, state, step) is None
    assert all(0 <= row["rollout_gap"] < 1e-5 for row in state["history"])
    assert all(row["reference_gap"] == 0.0 for row in state["history"])
    assert [line["guard"] for line in journal(setting)] == []


@pytest.mark.parametrize("algorithm", ["rloo", "online_dpo"])
def test_a_generator_with_other_weights_is_seen(opened: Any, algorithm: str) -> None:
    setting = opened(algorithm)
    _, state = rl.begin(setting)
    assert rl.step_once(setting, state, 1) is None
    generate = setting.generator.generate

    def stale(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        made.logp = [[[value + 0.05 for value in one] for one in group] for group in made.logp]
        return made

    setting.generator.generate = stale
    reason = rl.step_once(setting, state, 2)
    assert state["history"][-1]["rollout_gap"] == pytest.approx(0.05, rel=1e-2)
    assert reason is not None and reason.startswith("stale")
    (line,) = journal(setting)
    assert line["guard"] == "stale" and line["value"] == pytest.approx(50, rel=1e-2) and line["bound"] == 3.0


def test_a_reference_that_moves_is_seen_at_once(opened: Any) -> None:
    setting = opened()
    _, state = rl.begin(setting)
    assert rl.step_once(setting, state, 1) is None
    with setting.learner.reference as frozen, torch.no_grad():
        for weight in frozen.parameters():
            weight.mul_(1.5)
    reason = rl.step_once(setting, state, 2)
    assert reason is not None and reason.startswith("reference")
    assert state["history"][-1]["reference_gap"] > 0.01


def test_the_reference_is_watched_across_a_restart(opened: Any) -> None:
    setting = opened()
    _, state = rl.begin(setting)
    rl.step_once(setting, state, 1)
    step, again = rl.begin(setting)
    assert step == 1 and torch.equal(again["canary"], state["canary"])


def test_padding_is_measured_against_the_first_step(opened: Any) -> None:
    setting = opened()
    _, state = rl.begin(setting)
    seen = []
    for step in (1, 2, 3):
        state["history"] = [{**row, "length": 4.0 + number} for number, row in enumerate(state["history"])]
        rl.step_once(setting, state, step)
        seen.append(setting.scoring.typical)
    assert seen == [None, 4.0, 4.0]


def test_scorers_that_fail_end_the_run_with_a_line_in_the_journal(opened: Any) -> None:
    setting = opened(fails=True)
    _, state = rl.begin(setting)
    assert rl.step_once(setting, state, 1) is None
    before = [weight.clone() for weight in setting.learner.model.parameters()]
    with pytest.raises(InfrastructureError, match="the scorer is gone"):
        rl.step_once(setting, state, 2)
    after = list(setting.learner.model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    (line,) = journal(setting)
    assert (line["guard"], line["action"], line["step"], line["bound"]) == ("scorer_errors", "stop", 2, 0.1)
    assert line["value"] > 0.1 and line["message"].startswith("scorer f: ")


def test_a_loss_that_is_not_finite_is_the_guards_matter(opened: Any) -> None:
    setting = opened("grpo", beta=0.0)
    _, state = rl.begin(setting)
    assert rl.step_once(setting, state, 1) is None
    setting.engine.module.register_forward_hook(lambda module, given, out: (out[0] * float("nan"), *out[1:]))
    rl.step_once(setting, state, 2)
    assert journal(setting)[0]["guard"] == "nonfinite"
    (line,) = [x for x in (setting.run.path / "metrics.jsonl").read_text().splitlines() if '"step": 2' in x]
    assert json.loads(line)["loss"] is None
    assert all(bool(weight.isfinite().all()) for weight in setting.learner.model.parameters())


def test_each_rollback_lowers_the_rate_further(opened: Any) -> None:
    setting = opened()
    _, state = rl.begin(setting)
    assert rl.step_once(setting, state, 1) is None
    scales = []
    for _ in range(2):
        state["history"].append({**state["history"][-1], "loss": float("nan")})
        state["answered"].clear()
        answer_guards(setting, state, 2)
        scales.append(setting.engine.lr_scale)
    assert scales == [0.5, 0.25]


@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_a_step_that_teaches_nothing_moves_nothing(opened: Any, backend: str) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    setting = opened("grpo", beta=0.0, engine={"backend": backend})
    _, state = rl.begin(setting)
    gather = rl.gather

    def constant(*args: Any) -> Any:
        found = gather(*args)
        found.scored.reward.fill_(0.5)
        return found

    rl.gather, before = constant, [weight.clone() for weight in setting.learner.model.parameters()]
    try:
        rl.step_once(setting, state, 1)
    finally:
        rl.gather = gather
    assert state["history"][-1]["grad_norm"] == 0.0
    assert all(map(torch.equal, before, setting.learner.model.parameters()))


def test_a_prompt_drawn_twice_in_a_step_gets_other_answers(opened: Any) -> None:
    setting = opened(prompts=2)
    first = rl.roll(setting, setting.prompts[:1], 4, 1, [0])
    again = rl.roll(setting, setting.prompts[:1], 4, 1, [1])
    assert [tree.answers for tree in first.trees] != [tree.answers for tree in again.trees]


@pytest.mark.parametrize(
    ("algorithm", "moves"),
    [("rloo", True), ("reinforce_pp", True), ("ppo", True), ("grpo", False), ("dr_grpo", False),
     ("dapo", False), ("gspo", False), ("cispo", False)],
)  # fmt: skip
def test_kl_moves_the_reward_only_where_it_belongs(opened: Any, algorithm: str, moves: bool) -> None:
    setting = opened(algorithm)
    _, state = rl.begin(setting)
    rl.step_once(setting, state, 1)
    found = rl.roll(setting, setting.prompts[:2], 4, 2, [0, 0])
    one, other = (rl.signals(setting, found, beta).advantage for beta in (0.0, 5.0))
    assert torch.equal(one, other) is not moves
    (start,) = [x for x in map(json.loads, (setting.run.path / "journal.jsonl").read_text().splitlines())
                if x["event"] == "start"]  # fmt: skip
    assert start["kl"] == (
        {"where": "reward", "estimator": "k1"} if moves else {"where": "loss", "estimator": "k2"}
    )


@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_warm_up_of_the_value_moves_the_value_head_only(opened: Any, backend: str, lora: Any) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    setting = opened(
        "ppo", ppo={"value_warmup": 2, "updates": 2, "entropy": 0.01}, lora=lora, weight_decay=0.1,
        kl={"where": "loss"}, engine={"backend": backend},
    )  # fmt: skip
    _, state = rl.begin(setting)
    policy, head = setting.learner.model, setting.engine.module.value_head
    for step in range(1, STEPS + 1):
        trunk = [weight.clone() for weight in policy.parameters()]
        value = head.weight.clone()
        assert rl.step_once(setting, state, step) is None
        assert all(map(torch.equal, trunk, policy.parameters())) is (step <= 2), step
        assert not torch.equal(value, head.weight)


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_run_that_goes_on_keeps_the_layout_that_it_began_with(
    opened: Any, monkeypatch: pytest.MonkeyPatch, first: float
) -> None:
    """What other weights give in the preflight of a restart is no reason to compute otherwise."""
    policy = rl.preflight.policy
    gaps = [first, 1.0 - first]
    monkeypatch.setattr(rl.preflight, "policy", lambda *a, **k: {**policy(*a, **k), "shared": gaps.pop(0)})
    setting = opened()
    _, state = rl.begin(setting)
    rl.step_once(setting, state, 1)
    began = setting.learner.shared
    assert began == (first == 0.0)
    setting.learner.shared = True
    assert rl.begin(setting)[0] == 1 and setting.learner.shared == began and not gaps


def test_failures_in_dropped_groups_are_counted(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DAPO draws again for what taught nothing: nothing was scored there, and nobody would be told."""
    setting = opened("dapo", rounds=3)
    _, state = rl.begin(setting)
    fixed, rounds = rl.fixed_sampling, []

    def failing(*given: Any) -> Any:
        part = fixed(*given)
        rounds.append(part)
        count = len(part.answers)
        known = torch.full((count,), len(rounds) == 1)
        known[part.group :] = False
        reward = torch.where(known, torch.arange(count).float(), 0.0)
        return replace(
            part,
            scored=part.scored._replace(
                known=known, reward=reward, errors=int((~known).sum()), unknown=int((~known).sum())
            ),
        )

    monkeypatch.setattr(rl, "fixed_sampling", failing)
    made = rl.dynamic_sampling(setting, state, 1)
    assert len(made.trees) == 1 and len(rounds) == 3
    assert made.scored.errors == 4 + 8 + 8 and made.scored.calls == 24
    assert made.scored.unknown == 4 + 8 + 8 and made.scored.asked == 24
    own = measure(made, made.rollout_logp, lambda values: [float(value) for value in values])
    assert own["scorer_invalid"] == 20 / 24, "the guards see what was dropped"


def test_pairs_without_a_difference_move_nothing(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = opened("online_dpo", steps=4)
    _, state = rl.begin(setting)
    assert rl.step_once(setting, state, 1) is None, "momentum is there"
    before = [weight.clone() for weight in setting.learner.model.parameters()]
    rewarded = Scoring._adjust
    monkeypatch.setattr(Scoring, "_adjust", lambda *given: torch.zeros_like(rewarded(*given)))
    rl.step_once(setting, state, 2)
    assert state["history"][-1]["pairs"] == 0.0 and state["history"][-1]["loss"] == 0.0
    after = list(setting.learner.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
