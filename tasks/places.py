"""Where things are, and the small file operations that every stage relies on.

All state that is not a DVC output lives under one untracked folder, `.plumbline` (PLUMBLINE_HOME moves it).
Files that another process may read at any moment are replaced atomically, so a reader sees the old or the
new, never half.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from data.errors import ConfigurationError, DataError
from data.folders import files_below

STAGES = Path("data") / "stages"

Json = dict[str, object]


def root(start: Path | None = None) -> Path:
    """The project folder: the nearest one upwards that holds `dvc.yaml` and `params.yaml`."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file() and (folder / "params.yaml").is_file():
            return folder
    for folder in (here, *here.parents):
        for there, missing in (("dvc.yaml", "params.yaml"), ("params.yaml", "dvc.yaml")):
            if (folder / there).is_file():
                raise ConfigurationError(
                    f"{folder}: {there} is there, {missing} is not; restore it with `git checkout "
                    f"{missing}`, or change into the project folder"
                )
    raise ConfigurationError(
        f"{here}: neither this folder nor one above it holds dvc.yaml and params.yaml; change into the "
        "project folder"
    )


def home(project: Path) -> Path:
    """The folder of untracked state, made when it is missing."""
    folder = Path(os.environ.get("PLUMBLINE_HOME") or project / ".plumbline").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{folder}: the folder of untracked state can not be made ({error.strerror}); make it writable "
            "or set "
            "PLUMBLINE_HOME to a folder that is"
        ) from error
    return folder


def stage_folder(project: Path, stage: str) -> Path:
    """The DVC output of a stage."""
    return project / STAGES / stage


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: written beside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    partial.replace(path)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file; keys are sorted and the layout fixed, so equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=True) + "\n")


def read_json(path: Path) -> Json:
    """A JSON object from a file, or an error that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: the file is missing; run the stage that writes it (dvc repro)") from error
    except ValueError as error:
        raise DataError(
            f"{path}: not valid JSON ({error}); delete the file and run its stage again"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}, expected an object; run its stage again")
    return value


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(path: Path) -> str:
    """sha256 of a file, or of a folder's sorted relative names, sizes and bytes (as
    training.models.digest).
    """
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        raise DataError(
            f"{path}: the input is missing; run the stage that writes it (dvc repro), or `dvc pull`"
        )
    whole = hashlib.sha256()
    for name in files_below(path):
        whole.update(f"{name}\0{(path / name).stat().st_size}\0".encode())
        whole.update(bytes.fromhex(file_digest(path / name)))
    return whole.hexdigest()


def digest_of(value: object) -> str:
    """sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
