"""The process reward model: steps are read at their ends, it learns, resumes, is published and composes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import ConfigurationError, DataError, Stopped
from data.records import Prompt, StepLabels, digest, to_line
from tests.training.tiny import byte_tokenizer, prompt, run_program, save_encoder, save_policy, workdir
from training import process
from training.config import GateParams, ProcessParams
from training.config_rewards import ScorerParams
from training.experience import build_scorers
from training.process import Verdict, decide, encode, labels_of, length_baseline, majority_baseline
from training.score import Member, ScoreModel, load_backbone, load_score_tokenizer
from training.scorers import Answered
from training.steps import encode_steps, score_steps, split_steps, step_ends

PARAMS: dict[str, Any] = {
    "process": {}, "model": "policy", "lr": 1e-2, "epochs": 5, "batch": 8, "token_budget": 512,
    "max_length": 96, "precision": "fp32", "checkpoint_every": 3, "engine": {"backend": "torch"},
}  # fmt: skip
RIGHT, WRONG = "yes", "no!"


def answer(index: int, labels: tuple[bool | None, ...], **changes: Any) -> StepLabels:
    """Right steps say yes, wrong ones no; what nobody judged says either."""
    steps = tuple(RIGHT if label or (label is None and index % 2) else WRONG for label in labels)
    return StepLabels.model_validate(
        {"prompt": prompt(f"is it {index}?"), "id": digest(str(index)), "group": str(index),
         "steps": steps, "labels": labels, **changes}
    )  # fmt: skip


def answers(count: int, start: int = 0) -> list[StepLabels]:
    patterns: list[tuple[bool | None, ...]] = [
        (True, True, False), (True,), (False, True), (True, None, False, True), (False,), (None, True),
    ]  # fmt: skip
    return [answer(start + index, patterns[index % 6]) for index in range(count)]


def write(path: Path, rows: list[StepLabels]) -> Path:
    path.write_text("".join(map(to_line, rows)), encoding="utf-8")
    return path


def prepare(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {
        "pairs": write(folder / "pairs.jsonl", answers(24)),
        "test": write(folder / "test.jsonl", answers(36, start=100)),
        "model": save_policy(folder / "policy"),
    }
    return workdir(folder / "run", "process", {**PARAMS, **changes}, inputs)


def run(path: Path, stop_at: int | None = None) -> dict[str, Any]:
    return run_program(process.main, path, stop_at)


def build(folder: Path, members: int = 1, length: int = 96, split: str = "paragraph") -> ScoreModel:
    source = save_policy(folder / "policy")
    parts = [Member(load_backbone(source)[0], "causal", 1, seed) for seed in range(members)]
    settings = {"kind": "causal", "heads": [], "members": members, "max_length": length,
                "process": {"split": split, "reduce": "product"}}  # fmt: skip
    return ScoreModel(parts, load_score_tokenizer(source, "causal"), settings, "fp32")


@pytest.mark.parametrize(
    ("text", "split", "expected"),
    [
        ("a\n\nb\nc", "paragraph", ["a", "b\nc"]),
        ("a\n\nb\nc", "line", ["a", "b", "c"]),
        (" a \n \t\n\n b\r\n\r\nc \n", "paragraph", ["a", "b", "c"]),
        ("one step", "paragraph", ["one step"]),
        (" \n\n ", "line", []),
        ("", "paragraph", []),
    ],
)
def test_an_answer_is_cut_where_the_parameter_says(text: str, split: Any, expected: list[str]) -> None:
    assert split_steps(text, split) == expected


def test_steps_are_ids_whose_ends_do_not_depend_on_what_follows() -> None:
    tok = byte_tokenizer()
    ids, parts = encode_steps(tok, prompt("q"), ["ab", " cd ", "e"], "paragraph", 96)
    assert tok.decode(ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert [tok.decode(part) for part in parts] == ["ab", "\n\ncd", "\n\ne"]
    assert step_ends(parts) == [2, 6, 9]
    assert encode_steps(tok, prompt("q"), ["ab", "cd"], "line", 96)[1] == [parts[0], parts[1][1:]]
    assert len(encode_steps(tok, prompt("q"), ["<|im_end|>"], "line", 96)[1][0]) == 10, "text stays text"


def test_what_does_not_fit_is_not_read() -> None:
    tok, steps = byte_tokenizer(), ["abcd", "efgh"]
    whole = encode_steps(tok, prompt("q"), steps, "line", 96)[0]
    ids, parts = encode_steps(tok, prompt("q"), steps, "line", 10)  # 4 + 5 + 1 of the prompt
    assert (ids, list(map(len, parts))) == (whole[-1:], [4, 5])
    ids, parts = encode_steps(tok, prompt("q"), steps, "line", 9)
    assert (ids, list(map(len, parts))) == (whole[-5:], [4])
    ids, parts = encode_steps(tok, prompt("q"), steps, "line", 4)
    assert (ids, [tok.decode(part) for part in parts]) == (whole[-1:], ["abc"]), "the first one is cut"


def test_a_score_is_that_of_the_hidden_state_at_the_steps_last_token(tmp_path: Path) -> None:
    model = build(tmp_path, members=2)
    steps = ["ab", "cde", "f"]
    found, mask = score_steps(model, [(prompt("q"), steps)])
    ids, parts = encode_steps(model.tok, prompt("q"), steps, "paragraph", 96)
    row = torch.tensor([[*ids, *(token for part in parts for token in part)]])
    for number, member in enumerate(model.members):
        with torch.no_grad():
            hidden = member.backbone(input_ids=row).last_hidden_state[0]
            at = [len(ids) + end - 1 for end in step_ends(parts)]
            expected = (hidden[at] @ member.head.T)[:, 0]
        assert torch.allclose(found[number, 0], expected, atol=1e-5)
    assert mask.tolist() == [[True, True, True]] and found.std() > 1e-3


def test_scores_are_the_same_alone_batched_shared_and_before_further_steps(tmp_path: Path) -> None:
    model = build(tmp_path)
    rows = [(prompt("q"), ["ab", "cde"]), (prompt("q"), ["f"]), (prompt("longer"), []),
            (prompt("other"), ["ab", "cde", "fg"])]  # fmt: skip
    together, mask = score_steps(model, rows)
    assert model.shared and mask.tolist() == [
        [True, True, False], [True, False, False], [False] * 3, [True, True, True]
    ]  # fmt: skip
    for index, row in enumerate(rows):
        alone = score_steps(model, [row])[0][0, 0]
        assert torch.allclose(together[0, index, : len(row[1])], alone[: len(row[1])], atol=1e-5)
    model.shared = False
    apart = score_steps(model, rows, token_budget=1)[0]
    assert torch.allclose(together[0][mask], apart[0][mask], atol=1e-5)
    more = score_steps(model, [(prompt("q"), ["ab", "cde", "and more"])])[0]
    assert torch.allclose(more[0, 0, :2], together[0, 0, :2], atol=1e-5), "no look ahead"
    none, nothing = score_steps(model, [])
    assert none.shape == (1, 0, 1) and nothing.shape == (0, 1)


def test_labels_become_tensors_with_a_mask() -> None:
    rows, _ = encode(byte_tokenizer(), answers(4), ProcessParams(), 96)
    label, mask = labels_of(rows)
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1]]
    assert label.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1]]
    assert [row.judged for row in rows] == [3, 1, 2, 3]


def test_what_is_lost_in_encoding_is_counted() -> None:
    rows = [
        answer(0, (True, False, True), steps=("a" * 30, "b" * 30, "c")),
        answer(1, (None, True), steps=("a" * 30, "b" * 40)),
        answer(2, (True, True), steps=("a\n\nb", "c")),
    ]
    found, lost = encode(byte_tokenizer(), rows, ProcessParams(), 64)
    assert [row.tree.key for row in found] == [rows[0].id, rows[2].id]
    assert found[0].labels == [True] or found[0].labels == [True, False]
    assert len(found[0].ends) == len(found[0].labels)
    assert lost == {"steps_over_max_length": 2, "answers_without_label": 1, "steps_parted_again": 1}


def test_it_learns_the_steps_and_a_scorer_multiplies_them(tmp_path: Path) -> None:
    result = run(prepare(tmp_path))
    assert result["loss_first"] == pytest.approx(math.log(2), abs=0.25)
    assert result["accuracy"] > 0.95 and result["gate"]["open"] and result["prompts"] == 36
    low, high = result["interval"]
    assert result["majority_baseline"] < low <= result["accuracy"] <= high + 1e-12
    assert result["n"] == 66 and result["answers"] == 24 and result["judged_steps"] == 44
    assert result["recall"]["right"] > 0.9 and result["recall"]["wrong"] > 0.9
    folder = tmp_path / "run" / "model"
    settings = json.loads((folder / "score.json").read_text())
    assert settings["process"] == {"split": "paragraph", "reduce": "product"}
    texts = ["yes\n\nyes", "yes\n\nno!", "no!\n\nno!", "  "]
    values = score_texts(folder, texts)
    assert values[0] > 0.7 and values[3] == 0.0, "an answer without a step is worth nothing"
    assert values[0] > values[1] > values[2] > 0
    model = ScoreModel.load(folder)
    steps, mask = score_steps(model, [(prompt("is it 7?"), split_steps(text, "paragraph")) for text in texts])
    chances = torch.where(mask, torch.sigmoid(steps[0]), 1.0)
    assert values[:3] == pytest.approx(chances.prod(1).tolist()[:3], rel=1e-5)
    (folder / "score.json").write_text(
        json.dumps({**settings, "process": {"split": "paragraph", "reduce": "minimum"}})
    )
    assert score_texts(folder, texts)[:3] == pytest.approx(chances.amin(1).tolist()[:3], rel=1e-5)
    with pytest.raises(ConfigurationError, match="scores steps"):
        model.score([(prompt("q"), "yes")])


def score_texts(folder: Path, texts: list[str]) -> list[float]:
    """What `optimize` would get from its default scorer."""
    from training.config_rewards import RewardsParams

    asked = Prompt(prompt=prompt("is it 7?"), id="x", group="x")
    [scorer] = build_scorers(RewardsParams(scorers=(ScorerParams(kind="learned", name="steps"),)), folder)
    outcomes = scorer.score([Answered(asked, text, 9, True) for text in texts])
    assert [one[0].kind for one in outcomes] == ["score"] * len(texts)
    return [one[0].value for one in outcomes]


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    whole = run(prepare(tmp_path / "whole", members=2))
    path = prepare(tmp_path / "cut", members=2)
    with pytest.raises(Stopped):
        run(path, stop_at=5)
    assert run(path) == whole
    assert (path / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "run" / "metrics.jsonl"
    ).read_bytes()
    model = ScoreModel.load(path / "model")
    scores, _ = score_steps(model, [(prompt("q"), ["yes"])])
    assert scores.shape == (2, 1, 1) and scores[0, 0, 0] != scores[1, 0, 0], "members differ"


def test_micro_batches_do_not_change_the_run(tmp_path: Path) -> None:
    losses = []
    for name, budget in (("a", 1), ("b", 10_000)):
        path = prepare(tmp_path / name, token_budget=budget, epochs=1)
        run(path)
        losses.append(
            [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_labels_without_a_rule_keep_the_gate_shut(tmp_path: Path) -> None:
    path = prepare(tmp_path, epochs=1)
    noise = [answer(200 + n, (True, False), steps=("yes", "yes")) for n in range(40)]
    write(tmp_path / "test.jsonl", noise)
    result = run(path)
    assert result["status"] == "trained" and not result["gate"]["open"]
    assert "not better than the commoner label" in result["gate"]["reason"]


def test_steps_of_one_prompt_are_one_cluster(tmp_path: Path) -> None:
    model = build(tmp_path)
    rows = [answer(n, (bool(n % 2),) * 6, steps=("yes",) * 6, prompt=prompt("q"), group=str(n // 2)) for n in
            range(40)]  # fmt: skip
    repeated = process.judge(model, rows, rows, GateParams())
    once = process.judge(
        model, rows, [row.model_copy(update={"steps": ("yes",), "labels": row.labels[:1]}) for row in rows],
        GateParams(),
    )  # fmt: skip
    assert repeated["n"] == 240 and once["n"] == 40 and repeated["prompts"] == once["prompts"] == 20
    width = [found["interval"][1] - found["interval"][0] for found in (repeated, once)]
    assert width[0] > 0.5 * width[1], "240 rows of 20 prompts know hardly more than 40"


def test_baselines_take_their_rule_from_the_training_steps() -> None:
    rows = [answer(0, (True, True, False, None), steps=("aaaa", "aaa", "a", "a"))]
    held = [Verdict(0.0, True, 1, "x"), Verdict(0.0, True, 3, "x"), Verdict(0.0, False, 9, "x"),
            Verdict(0.0, True, 2, "x")]  # fmt: skip
    assert majority_baseline(rows, held) == ("right", 0.75)
    assert length_baseline(rows, held) == ("longer", 0.25), "the median of 4, 3 and 1 is 3"
    even = [answer(0, (True, True, False), steps=("aaa", "aaa", "a"))]
    assert length_baseline(even, held)[0] == "longer", "the median itself is long"
    flipped = [answer(0, (False, False, True), steps=("aaaa", "aaa", "a"))]
    assert majority_baseline(flipped, held) == ("wrong", 0.25)
    assert length_baseline(flipped, held) == ("shorter", 0.75)


@pytest.mark.parametrize(
    ("accuracy", "lower", "prompts", "majority", "length", "opens", "says"),
    [
        (0.9, 0.81, 30, 0.8, 0.6, True, "lower end 0.810"),
        (0.9, 0.8, 30, 0.8, 0.6, False, "commoner label"),
        (0.6, 0.5, 30, 0.3, 0.2, False, "0.500 <= 0.500"),
        (0.9, 0.85, 30, 0.8, 0.9, False, "length"),
        (0.99, 0.9, 29, 0.5, 0.5, False, "min_pairs"),
    ],
)
def test_the_gate(
    accuracy: float, lower: float, prompts: int, majority: float, length: float, opens: bool, says: str
) -> None:
    verdict = decide(accuracy, lower, prompts, majority, length, GateParams())
    assert verdict["open"] is opens and says in verdict["reason"]
    assert decide(0.9, 0.85, 30, 0.8, 0.95, GateParams(beat_length=False))["open"]


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    path = prepare(tmp_path, model=str(save_encoder(tmp_path / "encoder")))
    with pytest.raises(ConfigurationError, match="both directions"):
        run(path)


def test_missing_steps_are_a_data_error(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    write(tmp_path / "test.jsonl", [])
    with pytest.raises(DataError, match="0 held out"):
        run(path)
    write(tmp_path / "test.jsonl", answers(3))
    write(tmp_path / "pairs.jsonl", [answer(0, (None, True), steps=("a" * 60, "b" * 60))])
    with pytest.raises(DataError, match="raise it"):
        run(path)
