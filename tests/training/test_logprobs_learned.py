"""A plain head that learns: its gradient is written out, and must be what autograd makes of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.tiny import gpt2, llama
from training.batches import Batch, Tree, collate
from training.logprobs import answer_logprobs, backbone_and_head, read_logprobs

TREES = [Tree("a", [5, 9, 7], [[11, 12, 1], [13, 1]]), Tree("b", [8, 6], [[21, 22, 23, 1]])]
BATCH: Batch = collate(TREES, 1, shared=True)


def pull(
    model: Any, entropy: bool, temperature: float, chunk: int = 256, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, and the gradients of a weighted sum of them by hidden states and head."""
    _, head = backbone_and_head(model)
    torch.manual_seed(1)
    hidden = torch.randn(BATCH.input_ids.numel(), 32, dtype=torch.float64).to(dtype).requires_grad_()
    logp, _ = read_logprobs(hidden, head, BATCH, temperature, chunk, entropy)
    weights = torch.linspace(-2, 3, logp.numel(), dtype=torch.float64).view_as(logp)
    (logp * weights).sum().backward()
    assert hidden.grad is not None
    return logp.detach(), hidden.grad, model.get_output_embeddings().weight.grad


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [4, 256])
def test_against_autograd_through_the_logits(temperature: float, chunk: int) -> None:
    # Asking for the entropy takes the way that leaves the gradient to autograd.
    expected = pull(gpt2().double(), True, temperature)
    found = pull(gpt2().double(), False, temperature, chunk)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_under_autocast_products_are_narrow_and_the_softmax_is_not() -> None:
    results = []
    for entropy in (True, False):
        model = gpt2()
        with torch.autocast("cpu", torch.bfloat16):
            results.append(pull(model, entropy, 0.8, 4, torch.float32))
    expected, found = results
    assert torch.equal(found[0], expected[0]), "the forward pass is the same, to the bit"
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_the_whole_model_learns_the_same() -> None:
    gradients = []
    for entropy in (True, False):
        model = llama().double()  # tied: the head's gradient is the embedding's too
        answer_logprobs(model, BATCH, 0.7, chunk=3, entropy=entropy)[0].sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_a_head_that_is_frozen_biased_capped_or_scaled_takes_the_other_way() -> None:
    model = gpt2()
    assert backbone_and_head(model)[1].learned is model.lm_head.weight
    model.config.final_logit_softcapping = 5.0
    assert backbone_and_head(model)[1].learned is None
    model.config.final_logit_softcapping = None
    model.config.logit_scale = 2.0
    assert backbone_and_head(model)[1].learned is None
    model.config.logit_scale = None
    model.lm_head.bias = nn.Parameter(torch.zeros(model.lm_head.out_features))
    assert backbone_and_head(model)[1].learned is None
    model.lm_head.bias = None
    model.lm_head.weight.requires_grad_(False)
    assert backbone_and_head(model)[1].learned is None


def test_no_logits_are_kept_for_the_backward_pass() -> None:
    kept: list[int] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value.numel())
        return value

    model = gpt2()
    _, head = backbone_and_head(model)
    hidden = torch.randn(BATCH.input_ids.numel(), 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        read_logprobs(hidden, head, BATCH, chunk=4)
    vocabulary, width = model.lm_head.weight.shape
    answers = int(BATCH.mask.sum())
    others = [size for size in kept if size != vocabulary * width]
    assert max(others) < answers * vocabulary
