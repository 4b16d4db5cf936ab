"""Encoders and causal trunks of many kinds as score models: how each is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BloomConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    RobertaConfig,
    T5Config,
)

from data.errors import ConfigurationError
from tests.training.tiny import prompt, run_program, workdir, write_pairs
from training import reward
from training.batches import Batch
from training.score import Member, ScoreModel, encode_row, load_backbone, load_score_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 261, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 258,
}  # fmt: skip
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 64, "max_position_embeddings": 512}
GROUPED = {**WIDE, "num_key_value_heads": 2, "bos_token_id": 259, "eos_token_id": 260}
ENCODERS: dict[str, Any] = {
    "bert": BertConfig(**WIDE),
    "roberta": RobertaConfig(**{**WIDE, "max_position_embeddings": 800}, type_vocab_size=1),
    "distilbert": DistilBertConfig(
        vocab_size=261, dim=32, hidden_dim=64, n_layers=2, n_heads=4, pad_token_id=258
    ),
    "deberta": DebertaV2Config(
        **WIDE, relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"],
        type_vocab_size=0, pooler_hidden_size=32,
    ),
    "electra": ElectraConfig(**WIDE, embedding_size=32),
    "mpnet": MPNetConfig(**{**WIDE, "max_position_embeddings": 800}),
    "modernbert": ModernBertConfig(
        **WIDE, cls_token_id=259, sep_token_id=260, bos_token_id=259, eos_token_id=260, local_attention=16
    ),
}  # fmt: skip
TRUNKS: dict[str, Any] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "mistral": MistralConfig(**GROUPED, sliding_window=None),
    "gpt2": GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=4, n_positions=512, pad_token_id=258),
    "opt": OPTConfig(
        **SIZES, ffn_dim=64, max_position_embeddings=512, word_embed_proj_dim=32, dropout=0.0,
        bos_token_id=259, eos_token_id=260,
    ),
    "bloom": BloomConfig(vocab_size=261, hidden_size=32, n_layer=2, n_head=4, pad_token_id=258),
}  # fmt: skip
ROWS = [
    (prompt("is it?"), "yes"),
    (prompt("is it?"), "no, and here is a much longer reason why"),
    (prompt("what?"), ""),
]


def save_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["[unused0]", "[unused1]", *letters, "[PAD]", "[CLS]", "[SEP]"]
    backend = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)


def save(folder: Path, config: Any, kind: Any = AutoModelForSequenceClassification) -> Path:
    """A random checkpoint of some head on a configuration; weights wide enough to tell texts apart."""
    torch.manual_seed(0)
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def build(source: Path, pooling: Any = "all") -> ScoreModel:
    backbone, kind = load_backbone(source, pooling)
    settings = {"kind": kind, "heads": [], "members": 1, "max_length": 96, "pooling": pooling}
    member = Member(backbone, kind, 1, 3, pooling)
    return ScoreModel([member], load_score_tokenizer(source, kind), settings, "fp32")


@pytest.mark.parametrize("head", [AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_one_whatever_its_head(tmp_path: Path, name: str, head: Any) -> None:
    assert load_backbone(save(tmp_path / name, ENCODERS[name], head))[1] == "encoder"


@pytest.mark.parametrize("head", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize("name", TRUNKS)
def test_a_causal_trunk_is_one_whatever_its_head(tmp_path: Path, name: str, head: Any) -> None:
    backbone, kind = load_backbone(save(tmp_path / name, TRUNKS[name], head))
    assert kind == "causal" and backbone.config.use_cache is False


@pytest.mark.parametrize("pooling", ["all", "answer"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoders_score_is_the_mean_over_its_tokens(tmp_path: Path, name: str, pooling: str) -> None:
    source = save(tmp_path / name, ENCODERS[name])
    model = build(source, pooling)
    found = model.score(ROWS)
    plain = AutoModel.from_pretrained(source).eval()
    for row, (messages, text) in enumerate(ROWS):
        before, after = encode_row(model.tok, "encoder", messages, text, 96)
        types = torch.tensor([[0] * len(before) + [1] * len(after)])
        extra = {"token_type_ids": types} if name in ("bert", "electra") else {}
        with torch.no_grad():
            hidden = plain(input_ids=torch.tensor([before + after]), **extra).last_hidden_state[0]
        read = hidden if pooling == "all" else hidden[len(before) :]
        expected = float(read.mean(0) @ model.members[0].head.detach()[0])
        assert float(found[row]) == pytest.approx(expected, abs=1e-4)
    assert float(found.std()) > 1e-2


def test_an_encoders_own_pooler_is_read_trained_and_published(tmp_path: Path) -> None:
    source = save(tmp_path / "bert", ENCODERS["bert"], AutoModel)
    model = build(source, "pooler")
    plain = AutoModel.from_pretrained(source).eval()
    found = model.score(ROWS)
    for row, (messages, text) in enumerate(ROWS):
        before, after = encode_row(model.tok, "encoder", messages, text, 96)
        types = torch.tensor([[0] * len(before) + [1] * len(after)])
        with torch.no_grad():
            pooled = plain(input_ids=torch.tensor([before + after]), token_type_ids=types).pooler_output[0]
        assert float(found[row]) == pytest.approx(float(pooled @ model.members[0].head.detach()[0]), abs=1e-4)
    assert float(found.std()) > 1e-2
    rows = write_pairs(tmp_path / "rows.jsonl")
    params = {
        "model": str(source), "pooling": "pooler", "max_length": 64, "max_steps": 2, "precision": "fp32",
        "batch": 8, "lr": 1e-2, "engine": {"backend": "torch"},
    }  # fmt: skip
    path = workdir(tmp_path / "run", "reward", params, {"pairs": rows, "test": rows})
    run_program(reward.main, path)
    trained = ScoreModel.load(path / "model").members[0].backbone.pooler.dense.weight
    assert not torch.equal(trained, plain.pooler.dense.weight)


@pytest.mark.parametrize("name", ["bert", "distilbert", "qwen2"])
def test_a_pooler_that_the_checkpoint_has_not_is_refused(tmp_path: Path, name: str) -> None:
    """The masked LM's checkpoint has none, a random one is never made; some kinds have none at all."""
    source = save(
        tmp_path / name, {**ENCODERS, **TRUNKS}[name], AutoModelForMaskedLM if name == "bert" else AutoModel
    )
    with pytest.raises(ConfigurationError, match=r"without a pretrained one; set pooling: all"):
        build(source, "pooler")


@pytest.mark.parametrize("name", TRUNKS)
def test_a_trunks_score_is_read_at_the_last_token_by_mask(tmp_path: Path, name: str) -> None:
    """The pad token's id at an answer's end is a token like any other, as long as the mask says so."""
    source = save(tmp_path / name, TRUNKS[name])
    model = build(source)
    model.tok.pad_token = model.tok.eos_token
    found = model.score(ROWS)
    plain = AutoModel.from_pretrained(source).eval()
    for row, (messages, text) in enumerate(ROWS):
        before, after = encode_row(model.tok, "causal", messages, text, 96)
        assert after[-1] == model.tok.pad_token_id
        with torch.no_grad():
            hidden = plain(input_ids=torch.tensor([before + after])).last_hidden_state[0, -1]
        expected = float(hidden @ model.members[0].head.detach()[0])
        assert float(found[row]) == pytest.approx(expected, abs=1e-4)
    assert float(found.std()) > 1e-2


@pytest.mark.parametrize("name", [*ENCODERS, *TRUNKS])
def test_saved_and_loaded_scores_are_equal(tmp_path: Path, name: str) -> None:
    model = build(save(tmp_path / name, {**ENCODERS, **TRUNKS}[name]))
    model.save(tmp_path / "model")
    assert torch.allclose(ScoreModel.load(tmp_path / "model").score(ROWS), model.score(ROWS), atol=1e-6)


def test_layers_that_read_in_both_directions_are_an_encoder_under_a_causal_name(tmp_path: Path) -> None:
    """Embedding models keep the name of the causal LM that they were made of."""
    source = save(tmp_path / "llama", TRUNKS["llama"], AutoModelForCausalLM)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    assert AutoConfig.from_pretrained(source).architectures == ["LlamaForCausalLM"]
    assert load_backbone(source)[1] == "encoder"


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=261, d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4)
    with pytest.raises(ConfigurationError, match=r"t5 has an encoder and a decoder.*name an encoder"):
        load_backbone(save(tmp_path / "t5", config, AutoModel))


@pytest.mark.parametrize("name", ["roberta", "distilbert", "deberta", "qwen2"])
def test_a_reward_model_is_trained_on_each(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / name, {**ENCODERS, **TRUNKS}[name])
    rows = write_pairs(tmp_path / "rows.jsonl")
    params = {
        "model": str(source), "max_length": 64, "max_steps": 2, "precision": "fp32", "batch": 8,
        "engine": {"backend": "torch"},
    }  # fmt: skip
    path = workdir(tmp_path / "run", "reward", params, {"pairs": rows, "test": rows})
    assert run_program(reward.main, path)["steps"] == 2
    settings = json.loads((path / "model" / "score.json").read_text())
    assert settings["kind"] == ("causal" if name == "qwen2" else "encoder")
    model = ScoreModel.load(path / "model")
    assert isinstance(model._batch([[([5], [6])]]), Batch) == (name == "qwen2")
