"""DeepSpeed around a module (ZeRO, tensor parallel): the only place that imports it.

It needs no compiler here: torch's AdamW in place of its own, and its shared-memory operator is not built.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from data.errors import ConfigurationError
from training.config import EngineParams
from training.device import device


def import_deepspeed() -> Any:
    """DeepSpeed without what its autotuner would bring along: importing mlflow costs more than DeepSpeed
    itself."""
    blocked = "mlflow" not in sys.modules
    if blocked:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        import deepspeed
        from deepspeed.utils import logger
    finally:
        if blocked:
            del sys.modules["mlflow"]
    logger.setLevel("WARNING")
    return deepspeed


def gather_layer(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    """Within it a layer's parameters that tensor parallelism has split are whole."""
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    context: AbstractContextManager[Any] = GatherReplacedLayerParams(parameters, None)
    return context


def _check_parts(module: nn.Module, parts: int) -> None:
    """Whether the model's heads and widths can be dealt out evenly."""
    found = getattr(getattr(module, "model", None), "config", None)
    config: Any = found.get_text_config() if found is not None else None
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, key, None)
        if value is not None and value % parts:
            raise ConfigurationError(
                f"engine.tensor_parallel: {parts} does not divide the model's {key} ({value}); take a divisor"
            )


def wrap(module: nn.Module, optimizer: torch.optim.Optimizer, params: EngineParams, clip_norm: float) -> Any:
    """DeepSpeed's engine around a module and its optimizer. Raises ConfigurationError for weights that it
    would round, and for heads or widths that can not be dealt out."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if device().type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = import_deepspeed()
    wide = {p.dtype for p in module.parameters() if p.requires_grad} - {torch.float32}
    if wide:
        raise ConfigurationError(
            f"engine.backend: deepspeed trains float32 weights, these are {sorted(map(str, wide))}; "
            "DeepSpeed rounds float64 without a word: take engine.backend: torch"
        )
    # On a CPU it would compile an operator for all-reduces in shared memory; gloo does without.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    zero: dict[str, Any] = {"stage": params.zero}
    if params.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if params.zero == 3:
            zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if params.tensor_parallel > 1:
        _check_parts(module, params.tensor_parallel)
        config["tensor_parallel"] = {"autotp_size": params.tensor_parallel}
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=config, dist_init_required=False
    )
    if params.tensor_parallel > 1:
        # Its look at the first inputs of ranks that share a model knows tensors only, not a Batch of them.
        engine.first_dataloader_check.remove()
    return engine
