from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import ConfigurationError, DataError, InfrastructureError, Stopped
from data.records import Preference, read_records, to_line
from tests.training.tiny import llama, prompt, run_program, save_encoder, save_policy, workdir, write_pairs
from training import reward
from training.config import GateParams, RewardParams
from training.reward import decide, encode_pairs, freeze, head_weights, length_baseline, micro_batches
from training.score import ScoreModel, load_backbone, load_score_tokenizer

PARAMS: dict[str, Any] = {
    "lr": 5e-3, "epochs": 4, "batch": 8, "token_budget": 512, "max_length": 64, "precision": "fp32",
    "checkpoint_every": 3, "engine": {"backend": "torch"},
}  # fmt: skip


def prepare(folder: Path, kind: str = "encoder", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {"pairs": folder / "pairs.jsonl", "test": folder / "test.jsonl"}
    write_pairs(inputs["pairs"], 24)
    write_pairs(inputs["test"], 40)
    if kind == "encoder":
        model = str(save_encoder(folder / "encoder"))
    else:
        model, inputs["model"] = "policy", save_policy(folder / "policy")
    return workdir(folder / "run", "reward", {**PARAMS, "model": model, **changes}, inputs)


def run(path: Path, stop_at: int | None = None) -> dict[str, Any]:
    return run_program(reward.main, path, stop_at)


def pair(chosen: str, rejected: str, dimension: str | None = None, weight: float = 1.0) -> Preference:
    return Preference(
        prompt=prompt("q"),
        id="x",
        group="x",
        chosen=chosen,
        rejected=rejected,
        dimension=dimension,
        weight=weight,
    )


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_it_learns_the_preference_and_opens_the_gate(tmp_path: Path, kind: str) -> None:
    result = run(prepare(tmp_path, kind))
    assert result["loss_first"] == pytest.approx(math.log(2), abs=0.25)
    assert result["accuracy"] > 0.9 and result["margin_mean"] > 0 and result["gate"]["open"]
    low, high = result["interval"]
    assert 0.5 < low <= result["accuracy"] <= high + 1e-12 and result["n"] == 40
    assert result["length_baseline"] == 0.5 and 0 <= result["calibration"]["ece"] < 0.5
    assert set(result["dimensions"]) == {"quality", "safety"}
    model = ScoreModel.load(tmp_path / "run" / "model")
    good, bad = model.score([(prompt("is it 99?"), "yes.."), (prompt("is it 99?"), "no!..")]).tolist()
    assert good > bad


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_heads_members_and_adapters(tmp_path: Path, kind: str) -> None:
    changes = {
        "heads": ["quality", "safety"],
        "members": 2,
        "lora": {"rank": 4} if kind == "causal" else None,
    }
    result = run(prepare(tmp_path, kind, **changes))
    assert result["accuracy"] > 0.9
    model = ScoreModel.load(tmp_path / "run" / "model")
    assert model.heads == ("quality", "safety") and len(model.members) == 2
    scores = model.score_members([(prompt("is it 1?"), "yes")])
    assert scores.shape == (2, 1, 2) and not torch.allclose(scores[0], scores[1]), "members differ"


def test_shuffled_labels_keep_the_gate_shut(tmp_path: Path) -> None:
    path = prepare(tmp_path, epochs=1)
    coin = random.Random(0)
    for name in ("pairs", "test"):
        file = tmp_path / f"{name}.jsonl"
        rows = list(read_records(file, Preference))
        flipped = [
            row.model_copy(update={"chosen": row.rejected, "rejected": row.chosen})
            if coin.random() < 0.5
            else row
            for row in rows
        ]
        file.write_text("".join(map(to_line, flipped)))
    result = run(path)
    assert result["status"] == "trained" and not result["gate"]["open"]
    assert "not better than" in result["gate"]["reason"]


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    whole = run(prepare(tmp_path / "whole", members=2))
    path = prepare(tmp_path / "cut", members=2)
    with pytest.raises(Stopped):
        run(path, stop_at=5)
    assert run(path) == whole
    assert (path / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "run" / "metrics.jsonl"
    ).read_bytes()


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_micro_batches_do_not_change_the_run(tmp_path: Path, kind: str) -> None:
    save_no_dropout(tmp_path / "model")
    losses = []
    for name, budget in (("a", 1), ("b", 10_000)):
        path = prepare(tmp_path / name, kind, token_budget=budget, epochs=1, clip_norm=1e9)
        config = json.loads((path / "config.json").read_text())
        if kind == "encoder":
            config["params"]["model"] = str(tmp_path / "model")
        (path / "config.json").write_text(json.dumps(config))
        run(path)
        losses.append(
            [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def save_no_dropout(folder: Path) -> None:
    save_encoder(folder)
    config = json.loads((folder / "config.json").read_text())
    config["hidden_dropout_prob"] = config["attention_probs_dropout_prob"] = 0.0
    (folder / "config.json").write_text(json.dumps(config))


def test_both_answers_see_the_same_prompt(tmp_path: Path) -> None:
    source = save_encoder(tmp_path / "e")
    tok = load_score_tokenizer(source, "encoder")
    row = Preference(prompt=prompt("p" * 100), id="x", group="x", chosen="short", rejected="long " * 6)
    [encoded] = encode_pairs(tok, "encoder", [row], RewardParams(max_length=48))
    assert len(encoded.prompt) + max(map(len, encoded.answers)) == 48
    assert encoded.prompt[0] == tok.cls_token_id and encoded.prompt[-1] == tok.sep_token_id


def test_pairs_are_never_parted(tmp_path: Path) -> None:
    tok = load_score_tokenizer(save_encoder(tmp_path / "e"), "encoder")
    pairs = encode_pairs(tok, "encoder", [pair("a" * n, "b") for n in range(1, 9)], RewardParams())
    parts = micro_batches(pairs, [7, 1, 3, 5], 40, shared=False)
    assert sorted(index for part in parts for index in part) == [1, 3, 5, 7]


def test_a_pair_teaches_the_head_of_its_dimension() -> None:
    heads = ("quality", "safety")
    assert head_weights(heads, pair("a", "b", "safety", 2.0)) == [0.0, 2.0]
    assert head_weights(heads, pair("a", "b", "style")) == [0.5, 0.5] == head_weights(heads, pair("a", "b"))
    assert head_weights((), pair("a", "b", "safety", 3.0)) == [3.0]


def test_the_length_baseline_takes_its_rule_from_the_training_pairs() -> None:
    longer, shorter, same = pair("aaa", "b"), pair("a", "bbb"), pair("a", "b")
    assert length_baseline([longer, longer, shorter], [longer, shorter, shorter, same]) == ("longer", 0.375)
    assert length_baseline([shorter, same], [longer, shorter, shorter, same]) == ("shorter", 0.625)


@pytest.mark.parametrize(
    ("accuracy", "lower", "n", "baseline", "opens", "says"),
    [
        (0.7, 0.61, 100, 0.55, True, "lower end 0.610"),
        (0.55, 0.49, 100, 0.5, False, "chance"),
        (0.5, 0.5, 100, 0.4, False, "chance"),
        (0.6, 0.51, 100, 0.6, False, "length"),
        (0.9, 0.7, 29, 0.5, False, "min_pairs"),
    ],
)
def test_the_gate(accuracy: float, lower: float, n: int, baseline: float, opens: bool, says: str) -> None:
    verdict = decide(accuracy, lower, n, baseline, GateParams())
    assert verdict["open"] is opens and says in verdict["reason"]


def test_the_length_gate_can_be_turned_off() -> None:
    assert decide(0.6, 0.51, 100, 0.7, GateParams(beat_length=False))["open"]


def test_a_head_that_was_not_saved_is_found(tmp_path: Path) -> None:
    run(prepare(tmp_path))
    folder = tmp_path / "run" / "model"
    live, saved = ScoreModel.load(folder), ScoreModel.load(folder)
    with torch.no_grad():
        saved.members[0].head.normal_()
    with pytest.raises(InfrastructureError, match="scores differ"):
        reward.check_round_trip(
            live, saved, lambda model: reward.pair_scores(model, [pair("yes", "no")]), 1e-3
        )


def test_frozen_layers_stay_as_they_are(tmp_path: Path) -> None:
    result = run(prepare(tmp_path, frozen_layers=1))
    assert result["accuracy"] > 0.8
    before = load_backbone(tmp_path / "encoder")[0].state_dict()
    after = load_backbone(tmp_path / "run" / "model" / "member-0")[0].state_dict()
    same = {name for name in after if torch.equal(before[name], after[name])}
    assert all((name in same) == (not name.startswith("encoder.layer.1.")) for name in after)
    model = llama()
    freeze(model.model, 1)
    assert model.model.norm.weight.requires_grad and not model.model.embed_tokens.weight.requires_grad
    with pytest.raises(ConfigurationError, match="of 2 layers"):
        freeze(model.model, 2)


def test_nothing_held_out_is_a_data_error(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    (tmp_path / "test.jsonl").write_text("")
    with pytest.raises(DataError, match="0 held out"):
        run(path)
