"""QLoRA [2305.14314]: adapters on a frozen base in 4 or 8 bits, by bitsandbytes (the extra `qlora`).

Only the base in memory is packed. What is published is the base as it was stored plus the adapters' update,
so no packed weight leaves the run. The published model therefore differs from the trained one by the
quantisation's error, and the audit bounds it by just that (training/models.py). The reference is the packed
base with its adapters off.
"""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any, Literal

import torch
from packaging.specifiers import SpecifierSet
from transformers import BitsAndBytesConfig

from data.errors import ConfigurationError

BOUNDS = ">=0.48,<1"
"""Versions of bitsandbytes, as in pyproject's extra."""
INSTALL = 'pip install -c constraints.txt -e ".[qlora]"'


def settings(kind: Literal["nf4", "int8"], compute: torch.dtype, where: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs to pack the linear layers while it loads them; the head and what is not a
    matrix stay as they are."""
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(
            f"lora.quantise: {kind}, but bitsandbytes is not installed; {INSTALL}, or set lora.quantise: null"
        ) from None
    if not SpecifierSet(BOUNDS).contains(version, prereleases=True):
        raise ConfigurationError(
            f"lora.quantise: bitsandbytes {version} is outside of {BOUNDS}; {INSTALL}, or set it to null"
        )
    import bitsandbytes

    known = sorted(bitsandbytes.supported_torch_devices)
    if where.type not in known:
        raise ConfigurationError(
            f"lora.quantise: {kind} on {where.type}: bitsandbytes {version} knows {known}; set it to null"
        )
    # It tells of its float16 activations at each product.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    packed = (
        BitsAndBytesConfig(load_in_8bit=True)
        if kind == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    )  # fmt: skip
    return {"quantization_config": packed, "device_map": {"": where}}


def source(model: Any) -> str | None:
    """Folder of the weights that a packed model was made from; None: it is not packed."""
    found: str | None = getattr(model, "quantised_from", None)
    return found
