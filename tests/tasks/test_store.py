"""The store of runs and registered models, when its file is not what it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.errors import InfrastructureError
from tasks.lineage import client, experiment_id
from tasks.registry import peek
from tasks.store import artifacts, database, rows

COUNT = "SELECT count(*) FROM experiments"


def _spoil(project: Path, keep: int) -> None:
    """Leave the first bytes of the file and put text after them."""
    for name in ("mlflow.db-wal", "mlflow.db-shm"):
        database(project).with_name(name).unlink(missing_ok=True)
    database(project).write_bytes(database(project).read_bytes()[:keep] + b"no data base" * 2000)


@pytest.mark.parametrize("keep", [0, 100])
def test_a_damaged_store_is_named_with_its_remedy(project: Path, keep: int) -> None:
    client(project)
    _spoil(project, keep)
    asks = (lambda: client(project), lambda: peek(project, "tiny"), lambda: rows(project, COUNT, ()))
    for ask in asks:
        with pytest.raises(InfrastructureError, match=r"mlflow\.db: the store .* is damaged .*; restore it"):
            ask()


def test_an_emptied_store_is_set_up_again(project: Path) -> None:
    for name in ("mlflow.db-wal", "mlflow.db-shm"):
        database(project).with_name(name).unlink(missing_ok=True)
    database(project).write_bytes(b"")
    tracking = client(project)
    where = tracking.get_experiment(experiment_id(tracking)).artifact_location
    assert where == str(artifacts(project))
    assert rows(project, COUNT, ()) == [("2",)]
