"""Overrides and profiles, written into params.yaml under a lock: DVC decides by that file what has to run.

Comments survive. All is checked before anything is written.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from data.errors import ConfigurationError
from tasks.params import FILE, Params, parse, read_raw, read_yaml
from tasks.places import home, write_text


def write_overrides(
    project: Path,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    check: Callable[[Params], None] = lambda params: None,
) -> list[str]:
    """Write a profile, then `key.sub=value` overrides, into params.yaml; returns the keys that changed.

    A profile is whole: a key that neither it nor what it extends sets goes back to its default. All is
    checked before anything is written, by `check` too: a fault leaves the file as it was.
    """
    path = project / FILE
    with FileLock(home(project) / "params.lock", timeout=60):
        yaml = YAML()
        yaml.preserve_quotes = True
        yaml.width = 110
        tree = read_yaml(path, yaml) if path.is_file() else None
        tree = CommentedMap() if tree is None else tree
        changed: list[str] = []
        where = FILE
        if profile is not None:
            where = profile_path(project, profile).name
            _become(tree, read_profile(project, profile), "", changed)
        for override in overrides:
            where = "override"
            key, value = _split(override)
            _set(tree, key, value, changed)
        text = io.StringIO()
        yaml.dump(tree, text)
        check(parse(YAML(typ="safe").load(text.getvalue()) or {}, where))
        if changed:
            write_text(path, text.getvalue())
    return changed


def overridden(raw: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Plain parameters with `key.sub=value` overrides; nothing is written."""
    tree = copy.deepcopy(dict(raw))
    for override in overrides:
        _set(tree, *_split(override), [])
    return tree


def profile_path(project: Path, profile: str) -> Path:
    """The file of a profile: a name of `profiles/` or a path."""
    named = project / "profiles" / f"{profile}.yaml"
    if named.is_file():
        return named
    if Path(profile).is_file():
        return Path(profile)
    known = sorted(file.stem for file in (project / "profiles").glob("*.yaml"))
    raise ConfigurationError(
        f"profile {profile!r}: neither {named} nor a file of that name exists; known: "
        f"{', '.join(known) or 'none'}"
    )


EXTENDS = "extends"


def read_profile(project: Path, profile: str) -> dict[str, object]:
    """A profile as plain data: its own keys over those of the profile that its `extends` names, if any.

    Sections that none of them has are there and empty: DVC wants to see what a stage depends on.
    """
    chain: list[Path] = []
    found: dict[str, object] = {}
    name: object = profile
    while name is not None:
        file = profile_path(project, str(name))
        if file in chain:
            raise ConfigurationError(
                f"{file}: extends {name!r}, a circle; a chain of profiles must end at one without `extends`"
            )
        chain.append(file)
        own = read_raw(file)
        name = own.pop(EXTENDS, None)
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"{file}: {EXTENDS} = {name!r}; expected the name of one profile")
        found = merged(own, found)
    sections = {
        name: {} if field.default_factory else field.default for name, field in Params.model_fields.items()
    }
    return merged(sections, found)


def _split(override: str) -> tuple[str, object]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigurationError(f"override {override!r}: expected key.sub=value, such as optimize.lr=1e-5")
    try:
        return key.strip(), YAML(typ="safe").load(text)
    except YAMLError as error:
        raise ConfigurationError(f"override {override!r}: the value is not valid YAML: {error}") from error


def _set(tree: dict[str, Any], key: str, value: object, changed: list[str]) -> None:
    *sections, last = key.split(".")
    for part in sections:
        if tree.get(part) is None:
            tree[part] = CommentedMap()
        if not isinstance(tree[part], dict):
            raise ConfigurationError(f"override {key}: {part} is a single value, it has no keys below it")
        tree = tree[part]
    if _differs(tree, last, value):
        tree[last] = value
        changed.append(key)


def _differs(tree: Mapping[str, object], key: str, value: object) -> bool:
    """Whether a key is absent or has another value; true is no 1."""
    return key not in tree or tree[key] != value or isinstance(tree[key], bool) != isinstance(value, bool)


def _become(tree: CommentedMap, wanted: Mapping[str, object], prefix: str, changed: list[str]) -> None:
    """Make a section equal to plain data; comments of the keys that stay survive."""
    for key in [key for key in tree if key not in wanted]:
        del tree[key]
        changed.append(f"{prefix}{key}")
    for key, value in wanted.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _become(tree[key], value, f"{prefix}{key}.", changed)
        elif _differs(tree, key, value):
            tree[key] = value
            changed.append(f"{prefix}{key}")


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Nested keys of `over` win; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        result[key] = merged(dict(known), dict(value)) if both else value  # type: ignore[call-overload]
    return result
