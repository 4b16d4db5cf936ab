from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.training.tiny import gpt2, llama
from training.batches import Tree, collate
from training.config import LoraParams
from training.generate import BuiltinGenerator
from training.logprobs import answer_logprobs
from training.models import add_lora
from training.trunk import Trunk, lay_out

STOP = 1


def policy(layers: int | None = 1, depth: int = 4) -> Any:
    """Four layers, adapters that say something on the last one."""
    model = llama(vocab=60, num_hidden_layers=depth)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6.0)
    lora = add_lora(model, LoraParams(rank=4, layers=layers))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return lora


def rolled(model: Any, opening: int, max_rows: int = 128) -> tuple[list[Tree], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(2, 60, (opening,), generator=generator).tolist()
    texts = [start + torch.randint(2, 60, (2 + n % 4,), generator=generator).tolist() for n in range(5)]
    engine = BuiltinGenerator(model, [STOP], STOP, trunk=Trunk.of(model), max_rows=max_rows)
    found = engine.generate(texts, 3, max_new_tokens=9, temperature=1.0)
    trees = [Tree(str(n), text, found.answers[n]) for n, text in enumerate(texts)]
    assert found.states is not None
    return trees, found.states


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("opening", [0, 12])
@pytest.mark.parametrize("max_rows", [128, 6])
def test_kept_states_give_the_same_logp_and_gradient(shared: bool, opening: int, max_rows: int) -> None:
    model = policy()
    trunk = Trunk.of(model)
    assert trunk is not None
    trees, states = rolled(model, opening, max_rows)
    batch = collate(trees, STOP, shared)
    results = []
    for hidden in (None, lay_out(trees, states, batch, shared)):
        model.zero_grad()
        with trunk.entered(hidden):
            logp, _ = answer_logprobs(model, batch, 0.8)
        logp.sum().backward()
        results.append((logp.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        with trunk.entered(hidden), torch.no_grad(), model.disable_adapter():
            results[-1][1].append(answer_logprobs(model, batch, 0.8)[0])
    assert torch.allclose(results[0][0], results[1][0], atol=2e-5)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_only_the_upper_layers_are_computed() -> None:
    model = policy()
    trunk = Trunk.of(model)
    assert trunk is not None
    trees, states = rolled(model, 0)
    batch = collate(trees, STOP, shared=True)
    layers = model.get_base_model().model.layers
    calls: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    with trunk.entered(lay_out(trees, states, batch, shared=True)), torch.no_grad():
        answer_logprobs(model, batch)
    assert calls == [3]
    assert model.get_base_model().model.layers is layers
    with pytest.raises(RuntimeError), trunk.entered(torch.zeros(1, 1, 32)):
        raise RuntimeError
    assert model.get_base_model().model.layers is layers
    calls.clear()
    with torch.no_grad():
        answer_logprobs(model, batch)
    assert calls == [0, 1, 2, 3]


def test_where_there_is_no_trunk() -> None:
    assert Trunk.of(policy(layers=None)) is None, "adapters in the first layer"
    assert Trunk.of(llama()) is None, "everything learns"
    assert Trunk.of(add_lora(gpt2(), LoraParams(rank=2, layers=1))) is None, (
        "learned positions are added first"
    )
    model = policy()
    model.get_base_model().model.embed_tokens.weight.requires_grad_(True)
    assert Trunk.of(model) is None, "embeddings learn"


def test_every_answer_token_but_the_last_is_known() -> None:
    model = policy()
    trees, states = rolled(model, 12)
    for tree, known in zip(trees, states, strict=True):
        assert len(known) == len(tree.prompt) + sum(map(len, tree.answers))
        at = len(tree.prompt)
        assert known[:at].abs().sum(1).min() > 0
        for answer in tree.answers:
            rows = known[at : at + len(answer)].abs().sum(1)
            assert rows[-1] == 0 and bool((rows[:-1] > 0).all())
            at += len(answer)


def test_generation_is_the_same_with_and_without_recording() -> None:
    model = policy()
    plain = copy.deepcopy(model)
    trees, _ = rolled(model, 12)
    found = BuiltinGenerator(plain, [STOP], STOP).generate(
        [tree.prompt for tree in trees], 3, max_new_tokens=9, temperature=1.0
    )
    assert found.states is None
    assert found.answers == [tree.answers for tree in trees]
