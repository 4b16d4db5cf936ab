"""What the doctor sees before a run: dead settings, memory by formula, records and their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.errors import ConfigurationError
from data.records import Message, Preference
from flows import memory, records
from flows.dead import dead
from tasks.params import Params
from training import chat
from training.config import LoraParams, RewardParams, SftParams
from training.config_optimize import OptimizeParams

FREE = {"ppo": {"updates": 2}}
OWN = {"kind": "learned", "name": "r", "path": "x"}
FUNCTION = {"kind": "function", "name": "f", "path": "a:b"}
OTHER = {"kind": "function", "name": "s", "path": "a:b", "dimension": "s"}
LIVE_AND_DEAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # optimize with the setting alive, with it dead, the key that is told
    ({"algorithm": "rloo", "max_new_tokens": 9}, {"algorithm": "dpo", "max_new_tokens": 9}, "max_new_tokens"),
    ({"kl": {"estimator": "k2"}}, {"algorithm": "dpo", "kl": {"estimator": "k2"}}, "kl.estimator"),
    ({"algorithm": "dpo", "preference": {"epochs": 2}}, {"preference": {"epochs": 2}}, "preference.epochs"),
    (
        {"algorithm": "cdpo", "preference": {"smoothing": 0.1}},
        {"algorithm": "dpo", "preference": {"smoothing": 0.1}},
        "preference.smoothing",
    ),
    (
        {"algorithm": "simpo", "preference": {"gamma": 2.0}},
        {"algorithm": "orpo", "preference": {"gamma": 2.0}},
        "preference.gamma",
    ),
    (
        {"algorithm": "orpo", "preference": {"lam": 0.2}},
        {"algorithm": "simpo", "preference": {"lam": 0.2}},
        "preference.lam",
    ),
    (
        {"algorithm": "kto", "preference": {"desirable": 2.0}},
        {"algorithm": "ipo", "preference": {"desirable": 2.0}},
        "preference.desirable",
    ),
    ({"held_out_every": 2}, {"held_out": 0, "held_out_every": 2}, "held_out_every"),
    ({"algorithm": "dapo", "rounds": 2}, {"algorithm": "grpo", "rounds": 2}, "rounds"),
    ({"algorithm": "ppo", "ppo": {"lam": 0.9}}, {"ppo": {"lam": 0.9}}, "ppo.lam"),
    ({"algorithm": "ppo", "ppo": {"gamma": 0.9}}, {"ppo": {"gamma": 0.9}}, "ppo.gamma"),
    ({"ppo": {"updates": 2}}, {"algorithm": "online_dpo", "ppo": {"updates": 2}}, "ppo.updates"),
    ({"kl": {"where": "loss", "estimator": "k2"}},
     {"algorithm": "online_dpo", "kl": {"where": "loss", "estimator": "k2"}}, "kl.where"),
    ({**FREE, "clip": {"low": 0.1}}, {**FREE, "algorithm": "cispo", "clip": {"low": 0.1}}, "clip.low"),
    ({**FREE, "clip": {"dual": 3.0}}, {**FREE, "algorithm": "gspo", "clip": {"dual": 3.0}}, "clip.dual"),
    ({**FREE, "clip": {"high": 0.28}}, {"clip": {"high": 0.28}}, "clip.high"),
    ({**FREE, "algorithm": "ppo", "clip": {"value": None}}, {**FREE, "clip": {"value": None}}, "clip.value"),
    ({"kl": {"adaptive": True, "horizon": 9}}, {"kl": {"horizon": 9}}, "kl.horizon"),
    (
        {"rewards": {"cap": 1.0, "scorers": [{"kind": "learned", "name": "r", "floor": 0.0}]}},
        {"rewards": {"cap": 1.0}},
        "rewards.cap",
    ),
    (
        {"rewards": {"ensemble": "uncertainty", "ensemble_lam": 2.0, "scorers": [OWN]}},
        {"rewards": {"ensemble": "worst", "ensemble_lam": 2.0, "scorers": [OWN]}},
        "rewards.ensemble_lam",
    ),
    (
        {"rewards": {"timeout": 3.0, "scorers": [{"kind": "function", "name": "f", "path": "a:b"}]}},
        {"rewards": {"timeout": 3.0}},
        "rewards.timeout",
    ),
    ({"guards": {"gap_every": 2}}, {"guards": {"gap": None, "gap_every": 2}}, "guards.gap_every"),
    (
        {"generator": {"kind": "vllm", "canaries": 2}},
        {"generator": {"canaries": 2}},
        "generator.canaries",
    ),
    ({"kl": {"adaptive": True}}, {"algorithm": "dpo", "kl": {"adaptive": True}}, "kl.adaptive"),
    (
        {
            "rewards": {
                "weights": {"quality": 2.0, "s": 1.0},
                "scorers": [OWN, {**OWN, "name": "s", "dimension": "s"}],
            }
        },
        {"rewards": {"weights": {"quality": 2.0}}},
        "rewards.weights.quality",
    ),
    ({"generator": {"kind": "vllm", "sleep": False}}, {"generator": {"sleep": False}}, "generator.sleep"),
    (
        {"generator": {"kind": "vllm", "mode": "server", "url": "http://h:1", "requests": 2}},
        {"generator": {"kind": "vllm", "requests": 2}},
        "generator.requests",
    ),
    ({"beta": 0.2}, {"algorithm": "orpo", "beta": 0.2}, "beta"),
    (
        {"algorithm": "ppo", "guards": {"value_loss": 9.0}},
        {"guards": {"value_loss": 9.0}},
        "guards.value_loss",
    ),
    ({"kl": {"target": 2.0}}, {"kl": {"target": 2.0}, "guards": {"kl": None}}, "kl.target"),
    ({"guards": {"window": 40}}, {"guards": {"window": 41}}, "guards.window"),
    ({"steps": 5}, {"steps": 4}, "guards.window"),
    (
        {"algorithm": "cdpo", "preference": {"smoothing": 0.1}},
        {"algorithm": "cdpo"},
        "algorithm",
    ),
    (
        {"algorithm": "robust_dpo", "preference": {"smoothing": 0.1}},
        {"algorithm": "robust_dpo"},
        "algorithm",
    ),
    (
        {"rewards": {"weights": {"quality": 2.0, "s": 1.0}, "scorers": [FUNCTION, OTHER]}},
        {"rewards": {"weights": {"quality": 2.0, "s": 1.0, "t": 1.0}, "scorers": [FUNCTION, OTHER]}},
        "rewards.weights.t",
    ),
    (
        {"guards": {"actions": {"length": "stop"}}},
        {"guards": {"length": None, "actions": {"length": "stop"}}},
        "guards.actions.length",
    ),
    ({"processes": 2, "engine": {"zero": 2}}, {"engine": {"zero": 2}}, "engine.zero"),
]  # fmt: skip


def test_a_model_of_steps_has_no_pair_to_centre() -> None:
    model: dict[str, Any] = {"model": "policy", "centring": 0.5}
    assert not list(dead(Params.model_validate({"reward": model})))
    [found] = dead(Params.model_validate({"reward": {**model, "process": {}}}))
    assert found.startswith("reward.centring (reward.process")


@pytest.mark.parametrize(("alive", "gone", "key"), LIVE_AND_DEAD)
def test_a_setting_is_dead_only_where_nobody_reads_it(
    alive: dict[str, Any], gone: dict[str, Any], key: str
) -> None:
    def told(optimize: dict[str, Any]) -> list[str]:
        return [
            text
            for text in dead(Params.model_validate({"optimize": optimize}))
            if f"optimize.{key} (" in text
        ]

    assert told(alive) == []
    assert len(told(gone)) == 1


@pytest.mark.parametrize("algorithm", ["dapo", "gspo", "rloo", "kto"])
def test_a_default_of_the_algorithm_is_no_dead_setting(algorithm: str) -> None:
    assert list(dead(Params.model_validate({"optimize": {"algorithm": algorithm}}))) == []


def test_dead_settings_outside_optimize() -> None:
    def told(**params: Any) -> list[str]:
        return [text.split(" (")[0] for text in dead(Params.model_validate(params))]

    assert told() == []
    for name in ("sft", "reward", "judge"):
        assert told(**{name: {"engine": {"zero": 1}}}) == [f"{name}.engine.zero"]
        assert told(**{name: {"processes": 2, "engine": {"zero": 1}}}) == []
        assert told(**{name: {"engine": {"zero": 1, "offload": True}}}) == []
    assert told(model={"source": "gguf:a", "revision": "main"}) == ["model.revision"]
    assert told(model={"source": "owner/name", "revision": "main"}) == []
    assert told(reward={"lora": {}}) == []
    for name in ("reward", "judge"):
        assert told(**{name: {"model": "policy", "pooling": "answer"}}) == [f"{name}.pooling"]
        assert told(**{name: {"pooling": "answer"}}) == []
        assert told(**{name: {"lora": {}, "frozen_layers": 2}}) == [f"{name}.frozen_layers"]
    assert told(sft={"stop_check": 2, "engine": {"zero": 3}, "processes": 2}) == ["sft.stop_check"]
    heads = {"heads": ["quality", "safety"]}
    weights = {"quality": 2.0, "safety": 1.0}
    assert told(reward=heads, optimize={"rewards": {"weights": weights}}) == []
    named = {"kind": "learned", "name": "r", "dimension": "safety"}
    assert told(reward=heads, optimize={"rewards": {"scorers": [named]}}) == [
        "optimize.rewards.scorers, r: dimension"
    ]
    assert told(reward=heads, optimize={"rewards": {"scorers": [{**named, "floor": 0.0}]}}) == []
    assert told(reward={"members": 2}, optimize={"rewards": {"ensemble": "worst"}}) == []
    assert told(optimize={"rewards": {"ensemble": "worst"}}) == ["optimize.rewards.ensemble"]


# -- memory ------------------------------------------------------------------------------------------------

SMOL = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
FP32: dict[str, memory.Precision] = dict.fromkeys(("sft", "reward", "judge", "optimize", "evaluate"), "fp32")


def shape() -> memory.Shape:
    found = memory.shape_of(SMOL)
    assert found is not None
    return found


def test_weights_of_a_known_model() -> None:
    assert shape().parameters == 134_515_008  # what the base stage counts of SmolLM2-135M
    assert memory.shape_of({"n_embd": 768}) is None
    # rank 1, attention only, one layer: q 576+576, k and v 576+192 each, o 576+576
    assert shape().adapters(LoraParams(rank=1, target="attention", layers=1)) == 2 * 1152 + 2 * 768
    assert shape().adapters(LoraParams(rank=1, layers=1)) == 3840 + 3 * (576 + 1536)
    assert shape().adapters(LoraParams(rank=1, layers=99)) == 30 * (3840 + 3 * (576 + 1536))


def need(section: Any, precision: memory.Precision = "fp32") -> dict[str, float]:
    return dict(memory.training(shape(), section, "sft", precision).parts)


def test_full_fine_tune_by_hand_and_sharded() -> None:
    p = 134_515_008.0
    full = need(SftParams(lora=None, token_budget=10))
    assert (full["weights"], full["gradients"], full["optimizer"]) == (4 * p, 4 * p, 8 * p)
    assert full["activations"] == 10 * 30 * 4 * (7 * 576 + 3 * 192 + 4 * 1536)
    assert full["logits"] == 12 * 128 * 49152
    assert need(SftParams(lora=None), "bf16")["weights"] == 6 * p
    for zero, parts in ((1, (4, 4, 2)), (2, (4, 1, 2)), (3, (1, 1, 2))):
        got = need(SftParams.model_validate({"lora": None, "processes": 4, "engine": {"zero": zero}}))
        assert (got["weights"] / p, got["gradients"] / p, got["optimizer"] / p) == parts
    off = need(SftParams.model_validate({"lora": None, "engine": {"zero": 1, "offload": True}}))
    assert off["optimizer"] == 0
    slim = need(
        SftParams.model_validate(
            {"lora": None, "token_budget": 10, "engine": {"gradient_checkpointing": True}}
        )
    )
    assert slim["activations"] == 10 * 4 * (576 * 30 + 7 * 576 + 3 * 192 + 4 * 1536)


def test_adapters_a_reward_model_and_the_sampler() -> None:
    p, a = 134_515_008.0, float(shape().adapters(LoraParams(layers=2)))
    adapted = need(SftParams(lora=LoraParams(layers=2), token_budget=10), "bf16")
    assert (adapted["weights"], adapted["optimizer"]) == (2 * p + 4 * a, 8 * a)
    assert adapted["activations"] == 10 * 2 * 2 * (7 * 576 + 3 * 192 + 4 * 1536)
    packed = need(SftParams.model_validate({"lora": {"quantise": "nf4"}}), "bf16")
    assert packed["weights"] < 0.5 * p + 4 * 10e6
    scored = need(RewardParams(model="policy", frozen_layers=10, token_budget=10))
    assert "logits" not in scored
    assert scored["activations"] == 10 * 20 * 4 * (7 * 576 + 3 * 192 + 4 * 1536)
    by_stage = {
        one.stage: one.parts
        for one in memory.estimate(
            Params(optimize=OptimizeParams(lora=None, prompts=2, group=3, max_prompt=90, max_new_tokens=10)),
            shape(),
            FP32,
        )
    }
    assert by_stage["optimize"]["reference"] == 4 * p
    assert by_stage["optimize"]["cache"] == 2 * 4 * 192 * 30 * 6 * 100
    assert list(by_stage) == ["sft", "reward", "judge", "optimize", "evaluate"]
    pairs = memory.estimate(Params(optimize=OptimizeParams(algorithm="dpo", lora=None)), shape(), FP32)[
        3
    ].parts
    assert "cache" not in pairs and "reference" not in pairs


def test_the_largest_demand_counts_what_runs_side_by_side() -> None:
    needs = [
        memory.Need("sft", 2, {"a": 3.0}),
        memory.Need("reward", 1, {"a": 4.0}),
        memory.Need("optimize", 1, {"a": 9.0}),
    ]
    both = memory.at_once(needs, 2, shared=True)
    assert (both.stage, both.rank) == ("sft with reward", 10.0)
    assert memory.at_once(needs, 1, shared=True).stage == "optimize"
    assert memory.at_once(needs, 2, shared=False).rank == 9.0


# -- records -----------------------------------------------------------------------------------------------


def write(folder: Path, rows: list[dict[str, Any]]) -> Params:
    (folder / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Params.model_validate({"data": {"files": ["r.jsonl"], "min_pairs": 2}})


GOOD = {"prompt": "hello", "chosen": "a good answer", "rejected": "bad"}


def test_records_are_counted_and_judged(tmp_path: Path) -> None:
    params = write(tmp_path, [GOOD, {**GOOD, "prompt": "other"}])
    seen = records.read(tmp_path, params.data)
    assert len(seen.pairs) == 2
    fine = records.counted(seen, params.data)
    assert (fine.verdict, fine.seen) == ("fine", "2 preference; 0 rows refused")
    params = write(tmp_path, [GOOD, {"prompt": "x", "chosen": 3, "rejected": "y"}])
    few = records.counted(records.read(tmp_path, params.data), params.data)
    assert (few.verdict, few.kind) == ("broken", "data")
    assert "1 rows refused" in few.seen and "r.jsonl:2" in few.seen
    params = write(tmp_path, [GOOD, {**GOOD, "prompt": "b"}, {"prompt": "x", "chosen": 3, "rejected": "y"}])
    assert records.counted(records.read(tmp_path, params.data), params.data).verdict == "look"


def test_a_source_longer_than_what_is_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ITEMS", 1)
    params = write(tmp_path, [GOOD, {**GOOD, "prompt": "other"}])
    seen = records.read(tmp_path, params.data)
    assert not seen.whole
    found = records.counted(seen, params.data)
    assert (found.verdict, found.seen) == ("fine", "1 preference; 0 rows refused (first 1 items)")


class Letters:
    """A tokenizer's place; what counts tokens is replaced by tests."""


def test_token_lengths_against_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "preflight", lambda tok, prompt, answer: None)
    monkeypatch.setattr(chat, "encode_prompt", lambda tok, prompt: list(prompt[0].content))
    monkeypatch.setattr(chat, "encode_answer", lambda tok, text: list(text))
    pairs = [
        Preference(
            prompt=(Message(role="user", content="p" * n),),
            chosen="c" * 7,
            rejected="r",
            id=str(n),
            group="g",
            source="x:1",
        )
        for n in range(1, 21)
    ]
    params = Params.model_validate(
        {"sft": {"max_prompt": 19, "max_length": 26}, "optimize": {"max_new_tokens": 7}}
    )
    found = {one.what: one for one in records.tokens(params, Letters(), pairs)}  # type: ignore[arg-type]
    assert (found["tokens"].verdict, found["tokens"].seen) == (
        "fine",
        "prompt 11, longest 20; answer 7, longest 7",
    )
    params = Params.model_validate(
        {"sft": {"max_prompt": 18, "max_length": 26}, "optimize": {"max_new_tokens": 6}}
    )
    found = {one.what: one for one in records.tokens(params, Letters(), pairs)}  # type: ignore[arg-type]
    assert found["tokens"].verdict == "look"
    assert found["tokens"].seen.endswith("10% over sft.max_prompt 18, 100% over optimize.max_new_tokens 6")

    def wrong(tok: object, prompt: object, answer: object) -> None:
        raise ConfigurationError("two BOS")

    monkeypatch.setattr(chat, "preflight", wrong)
    assert [one.verdict for one in records.tokens(params, Letters(), pairs)] == ["broken"]  # type: ignore[arg-type]


def test_templates_of_the_stages_that_are_done(tmp_path: Path) -> None:
    assert list(records.templates(tmp_path)) == []
    for stage, value in (("base", "a"), ("sft", "a")):
        folder = tmp_path / "data" / "stages" / stage
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"template_hash": value}))
    assert [one.verdict for one in records.templates(tmp_path)] == ["fine"]
    (folder / "result.json").write_text(json.dumps({"template_hash": "b"}))
    assert [one.verdict for one in records.templates(tmp_path)] == ["look"]


def test_the_tokenizer_is_the_base_stages_only_for_the_same_source(tmp_path: Path) -> None:
    made = tmp_path / "data" / "stages" / "base"
    (made / "model").mkdir(parents=True)
    (made / "model" / "tokenizer.json").write_text("{}")
    (made / "result.json").write_text('{"source": "gguf:a"}')
    assert (
        records.tokenizer_folder(tmp_path, Params.model_validate({"model": {"source": "gguf:a"}}))
        == made / "model"
    )
    assert records.tokenizer_folder(tmp_path, Params.model_validate({"model": {"source": "gguf:b"}})) is None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text("{}")
    own = Params.model_validate({"model": {"source": "mine"}})
    assert records.tokenizer_folder(tmp_path, own) == tmp_path / "mine"
    (made / "result.json").write_text('{"sour')
    assert records.tokenizer_folder(tmp_path, own) == tmp_path / "mine"
