"""The DAG as dvc.yaml has it: stages, what each reads and writes, and which therefore stands above which.

dvc.yaml is the only place where the DAG is written; this reads it as DVC does, its templating included
(`${key}` from params.yaml and `vars`, `foreach`, `matrix`). DVC itself is only ever started as a command.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from data.errors import ConfigurationError
from tasks.params import read_raw

_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([^}]+?)\s*\}")


@dataclass(frozen=True)
class Step:
    """One stage of dvc.yaml."""

    name: str
    command: str
    deps: tuple[str, ...]
    outs: tuple[str, ...]
    params: tuple[str, ...]
    """Keys, those of other files than params.yaml as `file:key`."""
    always: bool
    """Runs at every repro: the outer steps."""
    above: tuple[str, ...] = ()
    """Stages whose outputs this one reads."""


@dataclass(frozen=True)
class Dag:
    """Stages by name, in an order in which they can run."""

    steps: Mapping[str, Step] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps.values())

    def below(self, name: str) -> list[str]:
        """All stages that need this one, directly or not."""
        found = {name}
        for step in self:
            if found & set(step.above):
                found.add(step.name)
        return [step.name for step in self if step.name in found and step.name != name]


def read_dag(project: Path) -> Dag:
    """The stages of a project's dvc.yaml with their edges."""
    file = project / "dvc.yaml"
    tree = read_raw(file)
    stages = tree.get("stages")
    if not isinstance(stages, dict) or not stages:
        raise ConfigurationError(f"{file}: there are no stages; restore it with `git checkout dvc.yaml`")
    values = _values(project, tree.get("vars"))
    steps: dict[str, Step] = {}
    for name, entry in stages.items():
        if not isinstance(entry, dict):
            raise ConfigurationError(f"{file}: stage {name}: expected keys such as cmd, deps and outs")
        for full_name, plain in _expanded(str(name), entry, values):
            steps[full_name] = _step(full_name, plain)
    _require_apart(file, steps)
    return Dag(_in_order(file, {name: _linked(step, steps) for name, step in steps.items()}))


def _step(name: str, entry: Mapping[str, object]) -> Step:
    command = entry.get("cmd", "")
    where = str(entry.get("wdir", "."))
    outs = [path for key in ("outs", "metrics", "plots") for path in _paths(entry.get(key), where)]
    return Step(
        name=name,
        command=" && ".join(map(str, command)) if isinstance(command, list) else str(command),
        deps=tuple(_paths(entry.get("deps"), where)),
        outs=tuple(outs),
        params=tuple(_params(entry.get("params"))),
        always=entry.get("always_changed") is True,
    )


def _paths(entries: object, where: str) -> list[str]:
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in _list(entries)]
    return [posixpath.normpath(posixpath.join(where, str(name))) for name in names]


def _params(entries: object) -> Iterator[str]:
    for entry in _list(entries):
        if not isinstance(entry, dict):
            yield str(entry)
            continue
        for file, keys in entry.items():
            prefix = "" if file == "params.yaml" else f"{file}:"
            yield from (f"{prefix}{key}" for key in _list(keys))


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _linked(step: Step, steps: Mapping[str, Step]) -> Step:
    above = [
        other.name
        for other in steps.values()
        if other.name != step.name and any(_overlap(dep, out) for dep in step.deps for out in other.outs)
    ]
    return Step(step.name, step.command, step.deps, step.outs, step.params, step.always, tuple(above))


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _require_apart(file: Path, steps: Mapping[str, Step]) -> None:
    """ConfigurationError where two stages would write the same place."""
    for one, other in itertools.combinations(steps.values(), 2):
        for path, its in itertools.product(one.outs, other.outs):
            if _overlap(path, its):
                raise ConfigurationError(
                    f"{file}: the stages {one.name} and {other.name} write the same place (outs: {path} and "
                    f"{its}); give one of them another output"
                )


def _in_order(file: Path, steps: Mapping[str, Step]) -> dict[str, Step]:
    """Above before below; where the edges leave it open, the order of the file."""
    ordered: dict[str, Step] = {}
    while len(ordered) < len(steps):
        ready = [s for s in steps.values() if s.name not in ordered and set(s.above) <= set(ordered)]
        if not ready:
            left = ", ".join(name for name in steps if name not in ordered)
            raise ConfigurationError(f"{file}: the stages {left} wait for each other; remove one dependency")
        ordered[ready[0].name] = ready[0]
    return ordered


def _values(project: Path, extra: object) -> dict[str, object]:
    """What `${...}` may name: params.yaml, then the files and values under `vars`."""
    values = dict(read_raw(project / "params.yaml"))
    for entry in _list(extra):
        if isinstance(entry, dict):
            values.update(entry)
            continue
        name, _, keys = str(entry).partition(":")
        known = read_raw(project / name)
        values.update({key: known[key] for key in keys.split(",")} if keys else known)
    return values


def _expanded(
    name: str, entry: Mapping[str, object], values: Mapping[str, object]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """One entry, or the several that `foreach` or `matrix` make of it; all references filled in."""
    rows: list[tuple[str, Mapping[str, object]]] = [("", {})]
    body: object = entry
    if "foreach" in entry:
        items = _filled(entry["foreach"], values, name)
        body = entry.get("do", {})
        if isinstance(items, dict):
            rows = [(f"@{key}", {"key": key, "item": item}) for key, item in items.items()]
        else:
            rows = [(f"@{_label(item, n)}", {"item": item}) for n, item in enumerate(_list(items))]
    elif "matrix" in entry:
        axes = _filled(entry["matrix"], values, name)
        assert isinstance(axes, dict)
        body = {key: value for key, value in entry.items() if key != "matrix"}
        rows = [
            ("@" + "-".join(_label(v, 0) for v in chosen), {"item": dict(zip(axes, chosen, strict=True))})
            for chosen in itertools.product(*(_list(axis) for axis in axes.values()))
        ]
    for suffix, local in rows:
        filled = _filled(body, {**values, **local}, name)
        assert isinstance(filled, dict)
        yield name + suffix, filled


def _label(item: object, position: int) -> str:
    return str(position) if isinstance(item, dict | list) else str(item)


def _filled(value: object, values: Mapping[str, object], stage: str) -> object:
    if isinstance(value, dict):
        return {_filled(key, values, stage): _filled(item, values, stage) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, values, stage) for item in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _named(whole[1], values, stage)
    return _REFERENCE.sub(lambda match: str(_named(match[1], values, stage)), value)


def _named(key: str, values: Mapping[str, object], stage: str) -> object:
    value: object = values
    for part in re.split(r"\.|\[|\]\.?", key.rstrip("]")):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            raise ConfigurationError(
                f"dvc.yaml: stage {stage}: ${{{key}}} names nothing in params.yaml or vars; correct the key"
            )
    return value
