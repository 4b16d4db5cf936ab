"""What the outside world holds now: digests of the data files and of the models that params.yaml names.

DVC can not depend on a list of paths from params.yaml, on a file outside the project by its content alone, or
on an installed package. So this small step runs at every repro and writes one file a consumer; stages depend
on these files and run again when the content behind a name has changed. It needs no heavy import and
remembers digests by size and time, so that it costs a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from data.errors import ConfigurationError
from data.folders import files_below
from tasks.base import gguf_file, is_hub_id
from tasks.params import Params, load
from tasks.places import Json, digest, home, stage_folder, write_json
from tasks.stage import Stage, run
from training.config import minilm_folder
from training.config_rewards import ScorerParams

FILES = ("data.json", "model.json", "reward.json", "judge.json", "optimize.json")


def current(project: Path, params: Params) -> dict[str, Json]:
    """Name of an output file -> what it holds now."""
    memo = _Memo(home(project) / "digests.json")
    data = {
        purpose: {name: _data_digest(project, name, memo) for name in getattr(params.data, purpose)}
        for purpose in ("files", "prompts", "eval_prompts")
    }
    found: dict[str, Json] = {
        "data.json": dict(data),
        "model.json": {
            "source": params.model.source,
            "digest": _model_digest(project, params.model.source, memo),
        },
        "reward.json": _reward(project, params.reward.model, memo),
        "judge.json": _reward(project, params.judge.model, memo),
        "optimize.json": {
            scorer.name: _scorer(project, scorer, memo) for scorer in params.optimize.rewards.scorers
        },
    }
    template = params.model.chat_template
    if template is not None and (project / template[:200]).is_file():
        found["model.json"]["template"] = digest(project / template)
    memo.save()
    return found


def unchanged(project: Path) -> bool:
    """True when the published digests are the present ones; lets a command say 'up to date' without DVC."""
    folder = stage_folder(project, "sources")
    now = current(project, load(project))
    return all((folder / n).is_file() and json.loads((folder / n).read_text()) == v for n, v in now.items())


def _data_digest(project: Path, name: str, memo: _Memo) -> str:
    path = project / name
    return memo.digest(path) if path.exists() else f"not local: {name}"


def _model_digest(project: Path, source: str, memo: _Memo) -> str:
    if source.startswith("gguf:"):
        return memo.digest(gguf_file(source))
    path = project / source
    if path.exists():
        return memo.digest(path)
    if is_hub_id(source):
        return f"hub:{source}"
    raise ConfigurationError(
        f"params.yaml: model.source = {source!r}: neither a file or folder nor a hub id (owner/name); "
        "correct the path"
    )


def _scorer(project: Path, scorer: ScorerParams, memo: _Memo) -> str:
    """The content behind a source of reward: a model's folder, or the file that defines a function."""
    if scorer.kind == "learned" and (project / scorer.path).exists() and scorer.path:
        return memo.digest(project / scorer.path)
    if scorer.kind == "function":
        file = project / (scorer.path.partition(":")[0].replace(".", "/") + ".py")
        return memo.digest(file) if file.is_file() else scorer.path
    return scorer.path


def _reward(project: Path, model: str, memo: _Memo) -> Json:
    path = minilm_folder() if model == "minilm" else project / model
    return {"model": model, "digest": memo.digest(path) if path.exists() else model}


class _Memo:
    """Digests of files by path, size and time of change, so that a model of many GB is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, str] = {}
        self.used: dict[str, str] = {}
        if path.is_file():
            try:
                self.known = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                self.known = {}  # a memo is only a saving

    def digest(self, path: Path) -> str:
        key = f"{path.resolve()}|{'|'.join(_stamps(path))}"
        self.used[key] = self.known.get(key) or digest(path)
        return self.used[key]

    def save(self) -> None:
        if self.used != self.known:
            write_json(self.path, self.used)


def _stamps(path: Path) -> Iterable[str]:
    for name in [""] if path.is_file() else files_below(path):
        about = (path / name).stat()
        yield f"{name or path.name}:{about.st_size}:{about.st_mtime_ns}"


def body(stage: Stage) -> None:
    """Write one file a consumer."""
    for name, value in current(stage.project, stage.params).items():
        write_json(stage.work / name, value)
    stage.publish(*FILES)


if __name__ == "__main__":
    run("sources", body, outer=True)
