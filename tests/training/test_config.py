from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from training import config, config_guards, config_optimize, config_rewards
from training.config import EngineParams, RewardParams, Section, SftParams
from training.config_guards import GuardParams
from training.config_optimize import ClipParams, OptimizeParams
from training.config_rewards import RewardsParams, ScorerParams
from training.guards import GUARDS

FUNCTION = {"kind": "function", "name": "f", "path": "a:b"}
SECTIONS = [
    value
    for module in (config, config_guards, config_optimize, config_rewards)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Section) and value.__module__ == module.__name__
    if value is not Section
]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_says_what_it_is(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        assert nested or field.description or name in {"scorers"}, f"{section.__name__}.{name}"


@pytest.mark.parametrize("section", [SftParams, RewardParams, OptimizeParams])
def test_defaults_survive_json(section: type[BaseModel]) -> None:
    assert section.model_validate(json.loads(section().model_dump_json())) == section()


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        (SftParams, {"learning_rate": 1e-4}, "learning_rate"),
        (SftParams, {"lr": "1e-4"}, "lr"),
        (SftParams, {"epochs": True}, "epochs"),
        *(
            (section, {key: value}, f"{key}\n.*less than or equal to")
            for section in (SftParams, RewardParams, OptimizeParams)
            for key, value in (("lr", 1.5), ("processes", 10**6), ("threads", 2000))
        ),
        (SftParams, {"lr": float("nan")}, "lr"),
        (SftParams, {"max_length": 256, "max_prompt": 256}, "no token is left for the answer"),
        (EngineParams, {"backend": "torch", "zero": 2}, "backend: deepspeed"),
        (EngineParams, {"offload": True}, "zero >= 1"),
        (EngineParams, {"zero": True}, "True is no ZeRO stage"),
        (RewardParams, {"heads": ["safety", "safety"]}, "twice"),
        (RewardParams, {"process": {}}, "both directions"),
        (RewardParams, {"process": {}, "model": "policy", "margin": 0.5}, "margin belong to pairs"),
        (
            RewardParams,
            {"process": {}, "model": "policy", "heads": ["a"], "smoothing": 0.1},
            "heads, smoothing",
        ),
        (RewardParams, {"process": {"split": "word"}, "model": "policy"}, "split"),
        (OptimizeParams, {"kl": {"where": "loss", "estimator": "k1"}}, "no gradient"),
        (OptimizeParams, {"algorithm": "grpo", "kl": {"estimator": "k1"}}, "set kl.where: reward"),
        (OptimizeParams, {"group": 1}, "group must be >= 2"),
        (OptimizeParams, {"algorithm": "dpo", "beta": 0.0}, "beta > 0"),
        (OptimizeParams, {"algorithm": "online_dpo", "beta": 0.0}, "online_dpo needs beta > 0"),
        (OptimizeParams, {"prompts": 5, "processes": 2, "ppo": {"minibatches": 3}}, "5 prompts, 2 processes"),
        (OptimizeParams, {"rewards": {"overlong_buffer": 65}}, r"overlong_buffer \(65\).*lower it"),
        (OptimizeParams, {"rewards": {"length_factor": 0.5}}, r"length_factor \(0.5\).*at least 1, or 0"),
        (OptimizeParams, {"algorithm": "ppo", "ppo": {"value_warmup": 40}}, r"value_warmup \(40\)"),
        (
            OptimizeParams,
            {"algorithm": "ppo", "group": 1, "rewards": {"normalise": "group"}},
            "makes every reward 0",
        ),
        (GuardParams, {"actions": {"kul": "stop"}}, "no guard called kul; there are clipped"),
        (GuardParams, {"actions": {"window": "stop"}}, "no guard called window"),
        (RewardsParams, {"weights": {"quality": 0.0}}, "no reward at all"),
        (RewardsParams, {"weights": {}}, "no reward at all"),
        (RewardsParams, {"weights": {"quality": 1.0, "style": -0.1}}, r"'style': -0.1.*>= 0"),
        (RewardsParams, {"scorers": [FUNCTION | {"dimension": "style"}]}, "no weight for"),
        (RewardsParams, {"scorers": [FUNCTION, FUNCTION]}, "stands twice"),
        (
            ScorerParams,
            {"kind": "http", "name": "h", "path": "ftp://host/x"},
            "scorer h: path must be an http",
        ),
        (ScorerParams, {"kind": "http", "name": "h", "path": "http://"}, "scorer h: path"),
        (ScorerParams, {"kind": "http", "name": "h", "path": "http://u:secret@host"}, "without a user name"),
        (ScorerParams, {"kind": "http", "name": "h"}, "scorer h: path"),
        (ScorerParams, {"kind": "function", "name": "f"}, "names no function"),
        (ScorerParams, {"kind": "function", "name": "f", "path": "module.callable"}, "names no function"),
    ],
)
def test_impossible_values_are_refused(section: type[BaseModel], values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        section.model_validate(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *(({"algorithm": name}, ("reward", "k1", 0.05)) for name in ("ppo", "rloo", "reinforce_pp")),
        *(({"algorithm": name}, ("loss", "k2", 0.05)) for name in ("grpo", "dr_grpo", "gspo", "cispo")),
        ({"algorithm": "dapo"}, ("loss", "k2", 0.0)),
        ({"algorithm": "dapo", "beta": 0.3}, ("loss", "k2", 0.3)),
        ({"algorithm": "grpo", "kl": {"where": "reward"}}, ("reward", "k1", 0.05)),
        ({"algorithm": "grpo", "kl": {"estimator": "k3"}}, ("loss", "k3", 0.05)),
        ({"algorithm": "ppo", "kl": {"where": "loss"}}, ("loss", "k2", 0.05)),
    ],
)
def test_kl_goes_where_the_algorithm_has_it(values: dict[str, Any], expected: tuple[str, str, float]) -> None:
    params = OptimizeParams.model_validate(values)
    assert (params.kl_where, params.kl_estimator, params.beta) == expected
    again = OptimizeParams.model_validate(json.loads(params.model_dump_json()))
    assert again == params


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        *(({"algorithm": name}, 0.2, 0.2) for name in ("ppo", "rloo", "grpo", "cispo", "dpo")),
        ({"algorithm": "dapo"}, 0.2, 0.28),
        ({"algorithm": "gspo"}, 3e-4, 4e-4),
        ({"algorithm": "gspo", "clip": {"high": 0.01}}, 3e-4, 0.01),
        ({"algorithm": "gspo", "clip": {"low": 0.2, "high": 0.2}}, 0.2, 0.2),
        ({"algorithm": "dapo", "clip": {"dual": 3.0}}, 0.2, 0.28),
        ({"algorithm": "dapo", "clip": ClipParams()}, 0.2, 0.2),
    ],
)
def test_a_clip_that_is_left_out_is_that_of_the_paper(
    values: dict[str, Any], low: float, high: float
) -> None:
    params = OptimizeParams.model_validate(values)
    assert (params.clip.low, params.clip.high) == (low, high)
    assert OptimizeParams.model_validate(json.loads(params.model_dump_json())) == params


def test_every_guard_can_be_given_an_action_and_the_bounds_of_a_run_on_pairs_are_not_read() -> None:
    assert GuardParams(actions=dict.fromkeys(GUARDS, "warn")).actions.keys() == GUARDS.keys()
    unread = {"rewards": {"overlong_buffer": 65, "normalise": "group"}, "group": 1}
    assert OptimizeParams.model_validate({"algorithm": "dpo", **unread}).group == 1
    edge = OptimizeParams.model_validate({"rewards": {"overlong_buffer": 64}, "max_new_tokens": 64})
    assert edge.rewards.overlong_buffer == 64


def test_sections_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SftParams().lr = 1.0  # type: ignore[misc]


def test_a_mini_batch_a_prompt_is_the_most_and_orpo_needs_no_beta() -> None:
    most = {"prompts": 5, "processes": 2, "ppo": {"minibatches": 2}}
    assert OptimizeParams.model_validate(most).ppo.minibatches == 2
    assert OptimizeParams(algorithm="orpo", beta=0.0).beta == 0.0


def test_ppo_may_have_a_single_sample() -> None:
    assert OptimizeParams(algorithm="ppo", group=1).group == 1


@pytest.mark.parametrize(
    ("section", "values", "text"),
    [
        (SftParams, {"engine": {"zero": 3, "tensor_parallel": 2}}, "zero: 1 or 2"),
        (SftParams, {"engine": {"zero": 0, "tensor_parallel": 2}}, "zero: 1 or 2"),
        (SftParams, {"engine": {"backend": "torch", "tensor_parallel": 2}}, "backend: deepspeed"),
        (SftParams, {"engine": {"zero": 1, "tensor_parallel": 2}, "processes": 3}, "must divide processes"),
        (SftParams, {"engine": {"zero": 1, "tensor_parallel": 2}, "processes": 2}, "set lora: null"),
        (RewardParams, {"engine": {"zero": 1, "tensor_parallel": 2}}, "set it to 1 for a reward model"),
        (
            OptimizeParams,
            {"engine": {"zero": 1, "tensor_parallel": 2}, "processes": 2, "lora": None},
            "sample the same answers",
        ),
    ],
)
def test_what_a_model_in_parts_does_not_go_with(
    section: type[Any], values: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValidationError, match=text):
        section.model_validate(values)


def test_a_model_in_parts_goes_with_sft_and_pairs() -> None:
    parts = {"engine": {"zero": 2, "tensor_parallel": 2}, "processes": 4, "lora": None}
    assert SftParams.model_validate(parts).engine.tensor_parallel == 2
    assert OptimizeParams.model_validate({**parts, "algorithm": "dpo"}).processes == 4
