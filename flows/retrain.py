"""The DAG as a Prefect flow: reads the stages from dvc.yaml and runs each as one task run of the same name.

Independent stages run side by side. A task run shows progress, log, metrics and how the stage ended; what
is up to date is shown as Skipped, what DVC restored from its run cache as Cached. Only infrastructure
failures are tried again. When a stage fails, those below it are shown as NotRun; the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelled, Completed, Failed
from prefect.tasks import Task

from data.errors import EXIT_CODES, PlumblineError
from flows import cache, dvc, orphans
from flows.alone import alone
from flows.dag import Dag, read_dag
from flows.screen import Screen
from flows.secrets import MaskingFilter, refuse_in_params
from flows.settle import leave
from flows.shown import Shown, shielded
from flows.stages import Outcome, Work
from tasks.overrides import write_overrides
from tasks.params import load
from tasks.places import home, root
from tasks.report import build
from training import lifeline

RETRY_DELAYS: list[float] = [2, 15, 60]


def _worth_another_try(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """An exception of our own code is none; of the stages' failures only those of the machine are."""
    return state.name == _failed_name("infrastructure")


def _failed_name(kind: str | None) -> str:
    return f"Failed ({kind or 'infrastructure'})"


def run_stage(stage: str, session: Session, blocked_by: str = "") -> State[None]:
    """One stage as a task run; its end is a state, never an exception."""
    if blocked_by:
        outcome = Outcome(stage, "not_run", message=f"{blocked_by} did not end well")
        session.outcomes[stage] = outcome
        session.screen.ended(outcome)
        return Cancelled(name="NotRun", message=outcome.message)
    shown = Shown(stage, session.screen)
    count = int(task_run.get_run_count() or 1)
    session.screen.started(stage)
    if count > 1:
        shown.log.warning("%s: try %d", stage, count)
    outcome = session.work.run(stage, shown.line, shown.status)
    session.outcomes[stage] = outcome
    shown.ended(outcome)
    match outcome.state:
        case "done":
            return Completed(message=f"{outcome.seconds:.1f} s")
        case "skipped":
            return Completed(name="Skipped", message="up to date")
        case "restored":
            return Completed(name="Cached", message="restored from DVC's run cache")
        case "stopped":
            return Cancelled(message=outcome.message)
        case _:
            return Failed(name=_failed_name(outcome.kind), message=outcome.message)


class Session:
    """One run of the flow: what runs, what ended how."""

    def __init__(self, dag: Dag, work: Work, screen: Screen, retries: int, parallel: int) -> None:
        self.dag = dag
        self.work = work
        self.screen = screen
        self.retries = retries
        self.parallel = parallel
        self.outcomes: dict[str, Outcome] = {}

    def run(self) -> None:
        """Submit each stage as soon as those above it ended well; wait for all."""
        ended: queue.Queue[str] = queue.Queue()
        waiting = [step.name for step in self.dag]
        running: set[str] = set()
        finished: dict[str, bool] = {}
        while waiting or running:
            for name in list(waiting):
                above = self.dag.steps[name].above
                bad = [other for other in above if finished.get(other) is False]
                if not bad and (any(o not in finished for o in above) or len(running) >= self.parallel):
                    continue
                waiting.remove(name)
                running.add(name)
                self._submit(name, bad[0] if bad else "", ended)
            name = ended.get()
            running.discard(name)
            outcome = self.outcomes.get(name)
            finished[name] = outcome is not None and outcome.good

    def _submit(self, name: str, blocked_by: str, ended: queue.Queue[str]) -> None:
        # The function is wrapped anew for each stage, so that the UI shows the stage's name as the task's.
        stage_task: Task[..., State[None]] = Task(
            run_stage,
            name=name,
            task_run_name=name,
            retries=self.retries,
            retry_delay_seconds=RETRY_DELAYS[: max(1, self.retries)],
            retry_condition_fn=_worth_another_try,
            persist_result=False,
            cache_policy=NO_CACHE,
        )
        future = stage_task.submit(name, self, blocked_by)
        future.add_done_callback(lambda _: ended.put(name))

    def failure(self) -> Outcome | None:
        """What ended the run: the first failure, one that repeating does not mend before one of the
        machine."""
        bad = [outcome for outcome in self.outcomes.values() if outcome.state in ("failed", "stopped")]
        bad.sort(key=lambda outcome: (outcome.kind == "infrastructure", outcome.kind == "stopped"))
        return bad[0] if bad else None


@contextlib.contextmanager
def _signals(stop: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and SIGINT become a wish that reaches the stages; outside of the main thread there are none
    to take."""

    def handler(number: int, frame: FrameType | None) -> None:
        stop(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


last_session: list[Session] = []
"""The session of the newest flow run in this process: how the command line learns what happened."""


@flow(name="retrain", flow_run_name="retrain-{registry}", persist_result=False, validate_parameters=True)
def retrain(
    registry: str = "policy",
    profile: str | None = None,
    overrides: list[str] | None = None,
    force: bool = False,
    wait_seconds: float = 3600.0,
) -> State[None]:
    """Bring the pipeline up to date: all stages of dvc.yaml that changed, in order.

    registry names the flow run only; profile and overrides (key.sub=value) are written into params.yaml
    first.
    """
    project = root()
    logger = get_run_logger()
    _mask_logs()
    if os.environ.get(lifeline.WATCH):
        threading.Thread(target=_end_with_worker, name="worker-watch", daemon=True).start()
    orphans.claim(flow_run.get_id(), flow_run.get_tags())
    refuse_in_params(overrides or ())
    with alone(project, wait_seconds, logger.warning), Screen() as screen:
        changed = write_overrides(project, overrides or (), profile) if overrides or profile else []
        for key in changed:
            logger.info("params.yaml: %s changed", key)
        for line in (*dvc.mend_locks(project), *cache.mend(project)):
            logger.warning(line)
        return _run(project, force, screen)


def _end_with_worker() -> None:
    """A deployed flow does not outlive the command that serves it, as `plumbline run` does not its own
    process."""
    watched = os.environ[lifeline.WATCH].split(",")
    while all(lifeline.alive(value) for value in watched if value):
        time.sleep(1)
    for pid in lifeline.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(EXIT_CODES["infrastructure"])


def _run(project: Path, force: bool, screen: Screen) -> State[None]:
    pipeline = load(project).pipeline
    work = Work(project, pipeline.grace_seconds, force)
    session = Session(read_dag(project), work, screen, pipeline.retries, pipeline.max_parallel_stages)
    last_session[:] = [session]

    def stop(number: int) -> None:
        if work.stopping.is_set():
            screen.say(f"signal {number} again: ending at once; the last complete checkpoint stays")
            leave(EXIT_CODES["stopped"])  # what it started watches it and ends too
        screen.say(f"signal {number}: asking the running stages to write a checkpoint and stop")
        work.stopping.set()

    with _signals(stop):
        try:
            session.run()
        except BaseException:
            # The server is gone, say: without the flow nobody would look after the stages that run.
            work.stopping.set()
            raise
    failure = session.failure()
    _publish_report(project, session.outcomes)
    if failure is None:
        return Completed(message=", ".join(_counts(session.outcomes)))
    message = f"{failure.stage}: {failure.kind}: {failure.message}"
    if failure.kind == "stopped":
        return Cancelled(message=message)
    return Failed(name=_failed_name(failure.kind), message=message)


def _publish_report(project: Path, outcomes: Mapping[str, Outcome]) -> None:
    logger = get_run_logger()
    rows = [
        {"stage": o.stage, "state": o.state, "seconds": f"{o.seconds:.1f}", "message": o.message}
        for o in outcomes.values()
    ]
    with shielded(logger):
        create_table_artifact(rows, key="stages", description="how each stage ended")
    try:
        page = build(project)
        markdown = (home(project) / "reports" / "report.md").read_text(encoding="utf-8")
    except (PlumblineError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the report could not be made: %s", error)
        return
    with shielded(logger):
        create_markdown_artifact(f"{markdown}\n\nThe page with plots: `{page}`\n", key="report")


def _counts(outcomes: Mapping[str, Outcome]) -> list[str]:
    states = [outcome.state for outcome in outcomes.values()]
    return [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]


def _mask_logs() -> None:
    """Credentials are masked before a log line reaches the console or the API."""
    for name in ("prefect", "prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        known = logging.getLogger(name)
        if not any(isinstance(one, MaskingFilter) for one in known.filters):
            known.addFilter(MaskingFilter())


if __name__ == "__main__":
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    retrain()
