"""Whether the logits that training reads from a model's hidden states are the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data.errors import ConfigurationError
from training.logprobs import backbone_and_head

BOUND, NARROW_BOUND = 1e-4, 2e-2
"""Share of the logits' size by which a head may be off: rounding in float32, and in anything narrower."""


@torch.no_grad()
def head_gap(model: Any) -> float:
    """How far the logits of `backbone_and_head` are from the model's own, as a share of their size.

    More than rounding where a model does something to its logits that is not known here: every
    log-probability would be another distribution's. Not asked of weights in parts (ZeRO-3).
    """
    training = model.training
    model.eval()
    backbone, head = backbone_and_head(model)
    first = next(backbone.parameters())
    ids = torch.arange(3, 11, device=first.device)[None] % model.config.get_text_config().vocab_size
    # As in all passes over such weights: some models (Mamba) mix float32 in, and fail without.
    with torch.autocast(first.device.type, torch.bfloat16, enabled=first.dtype == torch.bfloat16):
        own = model(input_ids=ids, use_cache=False).logits.float()
        known = head(backbone(input_ids=ids, use_cache=False).last_hidden_state).float()
    model.train(training)
    return float((known - own).abs().max() / own.abs().max().clamp(min=1e-6))


def require_head(model: Any, path: Path | str) -> None:
    """ConfigurationError where a model's logits are not those that training reads from its hidden states."""
    gap = head_gap(model)
    bound = BOUND if next(model.parameters()).dtype in (torch.float32, torch.float64) else NARROW_BOUND
    if gap > bound:
        raise ConfigurationError(
            f"{path}: {type(model).__name__} does something to its logits that is not known here (they are "
            f"{gap:.2g} of their size off, bound {bound:g}), so no log-probability would be its own; "
            "take another model, or teach training/logprobs.py its head"
        )
