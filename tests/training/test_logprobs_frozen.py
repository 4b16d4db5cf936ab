"""A head that does not learn: its gradient is made in the forward pass, and must be the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.tiny import gpt2, llama
from training.batches import Batch, Tree, collate
from training.logprobs import answer_logprobs, backbone_and_head, read_logprobs

TREES = [Tree("a", [5, 9, 7], [[11, 12, 1], [13, 1]]), Tree("b", [8, 6], [[21, 22, 23, 1]])]
BATCH: Batch = collate(TREES, 1, shared=True)


def frozen(model: Any) -> Any:
    model.get_output_embeddings().requires_grad_(False)
    return model


def pull(model: Any, entropy: bool, temperature: float, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of a weighted sum of them by the hidden states."""
    _, head = backbone_and_head(model)
    torch.manual_seed(1)
    hidden = torch.randn(BATCH.input_ids.numel(), 32, dtype=torch.float64, requires_grad=True)
    logp, _ = read_logprobs(hidden, head, BATCH, temperature, chunk, entropy)
    weights = torch.linspace(-2, 3, logp.numel(), dtype=torch.float64).view_as(logp)
    (logp * weights).sum().backward()
    assert hidden.grad is not None
    return logp.detach(), hidden.grad


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [4, 256])
def test_against_autograd_through_the_logits(temperature: float, chunk: int) -> None:
    # Asking for the entropy takes the way that makes the logits again.
    expected = pull(frozen(gpt2().double()), True, temperature)
    found = pull(frozen(gpt2().double()), False, temperature, chunk)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_the_logits_are_made_once() -> None:
    model = frozen(gpt2())
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    answer_logprobs(model, BATCH, chunk=4)[0].sum().backward()
    assert calls == [4, 4, 1]


def test_a_head_that_learns_capped_or_scaled_takes_the_other_way() -> None:
    _, head = backbone_and_head(gpt2())
    assert head.frozen is None
    model = frozen(gpt2())
    assert backbone_and_head(model)[1].frozen is model.lm_head.weight
    model.config.final_logit_softcapping = 5.0
    assert backbone_and_head(model)[1].frozen is None
    model.config.final_logit_softcapping = None
    model.config.logit_scale = 2.0
    assert backbone_and_head(model)[1].frozen is None


def test_the_backbone_learns_the_same() -> None:
    gradients = []
    for entropy in (False, True):
        model = frozen(llama(tied=False))
        logp, _ = answer_logprobs(model, BATCH, 0.8, entropy=entropy)
        logp.sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        # By the whole matrix: a number near 0 is a sum of larger ones, and every CPU rounds them otherwise.
        assert float((one - other).norm()) <= 1e-5 * float(one.norm())
