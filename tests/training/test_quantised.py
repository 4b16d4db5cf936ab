from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.errors import ConfigurationError, InfrastructureError
from data.records import Prompt, to_line
from tests.conftest import ROOT
from tests.training.test_engine import OPTIONS, train
from tests.training.test_models import BATCH, shaken
from tests.training.tiny import byte_tokenizer, prompt, save_policy, workdir
from training import models, quantised, rl
from training.config import EngineParams, LoraParams, RewardParams, SftParams
from training.config_optimize import OptimizeParams
from training.engine import Engine
from training.logprobs import AnswerLogprobs, answer_logprobs
from training.models import load_policy, merge_and_save, reference
from training.rundir import RunDir

real = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the extra qlora is not installed"
)
CPU = torch.device("cpu")


def packed(folder: Path, kind: str) -> Any:
    torch.manual_seed(3)
    return load_policy(folder, "fp32", LoraParams.model_validate({"rank": 4, "quantise": kind}))


def test_without_bitsandbytes_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigurationError, match=r"lora\.quantise: nf4.*pip install.*\[qlora\]"):
        quantised.settings("nf4", torch.float32, CPU)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.47.9")
    with pytest.raises(ConfigurationError, match=r"0\.47\.9 is outside of >=0\.48,<1"):
        quantised.settings("nf4", torch.float32, CPU)


def test_the_bounds_are_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["qlora"] == [f"bitsandbytes{quantised.BOUNDS}"]


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        (SftParams, {"engine": {"zero": 3}}, r"engine\.zero: 2 or less"),
        (OptimizeParams, {"engine": {"zero": 3}}, r"engine\.zero: 2 or less"),
        (OptimizeParams, {"generator": {"kind": "vllm"}}, r"generator\.kind: vllm"),
        (RewardParams, {}, "stays whole"),
    ],
)
def test_what_a_packed_base_can_not_do(section: type[Any], changes: dict[str, Any], text: str) -> None:
    section.model_validate({"lora": {"quantise": None}, **changes})
    with pytest.raises(ValueError, match=text):
        section.model_validate({"lora": {"quantise": "nf4"}, **changes})


@real
def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="on vulkan: bitsandbytes"):
        quantised.settings("int8", torch.float32, torch.device("vulkan"))


@real
@pytest.mark.parametrize(("kind", "dtype"), [("nf4", torch.uint8), ("int8", torch.int8)])
def test_adapters_learn_on_a_packed_base_and_the_reference_is_that_base(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    model = packed(save_policy(tmp_path / "base"), kind)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.dtype is dtype
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before, _ = answer_logprobs(model, BATCH)
    ref = reference(model)
    with ref as frozen:
        at_start, _ = answer_logprobs(frozen, BATCH)
    assert torch.equal(before, at_start)
    options = {**OPTIONS, "lr": 3e-2, "total_steps": 20, "weight_decay": 0.0}
    engine = Engine(AnswerLogprobs(model), EngineParams(backend="torch"), **options)
    seen = [train(engine, range(1))[0][0] for _ in range(12)]
    assert seen[-1] < seen[0] - 0.05
    with ref as frozen:
        later, _ = answer_logprobs(frozen, BATCH)
    assert torch.equal(later, at_start)
    after, _ = answer_logprobs(model, BATCH)
    assert not torch.allclose(after, before, atol=1e-2)


@real
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_deepspeed_takes_the_same_steps_on_a_packed_base(tmp_path: Path, zero: int) -> None:
    folder = save_policy(tmp_path / "base")
    plain = Engine(AnswerLogprobs(packed(folder, "nf4")), EngineParams(backend="torch"), **OPTIONS)
    engine = Engine(
        AnswerLogprobs(packed(folder, "nf4")), EngineParams.model_validate({"zero": zero}), **OPTIONS
    )
    for left, right in zip(train(plain, range(4)), train(engine, range(4)), strict=True):
        assert left == pytest.approx(right, rel=1e-4)


@real
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_published_is_the_stored_base_plus_the_adapters(tmp_path: Path, kind: str) -> None:
    folder = save_policy(tmp_path / "base")
    model = packed(folder, kind)
    merge_and_save(model, byte_tokenizer(), tmp_path / "same", torch.float32)
    stored = load_file(folder / "model.safetensors")
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert stored.keys() == same.keys() and all(torch.equal(stored[name], same[name]) for name in stored)
    shaken(model)
    merge_and_save(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    merged = load_file(tmp_path / "model" / "model.safetensors")
    layer = model.get_base_model().model.layers[1].self_attn.v_proj
    update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(merged[name], stored[name] + update)
    assert torch.equal(merged["model.norm.weight"], stored["model.norm.weight"])


@real
def test_the_audit_allows_the_quantisations_error_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shaken(packed(save_policy(tmp_path / "base"), "nf4"))
    monkeypatch.setattr(models, "QUANTISED_FACTOR", 0.0)
    with pytest.raises(InfrastructureError, match=r"set lora\.quantise: int8 or null"):
        merge_and_save(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    monkeypatch.undo()
    merge_and_save(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    monkeypatch.setattr(models, "_delta", lambda name, layer, tensors: torch.zeros(()))
    with pytest.raises(InfrastructureError, match="differs from the trained one"):
        merge_and_save(shaken(model, 0.3), byte_tokenizer(), tmp_path / "model", torch.float32)


@real
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [("nf4", "fp32"), ("nf4", "bf16"), ("int8", "bf16")])
def test_a_run_on_policy_on_a_packed_base(tmp_path: Path, kind: str, precision: str) -> None:
    folder = save_policy(tmp_path / "model")
    rows = [Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n)) for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
    scorer = {"kind": "function", "name": "letters", "path": "tests.training.fake_vllm:letters"}
    params = {
        "steps": 2, "prompts": 4, "group": 3, "max_new_tokens": 6, "max_prompt": 64, "held_out": 0,
        "lr": 1e-2, "precision": precision, "engine": {"backend": "torch"}, "rewards": {"scorers": [scorer]},
        "lora": {"rank": 2, "layers": 1, "quantise": kind},
    }  # fmt: skip
    inputs = {"model": folder, "prompts": tmp_path / "prompts.jsonl"}
    run = RunDir.open(workdir(tmp_path / "run", "rl", params, inputs), 0)
    rl.main(run)
    assert json.loads((run.path / "result.json").read_text())["status"] == "trained"
    start = json.loads((run.path / "journal.jsonl").read_text().splitlines()[0])
    assert start["preflight"]["reference"] == 0.0 and start["preflight"]["ratio"] == 0.0
