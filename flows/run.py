"""`plumbline run`: write the knobs, look whether anything is to do, and only then start a server and the
flow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from data.errors import EXIT_CODES, ConfigurationError
from flows import cache, dvc, inputs
from flows.alone import alone
from flows.changes import changes, registry_agrees
from flows.dag import Dag, read_dag
from flows.secrets import mask, mask_value, refuse_in_params
from flows.table import outcome_code, print_summary
from tasks.overrides import write_overrides
from tasks.params import Params, load
from tasks.places import home

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from flows.stages import Outcome


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    data: Sequence[str] = ()
    model: str | None = None
    profile: str | None = None
    overrides: Sequence[str] = ()
    force: bool = False
    wait_seconds: float = 600.0
    debug: bool = False
    here: Path = field(default_factory=Path.cwd)
    """Where relative paths of the command line start."""

    def keys(self, project: Path) -> list[str]:
        """All as key.sub=value; later ones win."""
        found: list[str] = []
        if self.data:
            names = [located(project, self.here, name, bare=False) for name in self.data]
            # Own data is judged by its own held-out part: the sample's prompts are about other things.
            found += [f"data.files={json.dumps(names, ensure_ascii=False)}", "data.eval_prompts=[]"]
        if self.model:
            found.append(
                f"model.source={json.dumps(located(project, self.here, self.model), ensure_ascii=False)}"
            )
        return [*found, *self.overrides]


def located(project: Path, here: Path, name: str, bare: bool = True) -> str:
    """A path of the command line as params.yaml holds it: below the project relative to it, so that it can
    move, with ~ for the home folder. A name that is no path may be a hub id: owner/name, or without an owner
    when `bare` allows it."""
    if "://" in name:
        raise ConfigurationError(f"{name}: an address, which no stage reads; {inputs.ADDRESS}")
    path = (here / Path(name).expanduser() if name.startswith("~") else here / name).absolute()
    if not path.exists():
        if (project / name).exists():
            return name
        if name.endswith((".jsonl", ".json", ".csv", ".parquet", ".gguf")) or name.startswith(
            (".", "/", "~")
        ):
            raise ConfigurationError(f"{name}: there is no such file or folder in {here}; correct the path")
        if not bare and "/" not in name:
            raise ConfigurationError(
                f"{name}: there is no such file or folder in {here}; correct the path (a data set of the hub "
                "is owner/name)"
            )
        return name
    resolved = Path(os.path.normpath(path))
    return resolved.relative_to(project).as_posix() if resolved.is_relative_to(project) else str(resolved)


def run(project: Path, request: Request, console: Console) -> int:
    """The main job; the exit code is that of the decision, or of the failure by its kind."""
    begun = time.monotonic()
    inputs.require_workspace(project)
    keys = request.keys(project)
    refuse_in_params(keys)
    with alone(project, request.wait_seconds, lambda text: console.print(text, markup=False)):
        if keys or request.profile is not None:
            changed = write_overrides(project, keys, request.profile, lambda new: _require(project, new))
            if changed:
                console.print(f"params.yaml: changed {', '.join(changed)}", markup=False)
        params = load(project)
        dag = read_dag(project)
        inputs.require_sections(project, dag)
        for line in (*dvc.mend_locks(project), *cache.mend(project)):
            console.print(line, markup=False, soft_wrap=True)
        todo = {} if request.force else changes(project, dag)
        if not todo and not request.force:
            seconds = time.monotonic() - begun
            console.print(f"Nothing to do: every stage is up to date (looked for {seconds:.1f} s).")
            print_summary(project, console)
            return 0
        if not request.force:
            _announce(dag, todo, console)
        _require(project, params)
        code = _flow(project, params.registry.name, request, console)
        if code == 0:
            # What these two find is remembered, so that the next look is quick.
            registry_agrees(project)
            for line in cache.mend(project):
                console.print(line, markup=False, soft_wrap=True)
    print_summary(project, console)
    return outcome_code(project) if code == 0 else code


def _require(project: Path, params: Params) -> None:
    """What the parameters name must be there, where a stage reads it."""
    if "validate" in read_dag(project).steps:
        inputs.require(project, params)


def _announce(dag: Dag, todo: dict[str, list[str]], console: Console) -> None:
    needed = set(todo)
    for name in todo:
        needed |= set(dag.below(name)) if name in dag.steps else set()
    for step in dag:
        if step.name in todo:
            reasons = "; ".join(todo[step.name][:3]) + (" ..." if len(todo[step.name]) > 3 else "")
            console.print(f"  {step.name}: {mask(reasons)}", markup=False, overflow="ellipsis", no_wrap=True)
    rest = [step.name for step in dag if step.name in needed and step.name not in todo]
    if rest:
        console.print(f"  and what depends on them: {', '.join(rest)}", markup=False)


def _flow(project: Path, registry: str, request: Request, console: Console) -> int:
    """Run the flow against a server of our own; the exit code by the kind of its failure."""
    from flows import servers

    console.print("starting the Prefect server ...", markup=False)

    def lost(why: str) -> None:
        """Without a server the flow can not go on: the stages write a checkpoint, then the command ends."""
        console.print(f"{why}; asking the running stages to write a checkpoint and stop", style="red")
        from flows.retrain import last_session
        from flows.settle import leave

        for session in last_session:
            session.work.stop()
        console.print(f"next: {_NEXT['infrastructure']}", markup=False)
        leave(EXIT_CODES["infrastructure"])

    with servers.server(project, "prefect", say=console.print, lost=lost) as server:
        os.environ.update(servers.prefect_environment(project, server.api))
        if not request.debug:
            # Our own lines say what happens; the whole log is in the UI.
            os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        else:
            os.environ["PREFECT_LOGGING_LEVEL"] = "DEBUG"
        from prefect import tags

        from flows import orphans
        from flows.retrain import last_session, retrain
        from flows.settle import leave, settle

        for name in orphans.mark_crashed():
            console.print(f"flow run {name}: its process was killed, marked as crashed", markup=False)
        console.print(f"watch it at {server.url}", markup=False)
        shown = mask_value({"profile": request.profile, "overrides": request.keys(project)})
        with tags(orphans.owner_tag(), f"asked: {json.dumps(shown, ensure_ascii=False)}"[:200]):
            state = retrain(registry, force=request.force, return_state=True)
        code = _ended(project, last_session[0].failure() if last_session else None, state, console)
        if not settle():
            console.print("the Prefect server did not take the last events; its pages may lack some")
            leave(code if code else outcome_code(project))
    return code


def _ended(project: Path, failure: Outcome | None, state: State[Any], console: Console) -> int:
    """Explain how the flow ended; its exit code."""
    if failure is None:
        if state.is_completed():
            return 0
        console.print(
            f"the flow ended as {state.name}: {mask(state.message or '')}", style="red", markup=False
        )
        return EXIT_CODES["infrastructure"]
    _explain(project, failure.stage, failure.kind or "infrastructure", failure.message, console)
    return EXIT_CODES[failure.kind or "infrastructure"]


_NEXT = {
    "configuration": "change the parameter and run again; nothing was trained with it",
    "data": (
        "look at the quarantine and the data docs in .plumbline/docs/data, correct the records or the bounds"
    ),
    "divergence": (
        "look at the stage's journal, then lower the learning rate or raise the KL weight; `plumbline doctor`"
    ),
    "infrastructure": "run the same command again: it goes on from the last complete checkpoint",
    "stopped": "run the same command again: it goes on from the last complete checkpoint",
}


def _explain(project: Path, stage: str, kind: str, message: str, console: Console) -> None:
    console.print()
    console.print(f"{stage} failed ({kind})", style="bold red", markup=False)
    console.print(f"  why:  {mask(message)}", markup=False)
    console.print(f"  next: {_NEXT[kind]}", markup=False)
    logs = sorted((home(project) / "work" / stage).glob("*/output.log"), key=lambda f: f.stat().st_mtime)
    if logs:
        console.print(f"  log:  {logs[-1]}", markup=False)
