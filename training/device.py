"""Where a rank computes and how narrow: its accelerator or the CPU, bfloat16 or float32."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch

from training.config import Precision

CPU_INFO = Path("/proc/cpuinfo")


def device() -> torch.device:
    """This rank's accelerator (CUDA, ROCm, NPU, ... through torch.accelerator), else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")))


def resolve(precision: Precision) -> Literal["bf16", "fp32"]:
    """What `auto` means here: bf16 where the hardware multiplies it faster than float32, else fp32."""
    if precision != "auto":
        return precision
    where = device()
    if where.type == "cpu":
        native = cpu_gains_by_bf16()
    else:
        # torch.accelerator tells what can be stored; only these two say what is computed.
        asked = torch.get_device_module(where) if where.type in ("cuda", "xpu") else None
        native = asked is None or asked.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


def cpu_gains_by_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32.

    AMX is made for it. AVX512-BF16 alone is twice as fast as float32 on AMD's cores (1.9 measured) and slower
    on Intel's (.64), which leave the work to AMX, and virtual machines often hide that. Without either it is
    emulated: measured 6 times slower forward and 30 times backward.
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and cpu_vendor() == "AuthenticAMD"


@functools.cache
def cpu_vendor() -> str:
    """The CPU's vendor_id as Linux tells it; empty where it does not."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def autocast(precision: Precision) -> AbstractContextManager[None]:
    """bfloat16 where it is safe, over float32 weights; nothing for fp32."""
    context: AbstractContextManager[None] = torch.autocast(
        device().type, torch.bfloat16, enabled=resolve(precision) == "bf16"
    )
    return context
