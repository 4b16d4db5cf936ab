"""Our side of each task: a function that makes the step function that is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.bench.work import (
    BETA,
    CENTRING,
    GROUP,
    LR,
    MAX_LENGTH,
    NEW_TOKENS,
    decoding,
    fitting,
    prompt_rows,
    tokens_of,
)

Step = Callable[[int], tuple[float, float, int]]
"""Number of a step to seconds, loss and the data's tokens."""


def our_settings(spec: dict[str, Any]) -> dict[str, Any]:
    """What all sections share."""
    from training.config import EngineParams

    return {
        "lr": LR, "warmup": 0.0, "min_lr_share": 1.0, "weight_decay": 0.0, "clip_norm": 1.0, "lora": None,
        "precision": spec["precision"], "threads": spec["threads"],
        "engine": EngineParams(backend=spec["backend"]),
    }  # fmt: skip


def our_engine(module: Any, params: Any) -> Any:
    from training.engine import Engine

    return Engine(
        module, params.engine, lr=params.lr, total_steps=1000, warmup=params.warmup,
        min_lr_share=params.min_lr_share, weight_decay=params.weight_decay, clip_norm=params.clip_norm,
    )  # fmt: skip


def our_sft(spec: dict[str, Any], tok: Any) -> Step:
    from training import sft
    from training.batches import Tree, cannot_share
    from training.config import SftParams
    from training.logprobs import AnswerLogprobs
    from training.models import load_policy
    from training.reference import Forward

    trees = [Tree(item.tree.key, item.tree.prompt, item.tree.answers[:1]) for item in fitting(tok, spec)]
    params = SftParams(batch=spec["batch"], max_length=MAX_LENGTH, **our_settings(spec))
    model = load_policy(spec["model"], params.precision, None)
    engine = our_engine(AnswerLogprobs(model), params)
    shared = cannot_share(model) is None
    forward = Forward(engine, int(tok.pad_token_id), shared, params.token_budget, 1.0, params.precision)

    def step(number: int) -> tuple[float, float, int]:
        rows = trees[number * params.batch :][: params.batch]
        began = time.perf_counter()
        loss, _ = sft.train_step(forward, rows, params)
        engine.step()
        return time.perf_counter() - began, loss, sum(map(tokens_of, rows))

    return step


def our_reward(spec: dict[str, Any], tok: Any) -> Step:
    from training import reward
    from training.batches import cannot_share, step_rows
    from training.config import RewardParams
    from training.device import device

    params = RewardParams(
        model="policy", batch=spec["batch"], max_length=MAX_LENGTH, centring=CENTRING, **our_settings(spec)
    )
    items = fitting(tok, spec)
    pairs = [reward.Pair(item.tree.prompt, tuple(item.tree.answers), [1.0]) for item in items]
    members, kind = reward.build_members(Path(spec["model"]), params, 0)
    shared = kind == "causal" and cannot_share(members[0].backbone) is None
    engine = our_engine(reward.Ensemble(members).to(device()).train(), params)

    def step(number: int) -> tuple[float, float, int]:
        began = time.perf_counter()
        loss, _ = reward.train_step(engine, pairs, params, int(tok.pad_token_id), shared, 0, number)
        engine.step()
        seconds = time.perf_counter() - began
        rows = step_rows(len(pairs), params.batch, 0, number)
        return seconds, loss, sum(tokens_of(items[row].tree) for row in rows)

    return step


def our_dpo(spec: dict[str, Any], tok: Any) -> Step:
    """The reference is the untouched policy, so it is asked before the first update; the seconds that it
    takes for a step's rows are counted in that step."""
    from dataclasses import replace

    from training import preference
    from training.batches import cannot_share
    from training.config_optimize import OptimizeParams
    from training.logprobs import AnswerLogprobs
    from training.models import load_policy
    from training.reference import Forward, choose_layout

    params = OptimizeParams(
        algorithm="dpo", prompts=spec["batch"], beta=BETA["dpo"], temperature=1.0, **our_settings(spec)
    )
    items = fitting(tok, spec)
    model = load_policy(spec["model"], params.precision, None)
    engine = our_engine(AnswerLogprobs(model), params)
    forward = Forward(engine, int(tok.pad_token_id), True, params.token_budget, 1.0, params.precision)
    trees = [item.tree for item in items]
    shared, _ = choose_layout(forward, trees, cannot_share(model))
    forward = replace(forward, shared=shared)
    ref, asked = [], []
    for number in range(spec["steps"]):
        began = time.perf_counter()
        ref += forward.logps(trees[number * spec["batch"] :][: spec["batch"]])
        asked.append(time.perf_counter() - began)
    trainer: Any = preference.Trainer(None, params, engine, forward, items, ref, [], [])  # type: ignore[arg-type]

    def step(number: int) -> tuple[float, float, int]:
        rows = range(number * spec["batch"], (number + 1) * spec["batch"])
        began = time.perf_counter()
        sums, _ = preference.train_step(trainer, rows)
        engine.step()
        seconds = time.perf_counter() - began + asked[number]
        return seconds, sums[0], sum(tokens_of(trees[row]) for row in rows)

    return step


def our_rl(spec: dict[str, Any], tok: Any) -> Step:
    from data.records import to_line
    from training import rl as program
    from training import rl_setting
    from training.config_guards import GuardParams
    from training.config_optimize import KlParams, OptimizeParams
    from training.config_rewards import RewardsParams, ScorerParams
    from training.rundir import RunDir

    rl: Any = program  # One of its functions is replaced by one that counts.
    scorer = ScorerParams(kind="function", name="vowels", path="infra.bench.work:vowels")
    off = [name for name, field in GuardParams.model_fields.items() if type(None) in _parts(field.annotation)]
    in_loss = spec["task"] == "grpo"
    params = OptimizeParams(
        algorithm=spec["task"], prompts=spec["batch"], group=GROUP, max_new_tokens=NEW_TOKENS, steps=1000,
        beta=BETA[spec["task"]], held_out=0, checkpoint_every=1000,
        kl=KlParams(where="loss" if in_loss else "reward", estimator="k3" if in_loss else "k1"),
        rewards=RewardsParams(scorers=(scorer,), penalty=0.0),
        guards=GuardParams.model_validate(dict.fromkeys(off)), **our_settings(spec),
    )  # fmt: skip
    folder = Path(spec["folder"]) / "ours"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(map(to_line, prompt_rows(spec))), encoding="utf-8")
    inputs = {"model": spec["model"], "prompts": str(folder / "prompts.jsonl")}
    config = {
        "stage": "bench", "program": "training.rl", "seed": 0, "inputs": inputs,
        "params": params.model_dump(mode="json"),
    }  # fmt: skip
    setting = rl_setting.set_up(RunDir(folder, 0, config))
    # Neither side writes checkpoints here.
    setting.checkpoints.save = lambda *args, **kwargs: None  # type: ignore[method-assign]
    _, state = rl.begin(setting)
    generated: list[int] = []
    gather = rl.gather

    def counting(*args: Any) -> Any:
        found = gather(*args)
        generated.append(sum(map(tokens_of, found.trees)))
        return found

    rl.gather = counting

    def step(number: int) -> tuple[float, float, int]:
        began = time.perf_counter()
        rl.step_once(setting, state, number + 1)
        decoding.append(setting.clock.seconds["generate"])
        return time.perf_counter() - began, state["history"][-1]["loss"], generated[-1]

    return step


def _parts(annotation: Any) -> tuple[Any, ...]:
    from typing import get_args

    return get_args(annotation)


OURS = {"sft": our_sft, "reward": our_reward, "dpo": our_dpo, "grpo": our_rl, "rloo": our_rl}
