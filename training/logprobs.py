"""Log-probabilities of answers, exact and lean: hidden states only where a loss reads them, the LM head in
chunks.

    logp[n, r] = log_softmax(head(h[source[n, r]]) / T)[targets[n, r]]          (T: the sampling temperature)
    entropy[n, r] = -sum_v p_v log p_v                                           (of the same distribution)

A chunk's logits are made again in the backward pass, so the largest tensor is [chunk, V] in float32, never
[B, T, V]. The softmax is float32 (float64 for float64 weights) under any autocast. The gradient of a plain
linear head is written out, d logp / d logits = (onehot(target) - p) / T, in place and added up in one matrix
for all chunks. Where that head is frozen (adapters), its logits are made once:
d logp / d h = (W[target] - sum_v p_v W[v]) / T is known in the forward pass and kept instead, [chunk, H].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training import tree_attention
from training.batches import Batch

CHUNK = 128
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What Gemma, RecurrentGemma and xLSTM call the bound of a soft cap on logits."""


class Head:
    """From hidden states to logits: a linear layer, in some models scaled or softly capped."""

    def __init__(self, linear: Any, scale: float, cap: float | None) -> None:
        self._linear, self._scale, self._cap = linear, scale, cap

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._linear(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        return self._cap * torch.tanh(logits / self._cap) if self._cap else logits

    @property
    def frozen(self) -> Float[Tensor, "V H"] | None:
        """The weights of a plain linear head that does not learn, else None."""
        plain = type(self._linear) is nn.Linear and self._scale == 1.0 and not self._cap
        if not plain or any(parameter.requires_grad for parameter in self._linear.parameters()):
            return None
        return self._whole

    @property
    def learned(self) -> Float[Tensor, "V H"] | None:
        """The weights of a plain linear head without bias that learns, else None."""
        plain = type(self._linear) is nn.Linear and self._scale == 1.0 and not self._cap
        if not plain or self._linear.bias is not None or not self._linear.weight.requires_grad:
            return None
        return self._whole

    @property
    def _whole(self) -> Tensor | None:
        """ZeRO-3 leaves an empty shell outside the layer's own forward pass: None."""
        weight: Tensor = self._linear.weight
        return None if hasattr(weight, "ds_id") else weight


def backbone_and_head(model: Any) -> tuple[nn.Module, Head]:
    """The part of a causal LM that makes hidden states, and the function from them to logits."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    linear = inner.get_output_embeddings()
    config = inner.config.get_text_config()
    cap = next((value for name in _CAPS if (value := getattr(config, name, None))), None)
    scales = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier"))
    scale = math.prod(scales) / (getattr(config, "logits_scaling", None) or 1.0)
    # Llama 4 has another name for its trunk than the one by which `base_model` looks for it.
    backbone = inner.base_model if inner.base_model is not inner else inner.model
    return backbone, Head(linear, scale, cap)


def hidden_states(backbone: Any, batch: Batch) -> Float[Tensor, "BT H"]:
    """Last hidden states of all positions, flattened so that `source` and `last` index them."""
    attention: Tensor | None = None
    if batch.layout is not None and tree_attention.prepare(backbone):
        row = tree_attention.Row(batch.layout)
        # Any 4-D mask is taken as it is: nothing is made of the positions, which start anew with each tree.
        hidden = _states(backbone, batch, batch.padding[None, None], trees=row)
        if row.layers:
            return hidden
        tree_attention.give_up(backbone)  # It hands nothing on to its attention (StableLM, Nemotron).
    if batch.layout is not None:
        # Eager attention adds its mask to the scores; a bool would add 1 where it should be 0.
        dtype = next(backbone.parameters()).dtype
        allowed = tree_attention.whole_mask(batch.layout).to(batch.input_ids.device)
        attention = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
            ~allowed, torch.finfo(dtype).min
        )
    return _states(backbone, batch, attention)


def _states(backbone: Any, batch: Batch, attention: Tensor | None, **rest: Any) -> Float[Tensor, "BT H"]:
    out = backbone(
        input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=attention,
        use_cache=False, **rest,
    )  # fmt: skip
    hidden: Tensor = out.last_hidden_state
    return hidden.flatten(0, 1)


def answer_logprobs(
    model: nn.Module,
    batch: Batch,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    entropy: bool = False,
) -> tuple[Float[Tensor, "N R"], Float[Tensor, "N R"] | None]:
    """Log-probability of each answer token, and the entropy where asked for; zeros where `mask` is False."""
    backbone, head = backbone_and_head(model)
    hidden = hidden_states(backbone, batch)
    return read_logprobs(hidden, head, batch, temperature, chunk, entropy)


def read_logprobs(
    hidden: Float[Tensor, "BT H"],
    head: Head,
    batch: Batch,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    entropy: bool = False,
) -> tuple[Float[Tensor, "N R"], Float[Tensor, "N R"] | None]:
    """The same from hidden states that are there already (a value head reads them too)."""
    assert temperature > 0
    read = hidden[batch.source[batch.mask]]
    targets = batch.targets[batch.mask]
    weight = head.learned
    if weight is not None and not entropy and torch.is_grad_enabled():
        logp: Tensor = _LearnedHead.apply(read, weight, targets, temperature, chunk)  # type: ignore[no-untyped-call]
        return _scatter(logp, batch), None
    parts = [
        _chunk(head, read[at : at + chunk], targets[at : at + chunk], temperature, entropy)
        for at in range(0, len(targets), chunk)
    ]
    logp = _scatter(torch.cat([part[0] for part in parts]), batch)
    if not entropy:
        return logp, None
    return logp, _scatter(torch.cat([part[1] for part in parts]), batch)


def _chunk(
    head: Head, hidden: Float[Tensor, "C H"], targets: Int[Tensor, " C"], temperature: float, entropy: bool
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    def compute(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        logits = logits.to(_wide(logits.dtype)) / temperature
        total = logits.logsumexp(-1)
        logp = logits.gather(-1, targets[:, None])[:, 0] - total
        if not entropy:
            return logp, logp.detach()
        return logp, total - (logits.softmax(-1) * logits).sum(-1)

    if not torch.is_grad_enabled():
        return compute(hidden)
    if head.frozen is not None and not entropy:
        logp: Tensor = _FrozenHead.apply(hidden, head, targets, temperature)  # type: ignore[no-untyped-call]
        return logp, logp.detach()
    first, second = checkpoint(compute, hidden, use_reentrant=False, preserve_rng_state=False)
    return first, second


class _FrozenHead(torch.autograd.Function):
    """logp of a chunk under a head that does not learn, its gradient made along with it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Tensor:
        weight = head.frozen
        assert weight is not None
        raw = head(hidden)
        logits = raw.to(_wide(raw.dtype)) / temperature
        total = logits.logsumexp(-1, keepdim=True)
        logp = logits.gather(-1, targets[:, None]) - total
        pull = (logits - total).exp_().neg_()
        pull.scatter_add_(-1, targets[:, None], torch.ones_like(logp))
        direction = (pull.to(raw.dtype) @ weight.to(raw.dtype)) / temperature
        ctx.save_for_backward(direction.to(hidden.dtype))
        return logp[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (direction,) = ctx.saved_tensors
        return gradient.to(direction.dtype)[:, None] * direction, None, None, None


class _LearnedHead(torch.autograd.Function):
    """logp of all positions under a plain head that learns, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> Tensor:
        logp = torch.empty(len(targets), dtype=_wide(weight.dtype), device=targets.device)
        total = torch.empty_like(logp)
        ctx.computed = weight.dtype
        for at in range(0, len(targets), chunk):
            part = slice(at, at + chunk)
            raw = nn.functional.linear(hidden[part], weight)
            ctx.computed = raw.dtype
            logits = raw.to(logp.dtype).div_(temperature)
            total[part] = logits.logsumexp(-1)
            logp[part] = logits.gather(-1, targets[part, None])[:, 0] - total[part]
        ctx.save_for_backward(hidden, weight, targets, total)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, total = ctx.saved_tensors
        narrow = weight.to(ctx.computed)
        pull, summed = torch.empty_like(hidden), torch.zeros_like(weight)
        for at in range(0, len(targets), ctx.chunk):
            part = slice(at, at + ctx.chunk)
            known = hidden[part].to(ctx.computed)
            logits = nn.functional.linear(known, narrow).to(total.dtype).div_(ctx.temperature)
            scale = gradient[part, None] / ctx.temperature
            wanted = logits.sub_(total[part, None]).exp_().mul_(-scale)
            wanted = wanted.scatter_add_(-1, targets[part, None], scale).to(ctx.computed)
            pull[part] = wanted @ narrow
            if summed.dtype == wanted.dtype:
                summed.addmm_(wanted.T, known)
            else:
                summed += wanted.T @ known
        return pull, summed, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Where a softmax is taken: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _scatter(values: Float[Tensor, " K"], batch: Batch) -> Float[Tensor, "N R"]:
    return torch.zeros(batch.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
        batch.mask, values
    )


class AnswerLogprobs(nn.Module):
    """A causal LM whose forward pass is `answer_logprobs`: the module that the engine wraps and calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, batch: Batch, temperature: float = 1.0, chunk: int = CHUNK, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `answer_logprobs`."""
        return answer_logprobs(self.model, batch, temperature, chunk, entropy)
