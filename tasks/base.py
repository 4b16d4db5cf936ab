"""The base model, materialised once: GGUF dequantised, a local folder, a .gguf file or a hub id.

    gguf:PACKAGE[/FILE]   the weights that an installed package ships; the package itself is never imported
    path/model.gguf       a file
    path/folder           a model as transformers saves it
    owner/name            a hub id, from the cache or (when the network is allowed) downloaded

All later stages start from this output, so its weights have the one saved precision, its chat template is the
one that every stage uses, and its config names no place on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import ConfigurationError, InfrastructureError
from tasks.places import Json, digest, write_json
from tasks.stage import Stage, run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def is_hub_id(source: str) -> bool:
    """Whether a source that is no file could name a model on the hub."""
    return bool(_HUB_ID.match(source)) and not source.endswith(".gguf")


def gguf_file(source: str) -> Path:
    """The GGUF file of `gguf:PACKAGE[/FILE]`, found without importing the package."""
    package, _, wanted = source.removeprefix("gguf:").partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"{source}: the package {package!r} is not installed; install it "
            f"(pip install {package.replace('_', '-')}) or name a folder or a hub id"
        )
    found = sorted(
        file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf")
    )
    chosen = [file for file in found if not wanted or file.name == wanted]
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{source}: {len(chosen)} GGUF files match; name one of "
            f"{[file.name for file in found]} as gguf:{package}/FILE"
        )
    return chosen[0]


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """While it is open a GGUF file is parsed once, and over a plain array.

    transformers reads the file for the tokenizer, the config and the weights, and makes the table of names
    anew for each part of the model; slicing a memmap costs five times what slicing an array does. Measured
    with SmolLM2-135M: 101 s before, on a busy machine.
    """
    import gguf
    import numpy

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = numpy.asarray(mapped)

    known = {"GGUFReader": gguf.GGUFReader, "get_tensor_name_map": gguf.get_tensor_name_map}
    gguf.GGUFReader = functools.cache(Reader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        for name, value in known.items():
            setattr(gguf, name, value)


def load(project: Path, source: str, revision: str | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """Model (float32) and tokenizer of a source."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = project / source
    where, extra = str(path if path.exists() else source), {}
    if source.startswith("gguf:") or source.endswith(".gguf"):
        file = gguf_file(source) if source.startswith("gguf:") else path
        where, extra = str(file.parent), {"gguf_file": file.name}
    local = bool(extra) or path.exists() or os.environ.get("HF_HUB_OFFLINE") == "1"
    known: dict[str, Any] = {"local_files_only": local, "revision": revision, **extra}
    weights: dict[str, Any] = {"dtype": torch.float32, **known}
    if extra:
        # Without this the weights stay quantised and can not be saved.
        weights["quantization_config"] = GgufConfig(dequantize=True)
    try:
        with parsed_once() if extra else contextlib.nullcontext():
            tok = AutoTokenizer.from_pretrained(where, **known)
            model = AutoModelForCausalLM.from_pretrained(where, **weights)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"params.yaml: model.source = {source!r}: no causal language model could be loaded from {where} "
            f"({error}); "
            "name a folder with config.json and weights, a .gguf file, or a hub id that is in the cache"
        ) from error
    return model, tok


def set_template(project: Path, tok: PreTrainedTokenizerBase, template: str | None) -> None:
    """The chat template of all stages: the given one, else the tokenizer's own, else the plain one."""
    from training.chat import PLAIN_TEMPLATE

    if template is not None:
        file = project / template[:200]
        tok.chat_template = file.read_text(encoding="utf-8") if file.is_file() else template
    elif not tok.chat_template:
        tok.chat_template = PLAIN_TEMPLATE
    if tok.eos_token_id is None:
        raise ConfigurationError(
            "model.source: the tokenizer has no EOS token, so no answer could end; set eos_token"
        )
    if tok.pad_token_id is None:
        tok.pad_token = tok.eos_token


def materialise(stage: Stage) -> Json:
    """Write `model/` into the work folder; its description."""
    import torch

    from training.chat import template_hash
    from training.models import merge_and_save

    params = stage.params.model
    model, tok = load(stage.project, params.source, params.revision)
    set_template(stage.project, tok, params.chat_template)
    if any(getattr(model.config, key, None) for key in ("quantization_config",)):
        del model.config.quantization_config
    folder = stage.work / "model"
    merge_and_save(model, tok, folder, getattr(torch, params.dtype))
    tokenizer = sorted(file for file in folder.iterdir() if "token" in file.name or file.name == "vocab.json")
    return {
        "digest": digest(folder),
        "source": params.source,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "template_hash": template_hash(tok),
        "tokenizer_hash": "".join(digest(file)[:8] for file in tokenizer)[:64],
    }


def body(stage: Stage) -> None:
    """Materialise once a fingerprint; when only the publication was cut off, it is repeated."""
    known = stage.work / "result.json"
    if not known.is_file():
        try:
            write_json(known, materialise(stage))
        except OSError as error:
            raise InfrastructureError(
                f"the base model could not be written ({error}); free disk space"
            ) from error
    stage.publish("result.json", "model")


if __name__ == "__main__":
    run("base", body)
