"""Log-probabilities where models differ: adapters, scaled or capped heads, eager attention, recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig

from tests.training.tiny import gpt2, llama
from training.batches import Batch, Tree, collate
from training.logprobs import AnswerLogprobs, answer_logprobs, backbone_and_head, hidden_states, read_logprobs

TREES = [Tree("a", [5, 9, 7], [[11, 12, 1], [13, 1]]), Tree("b", [8, 6], [[21, 22, 23, 1]])]


def batch(shared: bool = False) -> Batch:
    return collate(TREES, 1, shared)


def logp_of(model: Any, *arguments: Any) -> Tensor:
    return answer_logprobs(model, batch(), *arguments)[0]


def test_adapters_are_looked_through() -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config)
    logits = model(torch.tensor([TREES[0].prompt + TREES[0].answers[0]])).logits[0, 2:5].log_softmax(-1)
    expected = [logits[at, token].item() for at, token in enumerate(TREES[0].answers[0])]
    assert logp_of(model)[0, :3].tolist() == pytest.approx(expected, abs=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(logp_of(model)[0, :3], torch.tensor(expected), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "temperature"),
    [("logit_scale", 2.0, 0.5), ("logits_scaling", 4.0, 4.0), ("lm_head_multiplier", 2.0, 0.5)],
)
def test_a_scaled_head_is_a_temperature(name: str, value: float, temperature: float) -> None:
    # Cohere multiplies its logits by logit_scale, Falcon-H1 by lm_head_multiplier; Granite divides them.
    model = gpt2().double()
    expected = logp_of(model, temperature)
    setattr(model.config, name, value)
    torch.testing.assert_close(logp_of(model), expected, rtol=1e-12, atol=1e-12)


def test_a_trunk_under_another_name_is_found() -> None:
    """Llama 4's text model says that its trunk is `language_model`, and calls it `model`."""
    model = Llama4ForCausalLM(
        Llama4TextConfig(
            vocab_size=60, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32,
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            num_local_experts=2, pad_token_id=1,
        )
    )  # fmt: skip
    assert model.base_model is model and backbone_and_head(model)[0] is model.model
    assert backbone_and_head(llama())[0].__class__.__name__ == "LlamaModel"


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"])
def test_a_capped_head_by_hand(name: str) -> None:
    model = gpt2().double()
    logits = model(torch.tensor([TREES[1].prompt + TREES[1].answers[0]])).logits[0, 1:5]
    capped = (0.05 * torch.tanh(logits / 0.05)).log_softmax(-1)
    expected = [capped[at, token].item() for at, token in enumerate(TREES[1].answers[0])]
    setattr(model.config, name, 0.05)
    assert logp_of(model)[2].tolist() == pytest.approx(expected, abs=1e-12)


def test_eager_attention_without_a_tree_mask() -> None:
    model = llama()
    expected = logp_of(model)
    model.set_attn_implementation("eager")
    assert batch().layout is None
    assert torch.allclose(logp_of(model), expected, atol=1e-5)


def test_no_cache_is_built_while_training() -> None:
    model = llama()
    backbone, _ = backbone_and_head(model)
    seen: list[bool] = []
    backbone.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(out.past_key_values is None), with_kwargs=True
    )
    hidden_states(backbone, batch())
    assert seen == [True]


def test_defaults_are_temperature_1_and_no_entropy() -> None:
    model = gpt2().double()
    expected = logp_of(model, 1.0)
    backbone, head = backbone_and_head(model)
    for logp, entropy in (
        answer_logprobs(model, batch()),
        AnswerLogprobs(model)(batch()),
        read_logprobs(hidden_states(backbone, batch()), head, batch()),
    ):
        assert entropy is None
        assert torch.equal(logp, expected)


def test_a_temperature_of_zero_is_no_distribution() -> None:
    with pytest.raises(AssertionError):
        logp_of(gpt2(), 0.0)


def test_each_chunk_is_made_again_in_the_backward_pass_and_only_there() -> None:
    model = gpt2()
    model.config.final_logit_softcapping = 5.0  # a plain head goes another way
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    logp = answer_logprobs(model, batch(), chunk=4)[0]  # 9 answer tokens: 4 + 4 + 1
    assert calls == [4, 4, 1]
    logp.sum().backward()
    assert sorted(calls) == [1, 1, 4, 4, 4, 4]
    calls.clear()
    with torch.no_grad():
        answer_logprobs(model, batch(), chunk=4)
    assert calls == [4, 4, 1]


@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_head_over_a_frozen_backbone_learns(cap: float | None) -> None:
    model = llama(tied=False)
    model.config.final_logit_softcapping = cap
    model.model.requires_grad_(False)
    logp_of(model).sum().backward()
    gradient = model.lm_head.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_a_head_whose_weights_are_elsewhere_is_not_read() -> None:
    # ZeRO-3 marks its partitioned weights and fills them only inside the layer's own forward pass.
    model = gpt2()
    model.lm_head.requires_grad_(False)
    _, head = backbone_and_head(model)
    assert head.frozen is model.lm_head.weight
    model.lm_head.weight.ds_id = 7
    assert head.frozen is None
    model.lm_head.requires_grad_(True)
    assert head.learned is None
    del model.lm_head.weight.ds_id
    assert head.learned is model.lm_head.weight
