"""A model's positions against the lengths that the parameters allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    BloomConfig,
    DebertaV2Config,
    DistilBertConfig,
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MPNetConfig,
    OPTConfig,
    Qwen2Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from data.errors import ConfigurationError
from data.records import Prompt, to_line
from tests.training.tiny import (
    byte_tokenizer,
    gpt2,
    prompt,
    run_program,
    save_encoder,
    save_policy,
    workdir,
    write_demonstrations,
    write_pairs,
)
from training import compare, preference, process, reward, rl, sft
from training.batches import Tree, collate
from training.config import EvaluateParams, RewardParams, SftParams
from training.config_optimize import OptimizeParams
from training.logprobs import answer_logprobs
from training.positions import lengths, over, positions

SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LINEAR, DYNAMIC = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 4.0}
LEARNED: list[tuple[Any, int]] = [
    # configuration, tokens that it reads: one more is an index error (compared with the model below)
    (BertConfig(**SMALL, intermediate_size=16, max_position_embeddings=20), 20),
    (DistilBertConfig(vocab_size=30, dim=16, n_layers=1, n_heads=2, max_position_embeddings=20), 20),
    (DebertaV2Config(**SMALL, intermediate_size=16, max_position_embeddings=20), 20),
    (RobertaConfig(**SMALL, intermediate_size=16, max_position_embeddings=22, pad_token_id=1), 20),
    (RobertaConfig(**SMALL, intermediate_size=16, max_position_embeddings=22, pad_token_id=0), 21),
    (XLMRobertaConfig(**SMALL, intermediate_size=16, max_position_embeddings=22, pad_token_id=1), 20),
    (MPNetConfig(**SMALL, intermediate_size=16, max_position_embeddings=22, pad_token_id=1), 20),
    (OPTConfig(**SMALL, ffn_dim=16, max_position_embeddings=20, word_embed_proj_dim=16), 20),
    (GPT2Config(vocab_size=30, n_positions=20, n_embd=16, n_layer=1, n_head=2), 20),
]


@pytest.mark.parametrize(("config", "count"), LEARNED, ids=lambda value: type(value).__name__)
def test_learned_positions_are_those_that_the_model_can_be_asked_for(config: Any, count: int) -> None:
    assert positions(config.to_dict()) == count
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        model(input_ids=torch.full((1, count), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, count + 1), 5))


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LlamaConfig(max_position_embeddings=2048), 2048),
        (LlamaConfig(max_position_embeddings=2048, rope_scaling=LINEAR), 4096),
        (LlamaConfig(max_position_embeddings=2048, rope_scaling=DYNAMIC), 8192),
        (
            Qwen2Config(
                max_position_embeddings=32768,
                rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            ),
            131072,
        ),
        (
            LlamaConfig(
                max_position_embeddings=131072,
                rope_scaling={
                    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                },
            ),
            131072,
        ),
        (DebertaV2Config(max_position_embeddings=512, position_biased_input=False), None),
        (FalconConfig(alibi=True), None),
        (FalconConfig(alibi=False, max_position_embeddings=2048), 2048),
        (BloomConfig(), None),
        (MambaConfig(), None),
        (Gemma3Config(text_config={"max_position_embeddings": 4096, "rope_scaling": None}), 4096),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_rotary_positions_are_stretched_and_some_models_have_no_limit(config: Any, count: int | None) -> None:
    assert positions(config.to_dict()) == count


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2}}, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        ({"max_position_embeddings": 514, "model_type": "roberta"}, 512),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024),
        ({"max_position_embeddings": -1}, None),
        ({}, None),
    ],
)
def test_a_config_file_as_it_stands(config: dict[str, Any], count: int | None) -> None:
    assert positions(config) == count


def test_what_each_section_allows() -> None:
    assert lengths(SftParams()) == {"max_length": 512}
    assert lengths(RewardParams()) == {"max_length": 256}
    assert lengths(OptimizeParams(max_prompt=10, max_new_tokens=5)) == {"max_prompt + max_new_tokens": 15}
    assert lengths(OptimizeParams(algorithm="dpo")) == {"preference.max_length": 512}
    assert lengths(EvaluateParams(max_prompt=10, max_new_tokens=5)) == {"max_prompt + max_new_tokens": 15}
    assert over({"n_positions": 512}, SftParams()) is None
    assert over({"n_positions": 511}, SftParams()) == "max_length = 512 tokens, the model has 511 positions"
    assert over({}, SftParams()) is None


# -- the programs ------------------------------------------------------------------------------------------


def save_gpt2(folder: Path) -> Path:
    gpt2().save_pretrained(folder)  # 256 positions
    byte_tokenizer().save_pretrained(folder)
    return folder


def _sft(folder: Path, **changes: Any) -> None:
    rows = write_demonstrations(folder / "rows.jsonl")
    params = {"lora": None, "max_steps": 1, "precision": "fp32", "engine": {"backend": "torch"}, **changes}
    inputs = {"model": save_gpt2(folder / "model"), "demonstrations": rows}
    run_program(sft.main, workdir(folder / "run", "sft", params, inputs))


def _reward(folder: Path) -> None:
    rows = write_pairs(folder / "rows.jsonl")
    params = {"model": str(save_encoder(folder / "encoder")), "max_length": 257}
    run_program(reward.main, workdir(folder / "run", "reward", params, {"pairs": rows, "test": rows}))


def _process(folder: Path) -> None:
    text = '{"prompt": [{"role": "user", "content": "a"}], "steps": ["b"], "labels": [true], "id": "1", '
    (folder / "rows.jsonl").write_text(text + '"group": "1", "source": "x:1"}\n')
    inputs = dict.fromkeys(("pairs", "test"), folder / "rows.jsonl")
    params = {"model": "policy", "process": {}, "max_length": 513}
    inputs["model"] = save_policy(folder / "model")
    run_program(process.main, workdir(folder / "run", "reward", params, inputs))


def _preference(folder: Path) -> None:
    rows = write_pairs(folder / "rows.jsonl")
    inputs = {"model": save_gpt2(folder / "model"), "pairs": rows, "test": rows}
    params = {"algorithm": "dpo", "preference": {"max_length": 257}}
    run_program(preference.main, workdir(folder / "run", "preference", params, inputs))


def _prompts(folder: Path) -> Path:
    rows = [Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n)) for n in range(6)]
    (folder / "prompts.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
    return folder / "prompts.jsonl"


def _rl(folder: Path) -> None:
    inputs = {"model": save_gpt2(folder / "model"), "prompts": _prompts(folder)}
    scorer = {"kind": "function", "name": "f", "path": "tests.training.test_rl_watch:Failing"}
    params = {
        "max_prompt": 200, "max_new_tokens": 57, "prompts": 2, "held_out": 0, "lora": None,
        "precision": "fp32", "engine": {"backend": "torch"}, "rewards": {"scorers": [scorer]},
    }  # fmt: skip
    run_program(rl.main, workdir(folder / "run", "rl", params, inputs))


def _compare(folder: Path) -> None:
    inputs = {
        "candidate": save_policy(folder / "model"), "champion": save_gpt2(folder / "champion"),
        "prompts": _prompts(folder), "judge": folder,
    }  # fmt: skip
    params = {"max_prompt": 200, "max_new_tokens": 57}
    run_program(compare.main, workdir(folder / "run", "evaluate", params, inputs))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (_sft, "max_length = 512 tokens, the model has 256 positions"),
        (_reward, "reward: max_length = 257 tokens, the model has 256 positions"),
        (_process, "reward: max_length = 513 tokens, the model has 512 positions"),
        (_preference, r"preference.max_length = 257 tokens, the model has 256 positions"),
        (_rl, r"max_prompt \+ max_new_tokens = 257 tokens, the model has 256 positions"),
        (_compare, r"max_prompt \+ max_new_tokens = 257 tokens, .*champion.*lower it"),
    ],
)
def test_a_program_refuses_lengths_that_its_model_has_no_positions_for(
    run: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        run(tmp_path)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_look_at_whether_answers_end_stays_within_the_positions(tmp_path: Path) -> None:
    # Twice the longest answer (about 2 * 160 tokens) would be over GPT-2's 256.
    (tmp_path / "rows").mkdir()
    rows = write_demonstrations(tmp_path / "rows" / "rows.jsonl")
    text = rows.read_text().replace("abab", "ab" * 80)
    assert "ab" * 80 in text
    rows.write_text(text)
    inputs = {"model": save_gpt2(tmp_path / "model"), "demonstrations": rows}
    params = {
        "lora": None, "max_steps": 1, "precision": "fp32", "engine": {"backend": "torch"},
        "max_length": 256, "max_prompt": 96,
    }  # fmt: skip
    result = run_program(sft.main, workdir(tmp_path / "run", "sft", params, inputs))
    assert result["stop_share"] is not None


def test_padding_behind_many_answers_needs_no_position_of_its_own() -> None:
    # One row of 40 + 8 * 40 tokens beside a short one: 360 columns, and GPT-2 here has 256 positions.
    trees = [Tree("a", [5] * 40, [[7] * 40] * 8), Tree("b", [6] * 4, [[8, 1]])]
    model = gpt2().eval()
    shared = collate(trees, pad_id=1, shared=True)
    assert shared.input_ids.shape[1] > 256
    with torch.no_grad():
        together, _ = answer_logprobs(model, shared)
        apart, _ = answer_logprobs(model, collate(trees, pad_id=1, shared=False))
    assert torch.allclose(together, apart, atol=1e-5)
