"""Policy and critic on one trunk: what PPO's engine wraps and calls."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.batches import Batch
from training.logprobs import CHUNK, backbone_and_head, hidden_states, read_logprobs


class ActorCritic(nn.Module):
    """A causal LM and a linear value head on the hidden state from which a token is chosen.

    V(s_r) = w . h(s_r) + b, both zero at the start, so that the first advantages are the rewards themselves
    (a random head would be noise that the first steps follow).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        config = model.config
        parameter = next(model.parameters())
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.value_head = nn.Linear(
            config.get_text_config().hidden_size, 1, device=parameter.device, dtype=wide
        )
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self,
        batch: Batch,
        temperature: float = 1.0,
        chunk: int = CHUNK,
        entropy: bool = False,
        head_only: bool = False,
    ) -> tuple[Tensor, Tensor | None, Float[Tensor, "N R"]]:
        """Log-probabilities and entropy as `answer_logprobs` gives them, and a value a token (0 off the
        mask). `head_only`: no gradient goes from the values into the trunk."""
        backbone, head = backbone_and_head(self.model)
        hidden = hidden_states(backbone, batch)
        logp, entropies = read_logprobs(hidden, head, batch, temperature, chunk, entropy)
        read = hidden[batch.source[batch.mask]].to(self.value_head.weight.dtype)
        read = read.detach() if head_only else read
        with torch.autocast(read.device.type, enabled=False):
            values = self.value_head(read)[:, 0]
        blank = torch.zeros(batch.mask.shape, dtype=values.dtype, device=values.device)
        return logp, entropies, blank.masked_scatter(batch.mask, values)
