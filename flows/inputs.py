"""Whether the files and models that params.yaml names are there, and read as much as it allows: asked by
`doctor`, and by `run` before anything is started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from data.compressed import bare
from data.config import DataParams
from data.errors import ConfigurationError, DataError
from data.folders import files_below
from data.hub import reachable
from data.readers import SUFFIXES
from flows import dvc
from flows.dag import Dag
from flows.finding import Finding, State
from flows.records import tokenizer_folder
from tasks.params import FILE, Params, read_raw
from training import positions
from training.config import RewardParams, minilm_folder

_ABSENT = object()
ADDRESS = "download it and name the file; a data set of the hub is named by its id alone (owner/name)"


def sections(project: Path, dag: Dag) -> Iterator[Finding]:
    """The keys that dvc.yaml's stages depend on and params.yaml does not have: DVC refuses such stages."""
    raw = read_raw(project / FILE)
    for key in sorted({key for step in dag for key in step.params if ":" not in key}):
        value: object = raw
        for part in key.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is _ABSENT:
            users = ", ".join(step.name for step in dag if key in step.params)
            yield Finding(
                key, "broken", f"the key is missing, and dvc.yaml names it as a parameter of {users}",
                f"add `{key}:` with its values ({{}} for the defaults), or restore the file with "
                f"`git checkout {FILE}`",
            )  # fmt: skip


def require(project: Path, params: Params) -> None:
    """Raises DataError or ConfigurationError that names every missing file and model, and every length that a
    model has no positions for."""
    found = (*files(project, params.data), *models(project, params), *lengths(project, params))
    missing = [one for one in found if one.verdict == "broken"]
    if missing:
        kind = DataError if missing[0].kind == "data" else ConfigurationError
        raise kind(_told(missing))


def require_files(project: Path, params: Params) -> None:
    """Raises DataError that names every missing file."""
    missing = [one for one in files(project, params.data) if one.verdict == "broken"]
    if missing:
        raise DataError(_told(missing))


def workspace(project: Path) -> Iterator[Finding]:
    """What DVC needs to work in a folder, and a copy of the files alone has not: its config, and git."""
    if not (project / ".dvc" / "config").is_file():
        yield Finding(
            "DVC", "broken", ".dvc/config is missing",
            "restore it with `git checkout .dvc/config`, or copy the project's hidden files too",
        )  # fmt: skip
        return
    if any((folder / ".git").exists() for folder in (project.absolute(), *project.absolute().parents)):
        return
    if "no_scm=true" not in dvc.check(["config", "--list"], project).lower().replace("core.", ""):
        yield Finding(
            "git", "broken", f"{project} is no git repository, which DVC asks for",
            "`git init` makes it one, `git clone` a copy that knows its history; or `dvc config core.no_scm "
            "true`, then lineage knows no commits and `plumbline reproduce` can not work",
        )  # fmt: skip


def require_workspace(project: Path) -> None:
    """Raises ConfigurationError that says why DVC would refuse to work in this folder."""
    missing = list(workspace(project))
    if missing:
        raise ConfigurationError("\n".join(f"{one.what}: {one.seen}; {one.remedy}" for one in missing))


def require_sections(project: Path, dag: Dag) -> None:
    """Raises ConfigurationError that names every missing key."""
    missing = list(sections(project, dag))
    if missing:
        raise ConfigurationError(_told(missing))


def _told(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{FILE}: {one.what}: {one.seen}; {one.remedy}" for one in findings)


def files(project: Path, data: DataParams) -> Iterator[Finding]:
    """That each named file is there and not empty; a hub id is told as such."""
    for purpose in ("files", "prompts", "eval_prompts"):
        for name in getattr(data, purpose):
            what, path = f"data.{purpose}", project / name
            if "://" in name:
                yield Finding(what, "broken", f"{name}: an address, which no stage reads", ADDRESS, "data")
            elif path.exists():
                inside = [path] if path.is_file() else [path / below for below in files_below(path)]
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
            yield _gguf("model.source", source, gguf_file(source))
        except ConfigurationError as error:
            seen, _, remedy = str(error).partition("; ")
            yield Finding("model.source", "broken", seen, remedy)
    else:
        yield _model(project, "model.source", source)
    for name, model in (("reward.model", params.reward.model), ("judge.model", params.judge.model)):
        if model == "minilm":
            try:
                minilm_folder()
            except ConfigurationError as error:
                seen, _, remedy = str(error).partition("; ")
                yield Finding(name, "broken", seen, remedy)
        elif model != "policy":
            yield _model(project, name, model)


def base_config(project: Path, params: Params) -> dict[str, Any] | None:
    """config.json of the base model: the base stage's, when it is of this source, else a local folder's."""
    for place in (tokenizer_folder(project, params), project / params.model.source):
        if place is not None and (found := _config(place)) is not None:
            return found
    return None


def _config(folder: Path) -> dict[str, Any] | None:
    """A model folder's config.json; None without one that can be read, which `models` tells."""
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def lengths(project: Path, params: Params) -> Iterator[Finding]:
    """The lengths that the stages allow, against the positions of the models that are known already."""
    policy = base_config(project, params)
    for name in ("sft", "reward", "judge", "optimize", "evaluate"):
        section = getattr(params, name)
        config = (
            policy if getattr(section, "model", "policy") == "policy" else _score_config(project, section)
        )
        found = None if config is None else positions.over(config, section)
        if found is not None:
            yield Finding(f"{name} length", "broken", found, positions.REMEDY)


def _score_config(project: Path, section: RewardParams) -> dict[str, Any] | None:
    if section.model != "minilm":
        return _config(project / section.model)
    try:
        return _config(minilm_folder())
    except ConfigurationError:
        return None  # told by `models`


def _model(project: Path, what: str, source: str) -> Finding:
    from tasks.base import is_hub_id

    path = project / source
    if path.is_dir():
        return _folder(what, source, path)
    if path.exists():
        if what == "model.source" and path.suffix == ".gguf":
            return _gguf(what, source, path)
        return Finding(what, "broken", f"{source}: a file that is no model", f"name a {_KINDS[what]}")
    if is_hub_id(source) and not (source.count("/") and (project / source.split("/")[0]).is_dir()):
        return _hub(what, source, _cached(f"models--{source.replace('/', '--')}"), "configuration")
    return Finding(what, "broken", f"{source}: no such file or folder", f"correct {what}")


_KINDS = {"model.source": "folder with config.json and weights, a .gguf file, or a hub id"}
_KINDS |= dict.fromkeys(("reward.model", "judge.model"), "folder with config.json and weights, or a hub id")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def _folder(what: str, source: str, path: Path) -> Finding:
    """Whether a folder holds what transformers loads: a readable config and weights."""
    config = path / "config.json"
    if not config.is_file():
        seen = "a folder without config.json"
    elif not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        seen = f"a folder with config.json but without weights ({', '.join(_WEIGHTS)})"
    else:
        try:
            json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            seen = f"config.json is not valid JSON ({error})"
        else:
            return Finding(what, "fine", source)
    return Finding(what, "broken", f"{source}: {seen}", f"name a {_KINDS[what]}")


def _gguf(what: str, source: str, path: Path) -> Finding:
    with path.open("rb") as stream:
        start = stream.read(4)
    if start != b"GGUF":
        return Finding(what, "broken", f"{source}: does not begin as a GGUF file", "download it again")
    return Finding(what, "fine", str(path))


def _may_be_hub_id(project: Path, name: str) -> bool:
    """owner/name, where no folder of the project is called owner."""
    owner, slash, rest = name.partition("/")
    named = bool(owner and slash and rest) and not bare(name).endswith(SUFFIXES)
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
