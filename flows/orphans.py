"""Flow runs whose process is gone: marked Crashed at the next start, so that none stays Running or holds a
slot.

A flow run carries its process as a tag (host, pid, start time). Closing goes through the API's
orchestration, which also gives back concurrency slots; a deployment with a limit of one goes on with its
next run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed

from tasks.process import gone, identity

OWNER = "process:"
_LIVE = ["RUNNING", "PENDING", "CANCELLING", "PAUSED"]


def owner_tag() -> str:
    """This process, as a tag of its flow runs."""
    return OWNER + identity(os.getpid())


def mark_crashed() -> list[str]:
    """Close the runs of dead processes; their names."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": _LIVE}}})
        )
        orphans = [run for run in runs if _orphan(run)]
        for run in orphans:
            _close_tasks(client, run)
            reason = "its process was killed; found by the next start"
            client.set_flow_run_state(run.id, Crashed(message=reason), force=True)
    return [run.name for run in orphans]


def _orphan(run: FlowRun) -> bool:
    owners = [tag.removeprefix(OWNER) for tag in run.tags if tag.startswith(OWNER)]
    return bool(owners) and all(gone(owner) for owner in owners)


def _close_tasks(client: SyncPrefectClient, run: FlowRun) -> None:
    wanted = {"state": {"type": {"any_": [*_LIVE, "SCHEDULED"]}}}
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}),
        task_run_filter=TaskRunFilter.model_validate(wanted),
    )
    for task in tasks:
        client.set_task_run_state(task.id, Crashed(message="its flow's process was killed"), force=True)


def claim(run_id: object, tags: Iterable[str]) -> None:
    """Give a flow run that a worker started its owner tag; ours have it from the start."""
    known = set(tags)
    if not any(tag.startswith(OWNER) for tag in known):
        with get_client(sync_client=True) as client:
            client.update_flow_run(run_id, tags=sorted({*known, owner_tag()}))  # type: ignore[arg-type]
