"""Weights in the layout that a CPU multiplies best while few rows are decoded.

The LM head fits in no cache and is always packed: 57 GFLOP/s were measured where the ordinary layout gave 31
(64 rows, one thread, 49152 x 576). The other layers are packed where few rows decode many tokens on several
threads of a CPU with AVX2 alone: SmolLM2-135M with 8 rows on two threads took .151 s a token where the
ordinary layout took .182; with 96 rows, on one thread, or with AVX512, nothing is gained (infra/LOG.md).
Only plain linear layers in float32 on a CPU are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MIN_HEAD = 8192
"""Rows of an LM head from which packing it pays."""
MAX_ROWS = 32
"""Answers decoded together up to which the other layers are packed."""
MIN_TOKENS = 48
"""Tokens an answer from which packing them costs less than it saves: it is done anew for each batch."""
CAPABILITIES = ("AVX2",)
"""Where it pays at all: with AVX512 the ordinary layout is as fast, and packing is paid for each batch."""
MIN_WEIGHTS = 2**16
"""Numbers of a layer from which it is worth packing."""
LAYOUT_ROWS = 64
"""Rows that the packed layout is made for; it works for any number."""


class Packed:
    """A model's linear layers, packed for as long as it decodes."""

    def __init__(self) -> None:
        self._known: tuple[int, int] | None = None
        self._head: Tensor | None = None

    @contextmanager
    def in_place(self, model: Any, rows: int, tokens: int) -> Iterator[None]:
        """The model computes with packed weights within; rows: answers at a time, tokens: of each."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = inner.get_output_embeddings()
        changed = []
        if usable(head) and head.bias is None and head.weight.shape[0] >= MIN_HEAD:
            head.forward = multiply(self._packed_head(head.weight), None)
            changed.append(head)
        if layers_pay(rows, tokens):
            for layer in inner.base_model.modules():
                if layer is not head and usable(layer) and layer.weight.numel() >= MIN_WEIGHTS:
                    layer.forward = multiply(pack(layer.weight), layer.bias)
                    changed.append(layer)
        try:
            yield
        finally:
            for layer in changed:
                del layer.forward
            if head in changed and head.weight.requires_grad:
                # It learns: packed anew next time, and the training pass has the memory.
                self._known = self._head = None

    def _packed_head(self, weight: Tensor) -> Tensor:
        # The version counts changes in place.
        known = (weight.data_ptr(), weight._version)
        if known != self._known or self._head is None:
            self._head, self._known = pack(weight), known
        return self._head


def layers_pay(rows: int, tokens: int) -> bool:
    """Whether other layers than the head are packed for a batch of so many answers of so many tokens."""
    few = rows <= MAX_ROWS and tokens >= MIN_TOKENS and torch.get_num_threads() > 1
    return few and torch.backends.cpu.get_cpu_capability() in CAPABILITIES


def usable(layer: Any) -> bool:
    """Whether a layer can be packed here."""
    return (
        type(layer) is nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in the other layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAYOUT_ROWS)
    return packed


def multiply(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A layer's function with packed weights; autocast does not narrow it."""

    def forward(hidden: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            hidden = hidden.float()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
        return out

    return forward
