"""Weights as a CPU multiplies them best while few rows are decoded.

The LM head fits in no cache and is packed: 57 GFLOP/s were measured where the ordinary layout gave 31
(64 rows, one thread, 49152 x 576). The other layers are packed where few rows decode many tokens on several
threads of a CPU with AVX2 alone: SmolLM2-135M with 8 rows on two threads took .151 s a token where the
ordinary layout took .182; with 96 rows or on one thread nothing is gained.

With AVX512 a matrix is multiplied block by block instead, as a batch of products, where 4 to 12 rows go in:
the library's kernel for the whole reads 6 GB/s of weights (8 rows, 1536 x 576, one thread), that for small
products 9, as much as the packed layout gives, and nothing is copied (infra/LOG.md). Only plain linear layers
in float32 on a CPU are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_HEAD = 8192
"""Rows of an LM head from which packing it pays."""
MAX_ROWS = 32
"""Answers decoded together up to which the other layers are packed."""
MIN_TOKENS = 48
"""Tokens an answer from which packing them costs less than it saves: it is done anew for each batch."""
MIN_WEIGHTS = 2**16
"""Numbers of a layer from which it is worth packing, or blocks."""
IN_BLOCKS = range(4, 13)
"""Rows that are multiplied block by block: fewer and more are as fast or faster in one product."""
BLOCK_ROWS = range(96, 23, -1)
"""Outputs of a block, the first that divides a layer's."""
LAYOUT_ROWS = 64
"""Rows that the packed layout is made for; it works for any number."""

Product = Callable[[Tensor], Tensor]
"""Hidden states [..., in] to outputs [..., out]."""


class Packed:
    """A model's linear layers, packed for as long as it decodes."""

    def __init__(self) -> None:
        self._known: tuple[int, int] | None = None
        self._head: Tensor | None = None

    @contextmanager
    def in_place(self, model: Any, rows: int, tokens: int) -> Iterator[None]:
        """The model computes so within; rows: answers at a time, tokens: of each."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = inner.get_output_embeddings()
        changed = []
        try:
            for layer in filter(usable, inner.modules()):
                forward = self._function(layer, layer is head, rows, tokens)
                if forward is not None:
                    layer.forward = forward
                    changed.append(layer)
            yield
        finally:
            for layer in changed:
                del layer.forward
            if head in changed and head.weight.requires_grad:
                # It learns: packed anew next time, and the training pass has the memory.
                self._known = self._head = None

    def _function(self, layer: Any, is_head: bool, rows: int, tokens: int) -> Product | None:
        """How a layer is multiplied for so many answers; None: as ever."""
        large = layer.weight.numel() >= MIN_WEIGHTS
        if large and capability() == "AVX512" and (not is_head or rows in IN_BLOCKS):
            found = in_blocks(layer.weight, layer.bias)
            if found is not None:
                return found
        if is_head and layer.bias is None and layer.weight.shape[0] >= MIN_HEAD:
            return multiply(self._packed_head(layer.weight), None)
        if large and not is_head and layers_pay(rows, tokens):
            return multiply(pack(layer.weight), layer.bias)
        return None

    def _packed_head(self, weight: Tensor) -> Tensor:
        # The version counts changes in place.
        known = (weight.data_ptr(), weight._version)
        if known != self._known or self._head is None:
            self._head, self._known = pack(weight), known
        return self._head


def layers_pay(rows: int, tokens: int) -> bool:
    """Whether other layers than the head are packed for a batch of so many answers of so many tokens."""
    few = rows <= MAX_ROWS and tokens >= MIN_TOKENS and torch.get_num_threads() > 1
    return few and capability() == "AVX2"


def capability() -> str:
    """The widest instructions that this CPU computes with: AVX512, AVX2, DEFAULT, ..."""
    return torch.backends.cpu.get_cpu_capability()


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


def in_blocks(weight: Tensor, bias: Tensor | None) -> Product | None:
    """A layer's function that multiplies few rows by its weight [out, in] as a batch of blocks; None where no
    block divides it. The weight is read where it lies."""
    out, width = weight.shape
    size = next((rows for rows in BLOCK_ROWS if out % rows == 0), None)
    if size is None or not weight.is_contiguous():
        return None
    blocks = weight.detach().view(out // size, size, width).transpose(1, 2)

    def forward(hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, width)
        if len(rows) not in IN_BLOCKS or torch.is_autocast_enabled("cpu"):
            return functional.linear(hidden, weight, bias)
        products = torch.bmm(rows.expand(len(blocks), -1, -1), blocks)
        joined = products.transpose(0, 1).reshape(*hidden.shape[:-1], out)
        return joined if bias is None else joined + bias

    return forward


def multiply(packed: Tensor, bias: Tensor | None) -> Product:
    """A layer's function with packed weights; autocast does not narrow it."""

    def forward(hidden: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            hidden = hidden.float()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
        return out

    return forward
