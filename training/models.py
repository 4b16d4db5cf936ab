"""Models in and out: loading a policy, its reference, and publishing merged weights.

Trainable weights are float32 and the caller computes under `autocast`; under LoRA the frozen base stays in
bfloat16, which halves its memory and the time of casting it. Every stage publishes full merged weights, so
the next stage's base is exactly this stage's model and "adapters off" is exactly the reference.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from data.errors import ConfigurationError, DivergenceError, InfrastructureError
from training import quantised
from training.config import LoraParams, Precision
from training.device import device, resolve
from training.memory import Shelf

ATTENTION = r".*\.(q_proj|k_proj|v_proj|o_proj|out_proj|c_attn|qkv_proj|query_key_value)"
SAME_WEIGHTS_KL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Mean KL in nats a token allowed between the trained model and its saved copy: rounding of the weights, no
more."""
QUANTISED_FACTOR = 3.0
"""Under QLoRA the published model may differ from the trained one by so many times what quantising does to
the base: adapters learn on top of its error and are published without it."""


def saved_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Dtype of published weights: the run configuration's `dtype` (model.dtype of params.yaml), else
    bfloat16."""
    name = config.get("dtype", "bfloat16")
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
    if name not in kinds:
        raise ConfigurationError(f"model.dtype is {name!r}; it must be one of {', '.join(kinds)}")
    return kinds[name]


def load_causal(path: Path | str, dtype: torch.dtype, **extra: Any) -> PreTrainedModel:
    """A causal LM from a local folder; a weight that the file does not hold is an error, never a random
    number. `extra`: for from_pretrained."""
    disable_progress_bar()
    set_verbosity_error()  # Missing weights are an error here, not a table on the screen.
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, output_loading_info=True, **extra
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: no causal language model could be loaded ({error})") from error
    if info["missing_keys"]:
        raise ConfigurationError(f"{path}: weights are missing: {sorted(info['missing_keys'])[:5]}")
    loaded: PreTrainedModel = model
    return loaded


def has_experts(config: Any) -> bool:
    """Whether a (text) configuration is that of a mixture of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
    return any(getattr(config, name, None) for name in names)


def dropouts(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Where a model drops anything while it is trained: name of a module, the module, its attribute."""
    return [
        (name, part, key)
        for name, part in model.named_modules()
        for key in (("p",) if isinstance(part, nn.Dropout) else vars(part))
        if key == "p" or "dropout" in key or key == "layerdrop"
        if isinstance(getattr(part, key), float) and getattr(part, key) > 0
    ]


def without_dropout(model: nn.Module) -> None:
    """Switches off a model's own dropout, not that of adapters. A ratio or a KL compares two policies: with
    dropout the first ratio would not be 1."""
    for name, part, key in dropouts(model):
        if "lora_" not in name:
            setattr(part, key, 0.0)


def load_policy(
    path: Path | str, precision: Precision, lora: LoraParams | None, gradient_checkpointing: bool = False,
    dropout: bool = True,
) -> Any:  # fmt: skip
    """A causal LM ready to be trained, on this rank's device: all of it in float32, or adapters on a frozen
    base. `dropout` False: without the model's own, where policies are compared."""
    frozen = torch.bfloat16 if lora and resolve(precision) == "bf16" else torch.float32
    extra = quantised.settings(lora.quantise, frozen, device()) if lora and lora.quantise else {}
    model: Any = load_causal(path, frozen, **extra)
    if extra:
        model.quantised_from = str(path)
    model.config.use_cache = False
    if not dropout:
        without_dropout(model)
    if lora:
        model = add_lora(model, lora)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(device()).train()


def add_lora(model: PreTrainedModel, lora: LoraParams) -> Any:
    """The model with fresh float32 adapters; B starts at zero, so the function is unchanged."""
    from peft import LoraConfig, TaskType, get_peft_model

    kind = (
        TaskType.CAUSAL_LM
        if hasattr(model, "lm_head") or model.can_generate()
        else TaskType.FEATURE_EXTRACTION
    )
    target: str | list[str] = "all-linear" if lora.target == "all-linear" else ATTENTION
    depth = int(model.config.get_text_config().num_hidden_layers)
    if lora.layers and lora.layers < depth:
        target = _adapted(model, lora, depth - lora.layers)
    elif lora.target == "all-linear" and has_experts(model.config.get_text_config()):
        # PEFT would take Mixtral's experts and router too, which are no layers and can't be merged.
        target = _adapted(model, lora, 0)
    config = LoraConfig(
        task_type=kind, r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=target
    )
    remedy = "set lora.target: attention, or lora: null"
    try:
        made = get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:  # such as Mamba's, whose projections are not called as layers
        raise ConfigurationError(
            f"lora.target: {lora.target}: {type(model).__name__} can't have these adapters ({error}); "
            f"{remedy}"
        ) from error
    if any(hasattr(part, "lora_A") and hasattr(part, "parameter_name") for part in made.modules()):
        raise ConfigurationError(
            f"lora.target: {lora.target}: PEFT puts adapters on {type(model).__name__}'s experts, which are "
            f"no layers and can't be merged; {remedy}"
        )
    return made


def _adapted(model: PreTrainedModel, lora: LoraParams, first: int) -> list[str]:
    """Names of the matrices from layer `first` on: PEFT takes a pattern or a choice of layers, not both."""
    found = []
    for name, module in model.named_modules():
        layer = re.search(r"\.(\d+)\.", name)
        wanted = lora.target == "all-linear" or re.fullmatch(ATTENTION, name)
        layered = isinstance(module, nn.Linear | Conv1D) and not name.endswith("router")  # Llama 4's: a tuple
        if layer and int(layer.group(1)) >= first and wanted and layered:
            found.append(name)
    return sorted(found)


def is_lora(model: nn.Module) -> bool:
    """Whether adapters can be switched off."""
    return hasattr(model, "disable_adapter")


class Reference:
    """The policy as it was: adapters off, or a frozen copy made at construction. Enter it as often as needed.

    with ref as frozen: ref_logp, _ = answer_logprobs(frozen, batch)      (no gradient inside)
    """

    def __init__(self, model: Any, folder: Path | None = None) -> None:
        self._model = model
        self._copy = None if is_lora(model) else copy.deepcopy(model).requires_grad_(False).eval()
        self._shelf: Shelf | None = None
        if self._copy is not None and folder is not None and device().type == "cpu":
            self._shelf = Shelf(self._copy, folder)
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        contexts = (
            [torch.no_grad()] if self._copy is not None else [torch.no_grad(), self._model.disable_adapter()]
        )
        for context in contexts:
            context.__enter__()
        self._open = contexts
        return self._model if self._copy is None else self._copy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for context in reversed(self._open):
            context.__exit__(kind, error, trace)
        if self._shelf is not None:
            self._shelf.release()


def reference(model: Any, folder: Path | None = None) -> Reference:
    """Call it before the first update; see `Reference`. On a CPU the copy lies in a file below `folder`, so
    that it takes memory only while it is asked."""
    return Reference(model, folder)


def merged_items(model: Any, state: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Full weights under the plain model's names, one after the other: W + alpha/rank B A in float32 where
    there are adapters.

    `state` replaces the model's own tensors where those are sharded (ZeRO-3). A packed base (QLoRA) is read
    again from where it came: W is what was quantised, not what quantising left of it.
    """
    own: Mapping[str, Tensor] = model.state_dict() if state is None else state
    folder = quantised.source(model)
    base = own if folder is None else load_causal(folder, torch.float32).state_dict()
    adapted = {
        _plain(f"{name}.weight"): (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    for name, tensor in base.items():
        if ".lora_" in name:
            continue
        plain = _plain(name)
        if plain in adapted:
            tensor = tensor.float() + _delta(*adapted[plain], own).to(tensor.device)
        yield plain, tensor


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _delta(name: str, layer: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """What the adapters of a layer add to its weight, in float32."""
    down, up = (tensors[f"{name}.lora_{half}.default.weight"].float() for half in "AB")
    delta: Tensor = layer.scaling["default"] * (up @ down)
    return delta.T if layer.fan_in_fan_out else delta


def merged_state(model: Any, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All of `merged_items` at once."""
    return dict(merged_items(model, state))


def plain_copy(model: Any, dtype: torch.dtype, state: Mapping[str, Tensor] | None = None) -> Any:
    """The same model on the CPU without adapters, in the dtype that is published; every tensor is finite."""
    inner: Any = model.get_base_model() if is_lora(model) else model
    weights = {name: t.detach().to("cpu", dtype) for name, t in merged_state(model, state).items()}
    for name, tensor in weights.items():
        if tensor.numel() == 0 or not bool(tensor.isfinite().all()):
            raise DivergenceError(f"the trained model's {name} is empty or not finite; nothing was published")
    config = copy.deepcopy(inner.config)
    config.dtype, config.use_cache, config._name_or_path = dtype, True, ""
    if quantised.source(model):
        del config.quantization_config
    with torch.device("meta"):
        clean = type(inner)(config)
    if getattr(inner, "pooler", clean) is None:
        clean.pooler = None
    clean.load_state_dict(weights, strict=False, assign=True)
    clean.tie_weights()
    if any(parameter.is_meta for parameter in clean.parameters()):
        raise InfrastructureError("the trained model lacks some of its weights; nothing was published")
    if getattr(inner, "generation_config", None) is not None:
        clean.generation_config = copy.deepcopy(inner.generation_config)
    return clean.eval()


def merge_and_save(
    model: Any,
    tok: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Publishes merged weights and tokenizer; the folder is complete and audited, or absent."""
    clean = plain_copy(model, dtype, state)
    clean.config.pad_token_id = clean.generation_config.pad_token_id = tok.pad_token_id
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    clean.save_pretrained(unfinished)
    tok.save_pretrained(unfinished)
    without_paths(unfinished)
    _audit(unfinished, clean.state_dict(), None if state is not None else model, dtype)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def without_paths(folder: Path) -> None:
    """Takes out what says where a model was loaded from: two runs must give the same bytes."""
    for file in sorted(folder.glob("*.json")):
        value = json.loads(file.read_text(encoding="utf-8"))
        found = [key for key in ("_name_or_path", "name_or_path") if isinstance(value, dict) and key in value]
        if found:
            for key in found:
                del value[key]
            file.write_text(
                json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )


def _audit(folder: Path, weights: Mapping[str, Tensor], model: Any | None, dtype: torch.dtype) -> None:
    """Loads what was written: every tensor equal to the one meant, and the function the trained one's."""
    saved = load_causal(folder, dtype)
    found = saved.state_dict()
    wrong = sorted(name for name in weights if name in found and not torch.equal(found[name], weights[name]))
    if wrong or not set(found) <= set(weights) | {"lm_head.weight"}:
        raise InfrastructureError(
            f"{folder}: read back, these weights differ: {wrong[:5]}; the disk may be full"
        )
    if model is None:
        return
    training = model.training
    model.eval()  # dropout, also that of adapters, is no part of the function
    bound = SAME_WEIGHTS_KL[dtype]
    packed = quantised.source(model)
    if packed:
        with model.disable_adapter():
            bound += QUANTISED_FACTOR * _difference(model, load_causal(packed, torch.float32))
    kl = _difference(model, saved.to(torch.float32))
    model.train(training)
    if not kl <= bound:
        raise InfrastructureError(
            f"{folder}: the saved model differs from the trained one by {kl:.2g} nats a token (bound "
            f"{bound:.2g}); save in float32 (model.dtype: float32)"
            + (", set lora.quantise: int8 or null" if packed else "")
            + " or train fewer steps"
        )


@torch.no_grad()
def _difference(ours: Any, theirs: Any) -> float:
    """Mean KL in nats a token of a model on its device to one on the CPU, over 32 random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, theirs.config.get_text_config().vocab_size, (1, 32), generator=generator)
    first = ours(input_ids=ids.to(device()), use_cache=False).logits.float().log_softmax(-1).cpu()
    second = theirs(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    return float((first.exp() * (first - second)).sum(-1).mean())


def digest(folder: Path) -> str:
    """SHA-256 over the sorted relative names and bytes of a folder's files."""
    whole = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()
