"""What happened, into MLflow: a parent run for the pipeline, a child run for each stage that did work.

Metrics are sent in batches (a single call costs 4 to 13 ms) that end at a step, so after a kill the store
knows exactly which steps it has. Runs carry the process that owns them; `sweep` closes those whose owner is
gone. Inputs and outputs are tags that hold digests, which is how history is walked (tasks/history.py).
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

from tasks.follow import Metrics
from tasks.places import read_json, write_json
from tasks.process import OFFLINE, gone
from tasks.publish import link_tree
from tasks.recorder import MEMORY, Ending, Entry
from tasks.status import masked, read_status
from tasks.store import EXPERIMENT, artifacts, lock, prepare, tracking_uri
from tasks.store import rows as store_rows

Result = TypeVar("Result")
_BATCH = 1000  # metrics that MLflow takes in one call
_FLUSH_SECONDS = 2.0
_OPEN_PARENT = """
    SELECT runs.run_uuid FROM runs
    JOIN tags AS kind ON kind.run_uuid = runs.run_uuid
        AND kind.key = 'plumbline.kind' AND kind.value = 'pipeline'
    JOIN tags AS name ON name.run_uuid = runs.run_uuid
        AND name.key = 'plumbline.pipeline' AND name.value = ?
    WHERE runs.status = 'RUNNING'
"""


def client(project: Path) -> Any:
    """An MLflow client on the project's store, which is set up when it is new."""
    os.environ.update(
        {name: value for name, value in OFFLINE.items() if name.startswith(("MLFLOW", "DO_NOT"))}
    )
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

    uri = tracking_uri(project)

    def create() -> None:
        fresh = MlflowClient(tracking_uri=uri, registry_uri=uri)
        if fresh.get_experiment_by_name(EXPERIMENT) is None:
            fresh.create_experiment(EXPERIMENT, artifact_location=str(artifacts(project)))
        fresh.search_registered_models(max_results=1)

    prepare(project, create)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def experiment_id(tracking: Any) -> str:
    """The one experiment; on a server it may have to be made."""
    found = tracking.get_experiment_by_name(EXPERIMENT)
    return str(found.experiment_id if found else tracking.create_experiment(EXPERIMENT))


def retried(action: Callable[[], Result], tries: int = 5) -> Result:
    """Call again when the store is busy or briefly away."""
    from mlflow.exceptions import MlflowException

    for attempt in range(tries):
        try:
            return action()
        except MlflowException as error:
            text = str(error).lower()
            if attempt == tries - 1 or not any(
                word in text for word in ("locked", "busy", "timed out", "connection")
            ):
                raise
            time.sleep(0.2 * 2**attempt)
    raise AssertionError("unreachable")


def record(entry: Entry, ending: Callable[[float], Ending | None]) -> str:
    """Open the stage's run, send its metrics while it works, close it when `ending` tells how; the run's id.

    `ending` waits for the given seconds and returns None as long as the stage works.
    """
    tracking = client(entry.project)
    sweep(entry.project, tracking)
    run_id, fresh = retried(lambda: _open_child(tracking, entry))
    known = _last_step(tracking, run_id) if not fresh else 0
    rows = Metrics(entry.work / "metrics.jsonl")
    while (end := ending(_FLUSH_SECONDS)) is None:
        _flush(tracking, run_id, rows.read(), known)
    _flush(tracking, run_id, rows.read(), known)
    _close(tracking, run_id, end)
    return run_id


def _flush(tracking: Any, run_id: str, rows: Sequence[tuple[int, dict[str, float]]], known: int) -> None:
    """Send whole steps in as few calls as possible; a batch ends at a step, so a kill never halves one."""
    from mlflow.entities import Metric

    batch: list[Any] = []
    when = int(time.time() * 1000)
    for step, values in rows:
        if step <= known:
            continue  # sent before the kill that this run goes on from
        points = [Metric(_name(key), value, when, step) for key, value in values.items()]
        if batch and len(batch) + len(points) > _BATCH:
            _send(tracking, run_id, batch)
            batch = []
        batch += points
    _send(tracking, run_id, batch)


def _send(tracking: Any, run_id: str, batch: list[Any]) -> None:
    if batch:
        retried(lambda: tracking.log_batch(run_id, metrics=batch))


def _name(key: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in key)


def _open_child(tracking: Any, entry: Entry) -> tuple[str, bool]:
    """The stage's run: the one that a kill left, when the work goes on, else a new one. True when new."""
    memory = entry.work / MEMORY
    with lock(entry.project, "tracking"):
        parent = _open_parent(tracking, entry)
        tags = {
            "mlflow.parentRunId": parent,
            "plumbline.kind": "stage",
            "plumbline.stage": entry.stage,
            "plumbline.fingerprint": entry.fingerprint,
            "plumbline.pipeline": entry.pipeline,
            "plumbline.owner": entry.process,
            **{f"plumbline.in.{path}": digest for path, digest in entry.inputs.items()},
            **entry.facts,
        }
        left = _left_run(tracking, memory)
        if left is not None:
            for key, value in tags.items():
                tracking.set_tag(left, key, value)
            tracking.update_run(left, status="RUNNING")
            return left, False
        run = tracking.create_run(experiment_id(tracking), run_name=entry.stage, tags=tags)
        run_id = str(run.info.run_id)
        entry.work.mkdir(parents=True, exist_ok=True)
        write_json(memory, {"run_id": run_id})
        _log_start(tracking, run_id, entry)
        return run_id, True


def _left_run(tracking: Any, memory: Path) -> str | None:
    from mlflow.exceptions import MlflowException

    if not memory.is_file():
        return None
    run_id = str(read_json(memory).get("run_id"))
    try:
        return run_id if tracking.get_run(run_id).info.lifecycle_stage == "active" else None
    except MlflowException:
        return None  # another store than the one that the work began with


def _log_start(tracking: Any, run_id: str, entry: Entry) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param

    params = [Param(_name(key), masked(str(value))[:6000]) for key, value in entry.params.items()]
    for start in range(0, len(params), 100):
        tracking.log_batch(run_id, params=params[start : start + 100])
    inputs = [
        DatasetInput(
            Dataset(name=path[-500:], digest=digest[:36], source_type="local", source=f'{{"uri": "{path}"}}'),
            [InputTag("mlflow.data.context", entry.stage)],
        )
        for path, digest in entry.inputs.items()
    ]
    if inputs:
        tracking.log_inputs(run_id, inputs)


def _open_parent(tracking: Any, entry: Entry) -> str:
    """The pipeline's unfinished run, opened again after a kill, or a new one."""
    newest = tracking.search_runs(
        [experiment_id(tracking)],
        f"tags.`plumbline.kind` = 'pipeline' and tags.`plumbline.pipeline` = '{entry.pipeline}'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    if newest and newest[0].info.status != "FINISHED":
        run_id = str(newest[0].info.run_id)
        tracking.set_tag(run_id, "plumbline.owner", entry.owner)
        if newest[0].info.status != "RUNNING":
            tracking.update_run(run_id, status="RUNNING")
        return run_id
    tags = {
        "plumbline.kind": "pipeline",
        "plumbline.pipeline": entry.pipeline,
        "plumbline.owner": entry.owner,
        "plumbline.registry": entry.registry_name,
        **entry.facts,
    }
    run = tracking.create_run(experiment_id(tracking), run_name=f"pipeline-{entry.pipeline[:8]}", tags=tags)
    return str(run.info.run_id)


def _last_step(tracking: Any, run_id: str) -> int:
    keys = [key for key in tracking.get_run(run_id).data.metrics if not key.startswith("result.")]
    return max((point.step for key in keys for point in tracking.get_metric_history(run_id, key)), default=0)


def _close(tracking: Any, run_id: str, ending: Ending) -> None:
    from mlflow.entities import Metric, RunTag

    tags = [RunTag(f"plumbline.out.{path}", digest) for path, digest in ending.outputs.items()]
    if ending.reason:
        tags.append(RunTag("plumbline.reason", masked(ending.reason)[:4000]))
    now = int(time.time() * 1000)
    metrics = [Metric(f"result.{_name(key)}", value, now, 0) for key, value in ending.metrics.items()]
    retried(lambda: tracking.log_batch(run_id, metrics=metrics, tags=tags))
    for path, name in ending.files:
        keep_file(tracking, run_id, path, name)
    retried(lambda: tracking.set_terminated(run_id, ending.status))


def keep_file(tracking: Any, run_id: str, path: Path, name: str) -> str:
    """Keep a file or folder as an artifact (a hard link costs no disk); returns where it lies."""
    base = str(tracking.get_run(run_id).info.artifact_uri)
    folder = local_path(base)
    if folder is not None:
        if not (folder / name).exists():
            partial = folder / f"{Path(name).name}.partial"
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
            link_tree(path, partial)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            partial.replace(folder / name)
        return str(folder / name)
    if path.is_dir():
        tracking.log_artifacts(run_id, str(path), name)
    else:
        tracking.log_artifact(run_id, str(path), str(Path(name).parent) if "/" in name else None)
    return f"{base}/{name}"


def local_path(uri: str) -> Path | None:
    """The folder of an artifact address on this machine, None when a server keeps it."""
    parts = urlparse(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(uri) if "://" not in uri else None


def read_artifact(run: Any, name: str) -> str | None:
    """The text of a file that a run kept, None when it kept none of that name."""
    folder = local_path(str(run.info.artifact_uri))
    if folder is None:
        from mlflow.artifacts import download_artifacts

        return Path(str(download_artifacts(run_id=run.info.run_id, artifact_path=name))).read_text("utf-8")
    file = folder / name
    return file.read_text(encoding="utf-8") if file.is_file() else None


def sweep(project: Path, tracking: Any | None = None) -> list[str]:
    """Close the runs whose process is gone; returns their ids. Called at the start of every command and
    stage.
    """
    tracking = tracking or client(project)
    with lock(project, "tracking"):
        open_runs = tracking.search_runs(
            [experiment_id(tracking)], "attributes.status = 'RUNNING'", max_results=1000
        )
        orphans = [run for run in open_runs if gone(run.data.tags.get("plumbline.owner", ""))]
        failed: set[str] = set()
        # Children first: what they ended as decides what their parent ended as.
        orphans.sort(key=lambda run: run.data.tags.get("plumbline.kind") == "pipeline")
        for run in orphans:
            tags, run_id = run.data.tags, str(run.info.run_id)
            kind = tags.get("plumbline.kind")
            said = read_status(project, tags.get("plumbline.stage", "")) if kind == "stage" else None
            has_failed = (said or {}).get("state") == "failed" and (said or {}).get("run_id") == run_id
            if kind == "pipeline":
                has_failed = run_id in failed or _any_failed(tracking, run_id)
            elif has_failed:
                failed.add(tags.get("mlflow.parentRunId", ""))
            tracking.set_tag(
                run_id, "plumbline.reason", "a stage failed" if has_failed else "its process was killed"
            )
            tracking.set_terminated(run_id, "FAILED" if has_failed else "KILLED")
    return [str(run.info.run_id) for run in orphans]


def _any_failed(tracking: Any, parent: str) -> bool:
    query = f"tags.`mlflow.parentRunId` = '{parent}' and attributes.status = 'FAILED'"
    return bool(tracking.search_runs([experiment_id(tracking)], query, max_results=1))


def close_parent(
    project: Path, pipeline: str, metrics: Mapping[str, float], files: Sequence[Path]
) -> str | None:
    """End the pipeline's open run with its summary; None when there is none open."""
    if store_rows(project, _OPEN_PARENT, [pipeline]) == []:
        return None
    tracking = client(project)
    query = f"tags.`plumbline.kind` = 'pipeline' and tags.`plumbline.pipeline` = '{pipeline}'"
    found = tracking.search_runs([experiment_id(tracking)], query, order_by=["attributes.start_time DESC"])
    still_open = [run for run in found if run.info.status == "RUNNING"]
    if not still_open:
        return None
    run_id = str(still_open[0].info.run_id)
    names = [(path, path.name) for path in files if path.is_file()]
    _close(tracking, run_id, Ending("FINISHED", files=names, metrics=metrics))
    return run_id
