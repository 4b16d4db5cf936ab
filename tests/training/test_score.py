from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.errors import ConfigurationError
from data.records import Message
from tests.training.tiny import byte_tokenizer, llama, prompt, save_encoder, save_policy
from training.score import (
    Member,
    ScoreModel,
    encode_row,
    last_token,
    load_backbone,
    load_score_tokenizer,
    locate,
    pad,
)

ROWS = [
    (prompt("is it?"), "yes"),
    (prompt("is it?"), "no, and here is a much longer reason why"),
    ((Message(role="user", content="a"), Message(role="assistant", content="b"), *prompt("c")), "d"),
    (prompt("is it?"), ""),
]


def build(
    folder: Path, kind: str, heads: tuple[str, ...] = (), members: int = 1, length: int = 96
) -> ScoreModel:
    source = save_encoder(folder / kind) if kind == "encoder" else save_policy(folder / kind)
    found = load_backbone(source)[1]
    assert found == kind
    parts = [Member(load_backbone(source)[0], found, max(1, len(heads)), seed) for seed in range(members)]
    settings = {"kind": found, "heads": list(heads), "members": members, "max_length": length}
    return ScoreModel(parts, load_score_tokenizer(source, found), settings, "fp32")


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_scores_are_the_same_alone_batched_and_in_any_order(tmp_path: Path, kind: str) -> None:
    model = build(tmp_path, kind)
    together = model.score(ROWS)
    alone = torch.cat([model.score([row]) for row in ROWS])
    small = model.score(ROWS, token_budget=1)
    backwards = model.score(ROWS[::-1]).flip(0)
    for other in (alone, small, backwards):
        assert torch.allclose(together, other, atol=1e-5)
    assert together.shape == (4,) and together.std() > 1e-3


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_the_side_of_the_padding_does_not_matter(tmp_path: Path, kind: str) -> None:
    model = build(tmp_path, kind)
    rows = [encode_row(model.tok, model.kind, messages, text, 96) for messages, text in ROWS]
    member = model.members[0]
    with torch.no_grad():
        right = member(pad(rows, int(model.tok.pad_token_id)))
        left = member(pad(rows, int(model.tok.pad_token_id), left=True))
    reference = model.score(ROWS)
    if kind == "causal":
        # An encoder has absolute positions, so it is fed on one side only; a causal LM counts from the mask.
        assert torch.allclose(right, left, atol=1e-5)
    assert torch.allclose(right[:, 0], reference, atol=1e-5)


def test_the_position_comes_from_the_mask_although_pad_is_eos(tmp_path: Path) -> None:
    mask = torch.tensor([[True, True, False], [False, True, True], [True, True, True], [False, True, False]])
    assert last_token(mask).tolist() == [1, 2, 2, 1]
    model = build(tmp_path, "causal")
    eos = model.tok.eos_token_id
    assert model.tok.pad_token_id == eos
    full, padded = [([5, 6], [7, eos])], [([5, 6], [7, eos]), ([5, 6], [7, 7, 7, 7, eos])]
    with torch.no_grad():
        assert torch.allclose(
            model.members[0](pad(full, eos))[0], model.members[0](pad(padded, eos))[0], atol=1e-6
        )


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_only_the_prompt_is_cut_and_on_its_left(tmp_path: Path, kind: str) -> None:
    model = build(tmp_path, kind)
    tok = model.tok
    messages = prompt("start " + "x" * 200 + " end")
    whole_prompt, whole_answer = encode_row(tok, model.kind, messages, "an answer", 10_000)
    cut_prompt, answer = encode_row(tok, model.kind, messages, "an answer", 40)
    assert answer == whole_answer and len(cut_prompt) + len(answer) == 40
    opening = 1 if kind == "encoder" else 0
    assert cut_prompt[:opening] == whole_prompt[:opening]
    assert cut_prompt[opening:] == whole_prompt[-(40 - len(answer) - opening) :]
    long_prompt, long_answer = encode_row(tok, model.kind, messages, "z" * 100, 40)
    assert len(long_prompt) + len(long_answer) == 40 and len(long_prompt) >= 1
    assert long_answer[-1] == whole_answer[-1], "the closing token stays"


def test_prompts_of_a_group_are_computed_once(tmp_path: Path) -> None:
    model = build(tmp_path, "causal")
    assert model.shared
    seen = []
    member = model.members[0]
    member.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].tokens))
    model.score([(prompt("is it?"), text) for text in ("a", "b", "c")])
    prompt_length = len(encode_row(model.tok, "causal", prompt("is it?"), "a", 96)[0])
    assert seen == [prompt_length + 3 * 2]


@pytest.mark.parametrize("kind", ["encoder", "causal"])
@pytest.mark.parametrize(("heads", "members"), [((), 1), (("quality", "safety"), 2)])
def test_saved_and_loaded_scores_are_equal(
    tmp_path: Path, kind: str, heads: tuple[str, ...], members: int
) -> None:
    model = build(tmp_path, kind, heads, members)
    model.save(tmp_path / "model")
    loaded = ScoreModel.load(tmp_path / "model")
    before, after = model.score_members(ROWS), loaded.score_members(ROWS)
    assert before.shape == (members, 4, max(1, len(heads)))
    assert torch.allclose(before, after, atol=1e-6)
    assert loaded.score(ROWS).shape == ((4, len(heads)) if heads else (4,))
    assert torch.allclose(loaded.score(ROWS).reshape(4, -1), after.mean(0), atol=1e-6)


@pytest.mark.parametrize("pooling", ["all", "answer"])
def test_an_encoder_averages_the_tokens_that_its_pooling_names(tmp_path: Path, pooling: str) -> None:
    source = save_encoder(tmp_path / "encoder")
    backbone, kind = load_backbone(source)
    tok = load_score_tokenizer(source, kind)
    settings = {"kind": kind, "heads": [], "members": 1, "max_length": 96, "pooling": pooling}
    model = ScoreModel([Member(backbone, kind, 1, 3, pooling)], tok, settings, "fp32")  # type: ignore[arg-type]
    found = model.score(ROWS)
    for row, (messages, text) in enumerate(ROWS):
        before, after = encode_row(tok, kind, messages, text, 96)
        types = torch.tensor([[0] * len(before) + [1] * len(after)])
        with torch.no_grad():
            hidden = backbone(torch.tensor([before + after]), token_type_ids=types).last_hidden_state[0]
        read = hidden if pooling == "all" else hidden[len(before) :]
        expected = float(read.mean(0) @ model.members[0].head.detach()[0])
        assert float(found[row]) == pytest.approx(expected, abs=1e-5)
    model.save(tmp_path / "saved")
    loaded = ScoreModel.load(tmp_path / "saved")
    assert torch.allclose(loaded.score(ROWS), found, atol=1e-6)
    assert loaded.members[0].pooling == pooling


def test_a_lost_head_is_an_error(tmp_path: Path) -> None:
    build(tmp_path, "encoder").save(tmp_path / "model")
    (tmp_path / "model" / "member-0" / "head.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="no complete score model"):
        ScoreModel.load(tmp_path / "model")


def test_heads_start_small_and_differ_by_seed() -> None:
    heads = torch.cat([Member(llama().model, "causal", 50, seed).head.detach() for seed in range(4)])
    assert float(heads.std()) == pytest.approx(1 / math.sqrt(33), rel=0.05)
    assert not torch.equal(heads[:50], heads[50:100])


def test_a_policy_with_shuffled_ids_scores_by_text(tmp_path: Path) -> None:
    """The reward model never sees another tokenizer's ids: the same text has the same score."""
    model = build(tmp_path, "causal")
    other = byte_tokenizer()
    text = other.decode(other("yes", add_special_tokens=False)["input_ids"])
    assert torch.equal(model.score([(ROWS[0][0], text)]), model.score([ROWS[0]]))


def test_where_models_are_found(tmp_path: Path) -> None:
    assert locate("policy", tmp_path) == tmp_path and locate("some/id", None) == "some/id"
    assert (Path(locate("minilm", None)) / "config.json").exists()
    with pytest.raises(ConfigurationError, match=r"inputs\.model"):
        locate("policy", None)
    with pytest.raises(ConfigurationError, match="no reward backbone"):
        load_backbone(tmp_path)


@pytest.mark.parametrize("process", [{}, {"split": "line", "reduce": "minimum"}])
def test_a_model_whose_tokenizer_or_head_was_changed_is_refused(
    tmp_path: Path, process: dict[str, str]
) -> None:
    model = build(tmp_path, "causal")
    model.settings["process"] = model.process = process
    model.save(tmp_path / "published")
    ScoreModel.load(tmp_path / "published").seal(tmp_path / "published")
    again = ScoreModel.load(tmp_path / "published")
    assert len(again.settings["canaries"]) == 3
    head = tmp_path / "published" / "member-0" / "head.safetensors"
    weights = load_file(head)
    save_file({"head": weights["head"] * 1.1}, head)
    with pytest.raises(ConfigurationError, match="known answers score"):
        ScoreModel.load(tmp_path / "published")
    save_file(weights, head)
    file = tmp_path / "published" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    template = tmp_path / "published" / "chat_template.jinja"
    if template.exists():
        template.write_text("You are a helpful one. " + template.read_text())
    else:
        config["chat_template"] = "You are a helpful one. " + config["chat_template"]
        file.write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="tokenizer, chat template or weights"):
        ScoreModel.load(tmp_path / "published")
