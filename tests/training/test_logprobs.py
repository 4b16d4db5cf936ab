from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.tiny import gpt2, llama
from training.batches import Batch, Tree, collate
from training.logprobs import AnswerLogprobs, answer_logprobs


def random_trees(count: int = 3, seed: int = 0) -> list[Tree]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return [int(i) for i in torch.randint(2, 258, (length,), generator=generator)]

    return [Tree(str(n), ids(2, 9), [[*ids(0, 7), 1] for _ in range(2 + n % 2)]) for n in range(count)]


def by_hand(model: Any, trees: list[Tree], temperature: float) -> list[list[float]]:
    """One answer at a time, from the model's own logits."""
    rows = []
    for tree in trees:
        for answer in tree.answers:
            logits = model(torch.tensor([tree.prompt + answer])).logits[0].double() / temperature
            logp = logits.log_softmax(-1)
            start = len(tree.prompt) - 1
            rows.append([float(logp[start + at, token]) for at, token in enumerate(answer)])
    return rows


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_against_the_models_own_logits(shared: bool, temperature: float) -> None:
    model, trees = gpt2().double(), random_trees()
    batch = collate(trees, 1, shared)
    logp, entropy = answer_logprobs(model, batch, temperature)
    assert entropy is None
    for row, expected in enumerate(by_hand(model, trees, temperature)):
        assert logp[row, : len(expected)].tolist() == pytest.approx(expected, abs=1e-12)
        assert not logp[row, len(expected) :].any()


def gradient(model: torch.nn.Module, batches: list[Batch], chunk: int = 256) -> list[Tensor]:
    model.zero_grad()
    for batch in batches:
        logp, entropy = answer_logprobs(model, batch, 0.8, chunk, entropy=True)
        assert entropy is not None
        (logp.sum() + entropy.square().sum()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("tied", ["gpt2"])
def test_sharing_splitting_and_chunks_give_the_same_gradient(tied: str) -> None:
    model, trees = gpt2().double(), random_trees(5)
    whole = gradient(model, [collate(trees, 1, shared=False)])
    others = [
        gradient(model, [collate(trees, 1, shared=True)]),
        gradient(model, [collate([tree], 1, shared=True) for tree in trees]),
        gradient(model, [collate(trees[:2], 0, shared=False), collate(trees[2:], 0, shared=True)], chunk=3),
    ]
    for other in others:
        for left, right in zip(whole, other, strict=True):
            assert torch.allclose(left, right, rtol=1e-9, atol=1e-12)


def test_eager_attention_reads_the_tree_mask_too() -> None:
    model, trees = llama(), random_trees()
    expected, _ = answer_logprobs(model, collate(trees, 1, shared=False))
    model.set_attn_implementation("eager")
    found, _ = answer_logprobs(model, collate(trees, 1, shared=True))
    assert torch.allclose(expected, found, atol=1e-5)


def test_entropy_is_that_of_the_sampling_distribution() -> None:
    model, trees = gpt2().double(), random_trees(1)
    _, entropy = answer_logprobs(model, collate(trees, 1, shared=True), 0.7, entropy=True)
    assert entropy is not None
    tree = trees[0]
    logits = model(torch.tensor([tree.prompt + tree.answers[0]])).logits[0] / 0.7
    expected = torch.distributions.Categorical(logits=logits[len(tree.prompt) - 1 : -1]).entropy()
    assert torch.allclose(entropy[0, : len(expected)], expected, atol=1e-12)


def test_softcapped_and_scaled_heads_are_followed() -> None:
    model, trees = gpt2().double(), random_trees(1)
    plain, _ = answer_logprobs(model, collate(trees, 1, shared=False))
    model.config.final_logit_softcapping = 0.05
    capped, _ = answer_logprobs(model, collate(trees, 1, shared=False))
    assert float(capped.abs().max()) < 5.7 and not torch.allclose(plain, capped)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_logits_are_made_in_chunks_only() -> None:
    model, vocab = llama(vocab=5000, tied=False), 5000
    batch = collate([Tree("", [3] * 40, [[4] * 50, [5] * 50])], 1, shared=True)
    for grad in (False, True):
        with Largest() as seen, torch.set_grad_enabled(grad):
            logp, _ = AnswerLogprobs(model)(batch, chunk=8)
            if grad:
                logp.sum().backward()
        # The weight itself has vocab * 32 numbers; a chunk of logits has vocab * 8.
        assert seen.numel <= vocab * 32, "nothing near the 140 positions * vocab of full logits"


def test_autocast_does_not_reach_the_softmax() -> None:
    model, trees = llama(), random_trees()
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = answer_logprobs(model, collate(trees, 1, shared=True))
    assert logp.dtype == torch.float32
