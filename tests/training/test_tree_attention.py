"""Trees in one row: attention sees what separate rows would see, and the model hands the layout on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.training.tiny import gpt2, llama
from training.batches import Tree, collate
from training.logprobs import answer_logprobs, backbone_and_head
from training.tree_attention import NAME, Row, attend, prepare, whole_mask

LAYOUT = ((3, 2, 1), (2, 1), (1, 2, 2, 1))
TREES = [
    Tree("a", [5, 6, 7], [[8, 1], [9]]),
    Tree("b", [4, 9], [[3]]),
    Tree("c", [8], [[4, 5], [6, 7], [3]]),
]


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One query after the other over exactly the keys that it may see."""
    groups = query.shape[1] // key.shape[1]
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype)
    start = 0
    for prompt, *answers in LAYOUT:
        places = [list(range(start, start + at + 1)) for at in range(prompt)]
        at = start + prompt
        for answer in answers:
            stem = list(range(start, start + prompt))
            places += [stem + list(range(at, at + n + 1)) for n in range(answer)]
            at += answer
        for offset, seen in enumerate(places):
            for head in range(query.shape[1]):
                scores = key[0, head // groups, seen] @ query[0, head, start + offset] * scale
                out[0, head, start + offset] = scores.softmax(0) @ value[0, head // groups, seen]
        start = at
    return out.transpose(1, 2)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_against_loops(heads: int) -> None:
    torch.manual_seed(0)
    length = sum(map(sum, LAYOUT))
    query = torch.randn(1, 4, length, 8, dtype=torch.float64)
    key, value = (torch.randn(1, heads, length, 8, dtype=torch.float64) for _ in range(2))
    row = Row(LAYOUT)
    found, _ = attend(nn.Module(), query, key, value, None, scaling=0.3, trees=row)
    assert torch.allclose(found, by_hand(query, key, value, 0.3), rtol=0, atol=1e-14)
    assert row.layers == 1


def test_the_mask_says_the_same() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, 2, 15, 4, dtype=torch.float64) for _ in range(3))
    found, _ = attend(nn.Module(), query, key, value, None, scaling=0.5, trees=Row(LAYOUT))
    mask = whole_mask(LAYOUT)
    masked = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.5)
    assert torch.allclose(found, masked.transpose(1, 2), rtol=0, atol=1e-14)
    assert bool(mask.any(-1).all()), "no query is left without a key"
    assert mask[0, 0, 5].tolist() == [True] * 3 + [False] * 2 + [True] + [False] * 9, "no answer sees another"


# Llama norms in float32 whatever its weights are.
@pytest.mark.parametrize(("make", "bound"), [(llama, 1e-6), (gpt2, 1e-12)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_row_gives_what_padded_rows_give(make: Any, bound: float, attention: str) -> None:
    model = make().double()
    model.set_attn_implementation(attention)
    padded, _ = answer_logprobs(model, collate(TREES, 1, shared=False))
    model.zero_grad()
    padded.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    shared, _ = answer_logprobs(model, collate(TREES, 1, shared=True))
    shared.sum().backward()
    assert torch.allclose(shared, padded, rtol=bound, atol=0)
    assert expected and model.config._attn_implementation == (NAME if attention == "sdpa" else "eager")
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.allclose(parameter.grad, expected[name], rtol=bound * 1e2, atol=bound), name


def test_gradient_checkpointing_recomputes_with_the_layout() -> None:
    model = llama().double().train()
    batch = collate(TREES, 1, shared=True)
    answer_logprobs(model, batch)[0].sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    answer_logprobs(model, batch)[0].sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-15) for a, b in zip(expected, found, strict=True))


def test_without_a_layout_it_is_the_librarys_own(tmp_path: Any) -> None:
    model = llama()
    ids = torch.tensor([[5, 6, 7, 8], [4, 9, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    before = model(input_ids=ids, attention_mask=mask).logits
    assert prepare(model.base_model) and model.config._attn_implementation == NAME
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa", "nothing of it is saved"


def test_a_model_that_drops_the_layout_gets_a_whole_mask_instead() -> None:
    model = llama()
    expected, _ = answer_logprobs(model, collate(TREES, 1, shared=False))
    backbone, _ = backbone_and_head(model)
    plain = backbone.forward

    def forgetful(*args: Any, trees: Any = None, **rest: Any) -> Any:
        return plain(*args, **rest)

    backbone.forward = forgetful  # type: ignore[method-assign]
    for _ in range(2):
        found, _ = answer_logprobs(model, collate(TREES, 1, shared=True))
        assert torch.allclose(expected, found, atol=1e-5)
        assert backbone.config._attn_implementation == "sdpa", "and is not asked again"
