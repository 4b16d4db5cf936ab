"""The tracking store without a server: one SQLite file and a folder of artifacts, both in `.plumbline`.

Several stages write at the same time, so the data base is set up by one process under a lock, waits when it
is busy, and keeps a write-ahead log. MLflow records absolute artifact paths; when the project folder was
moved or copied, they are rewritten before the first use, so that registered models are still found.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from data.errors import InfrastructureError
from tasks.places import home, read_json, write_json

EXPERIMENT = "plumbline"
_BUSY_SECONDS = 60
_PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
)


def tracking_uri(project: Path) -> str:
    """MLFLOW_TRACKING_URI where a server is used, else the project's own SQLite file."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database(project)}?timeout={_BUSY_SECONDS}"


def database(project: Path) -> Path:
    """The SQLite file of runs and registered models."""
    return home(project) / "mlflow.db"


def artifacts(project: Path) -> Path:
    """The folder of logged files."""
    return home(project) / "mlartifacts"


def lock(project: Path, name: str) -> FileLock:
    """A lock between the processes of this project on this machine."""
    folder = home(project) / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock", timeout=300)


def prepare(project: Path, create: Callable[[], None]) -> None:
    """Set the store up once; `create` makes the tables. Later calls only look at a marker file."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return
    marker = home(project) / "store.json"
    here = str(home(project))
    _refuse_damage(project)
    if _is_ready(project, marker):
        return
    with lock(project, "store"):
        if _is_ready(project, marker):
            return  # the process that held the lock has done it
        before = read_json(marker).get("home") if marker.is_file() else here
        if database(project).is_file() and before != here:
            _relocate(database(project), str(before), here)
        create()
        with sqlite3.connect(database(project), timeout=_BUSY_SECONDS) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        write_json(marker, {"home": here})


def _is_ready(project: Path, marker: Path) -> bool:
    here, file = str(home(project)), database(project)
    made = marker.is_file() and file.is_file() and file.stat().st_size > 0
    return made and read_json(marker).get("home") == here


def _refuse_damage(project: Path) -> None:
    """Nothing that is built on the store says more of a damaged file than that it could not be opened."""
    if database(project).is_file():
        with contextlib.suppress(sqlite3.OperationalError):  # Busy, or not yet set up.
            _select(project, "SELECT count(*) FROM sqlite_master", ())


def _select(project: Path, query: str, values: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of the SQLite file; sqlite3.OperationalError where it is busy or has no such table."""
    file = database(project)
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=_BUSY_SECONDS)) as connection:
            return [tuple(map(str, row)) for row in connection.execute(query, values)]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise InfrastructureError(
            f"{file}: the store of runs and registered models is damaged ({error}); restore it from a copy, "
            "or move it away (the history of runs and the registry then begin anew)"
        ) from error


def rows(project: Path, query: str, values: Sequence[str]) -> list[tuple[str, ...]] | None:
    """A look into the SQLite file without mlflow, whose import takes seconds; None where only mlflow can
    tell.

    For the question that every command starts with, whether anything has to be done at all.
    """
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    if not database(project).is_file():
        return []
    if not _is_ready(project, home(project) / "store.json"):
        return None
    try:
        return _select(project, query, values)
    except sqlite3.OperationalError:
        return None


def _relocate(path: Path, before: str, here: str) -> None:
    with sqlite3.connect(path, timeout=_BUSY_SECONDS) as connection:
        for table, column in _PATHS:
            columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            if column in columns:
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                    f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                    (here, len(before) + 1, before, len(before) + 1, before + "/"),
                )
