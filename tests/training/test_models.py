from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from data.errors import ConfigurationError, DivergenceError
from tests.conftest import ROOT
from tests.training.tiny import byte_tokenizer, gpt2, llama, save_policy
from training.batches import Tree, collate
from training.config import LoraParams
from training.logprobs import answer_logprobs
from training.models import (
    add_lora,
    digest,
    load_causal,
    load_policy,
    merge_and_save,
    merged_state,
    reference,
    saved_dtype,
)

BATCH = collate([Tree("", [3, 4, 5], [[6, 7, 1], [8, 1]])], 1, shared=True)


def shaken(model: torch.nn.Module, scale: float = 0.05) -> torch.nn.Module:
    """Moves what may move, as training would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("lora", [None, LoraParams(rank=2)])
def test_the_reference_is_the_policy_before_the_first_step(tmp_path: Path, lora: LoraParams | None) -> None:
    model = load_policy(save_policy(tmp_path / "p"), "fp32", lora)
    before, _ = answer_logprobs(model, BATCH)
    ref = reference(model)
    with ref as frozen:
        at_start, _ = answer_logprobs(frozen, BATCH)
    assert torch.equal(before, at_start) and not at_start.requires_grad, "KL to the reference is exactly 0"
    shaken(model)
    after, _ = answer_logprobs(model, BATCH)
    for _ in range(2):
        with ref as frozen:
            later, _ = answer_logprobs(frozen, BATCH)
        assert torch.equal(later, at_start), "training does not move the reference"
    assert not torch.allclose(after, at_start)
    again, _ = answer_logprobs(model, BATCH)
    assert torch.equal(after, again) and again.requires_grad, "leaving the reference restores the policy"
    assert any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("make", [llama, gpt2])
def test_merged_weights_compute_what_the_adapters_did(make: object) -> None:
    model = shaken(add_lora(make(), LoraParams(rank=3, alpha=5.0)))  # type: ignore[operator]
    expected, _ = answer_logprobs(model, BATCH)
    plain = make(seed=4)  # type: ignore[operator]
    plain.load_state_dict(merged_state(model))
    found, _ = answer_logprobs(plain, BATCH)
    assert torch.allclose(expected, found, atol=2e-5)


@pytest.mark.parametrize("lora", [None, LoraParams(rank=2)])
def test_published_folder_loads_anywhere_and_is_the_same_twice(
    tmp_path: Path, lora: LoraParams | None
) -> None:
    digests = []
    for name in ("one", "two"):
        torch.manual_seed(0)
        model = shaken(load_policy(save_policy(tmp_path / name / "base"), "fp32", lora))
        folder = tmp_path / name / "model"
        merge_and_save(model, byte_tokenizer(), folder, torch.float32)
        digests.append(digest(folder))
        found, _ = answer_logprobs(load_causal(folder, torch.float32), BATCH)
        expected, _ = answer_logprobs(model, BATCH)
        assert torch.allclose(found, expected, atol=2e-5)
        assert str(tmp_path) not in "".join(file.read_text() for file in folder.glob("*.json"))
        assert json.loads((folder / "config.json").read_text())["pad_token_id"] == 1
    assert digests[0] == digests[1]
    assert [path.name for path in (tmp_path / "one").iterdir() if path.name.startswith(".")] == []


def test_dropout_is_no_part_of_what_is_published(tmp_path: Path) -> None:
    """The audit compares functions: a model in training with dropout is the same one."""
    model = load_policy(save_policy(tmp_path / "base"), "fp32", LoraParams(rank=2, dropout=0.5))
    shaken(model).train()
    merge_and_save(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    assert model.training
    assert load_causal(tmp_path / "model", torch.float32) is not None


def test_bfloat16_is_published_within_its_bound(tmp_path: Path) -> None:
    merge_and_save(shaken(llama()), byte_tokenizer(), tmp_path / "model", torch.bfloat16)
    assert load_causal(tmp_path / "model", torch.bfloat16).dtype == torch.bfloat16


def test_a_broken_model_is_not_published(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(DivergenceError, match="up_proj"):
        merge_and_save(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    assert not (tmp_path / "model").exists()


def test_a_missing_weight_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_policy(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight"):
        load_policy(tmp_path, "fp32", None)


def test_frozen_base_is_narrow_and_adapters_are_wide(tmp_path: Path) -> None:
    model = load_policy(save_policy(tmp_path), "bf16", LoraParams(rank=2))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    full = load_policy(tmp_path, "bf16", None)
    assert {p.dtype for p in full.parameters()} == {torch.float32}


def test_saved_dtype_is_one_of_three() -> None:
    assert saved_dtype({}) == torch.bfloat16 and saved_dtype({"dtype": "float32"}) == torch.float32
    with pytest.raises(ConfigurationError, match="int8"):
        saved_dtype({"dtype": "int8"})


def test_digest_sees_names_and_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        (folder / "x").mkdir(parents=True)
        (folder / "x" / "f").write_text("1")
    assert digest(first) == digest(second)
    (second / "x" / "f").rename(second / "x" / "g")
    assert digest(first) != digest(second)


def test_one_path_for_all_devices() -> None:
    """CUDA, ROCm, Ascend, ... go through torch.accelerator and torch.get_device_module."""
    for package in ("training", "tasks", "flows"):
        for file in sorted((ROOT / package).glob("*.py")):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"torch\.(cuda|npu|xpu|mps)\b|\.cuda\(", text), file.name
