"""What the shorter commands show and do: status, lineage, promote, rollback, sweep."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data.errors import ConfigurationError, DataError, PlumblineError
from flows import dvc, inputs
from flows.alone import alone
from flows.changes import changes
from flows.dag import Dag, read_dag
from flows.screen import described
from flows.secrets import mask, refuse_in_params
from tasks.overrides import write_overrides
from tasks.params import load
from tasks.places import home
from tasks.registry import peek
from tasks.status import read_status
from training import lifeline


def show_params(project: Path, profile: str | None, overrides: Sequence[str], console: Console) -> None:
    """Everything that is in force, as YAML; what is new is written first."""
    refuse_in_params(overrides)
    if profile is not None or overrides:
        with alone(project, 60.0, lambda text: console.print(text, markup=False)):
            changed = write_overrides(project, overrides, profile)
        console.print(f"params.yaml: changed {', '.join(changed) or 'nothing'}", markup=False)
        known = load(project)
        for one in (*inputs.files(project, known.data), *inputs.models(project, known)):
            if one.verdict == "broken":
                console.print(f"{one.what}: {mask(one.seen)}; {one.remedy}", style="yellow", markup=False)
    text = yaml.safe_dump(load(project).model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    console.print(mask(text), markup=False, soft_wrap=True)


def show_status(project: Path, console: Console) -> None:
    """One row a stage; what DVC would run is asked only when nothing runs, for a running stage blocks it."""
    dag = read_dag(project)
    known = {step.name: read_status(project, step.name) for step in dag}
    running = {
        name for name, said in known.items() if said and said["state"] == "running" and _lives(said["pid"])
    }
    todo = {} if running else changes(project, dag)
    table = Table(title="Stages", title_justify="left", pad_edge=False)
    for head in ("stage", "state", "seconds", "progress", "next"):
        table.add_column(head)
    for step in dag:
        said = known[step.name]
        state = str(said["state"]) if said else "never ran here"
        if state == "running" and step.name not in running:
            state = "killed"
        if said and said.get("kind"):
            state += f" ({said['kind']})"
        end = time.time() if step.name in running else float(str((said or {}).get("updated") or 0))
        seconds = f"{end - float(str(said['started'])):.0f}" if said else ""
        why = "; ".join(todo.get(step.name, []))
        follows = "runs: " + why if why else "runs, for it is below" if _below(dag, step.name, todo) else ""
        plan = "runs now" if step.name in running else "" if running else follows or "up to date"
        words = (
            described(said)[2] if said and step.name in running else str((said or {}).get("message") or "")
        )
        table.add_row(step.name, state, seconds, escape(mask(words)), escape(mask(plan)))
    console.print(table)


def _below(dag: Dag, name: str, todo: dict[str, list[str]]) -> bool:
    return any(name in dag.below(other) for other in todo if other in dag.steps)


def _lives(pid: object) -> bool:
    return isinstance(pid, int) and lifeline.start_of(pid) != ""


def parse_reference(project: Path, reference: str) -> tuple[str, str]:
    """Model name and version of MODEL@VERSION, MODEL@ALIAS, MODEL:VERSION, @ALIAS or VERSION."""
    for sign in ("@", ":", "/"):
        name, found, wanted = reference.partition(sign)
        if found and wanted:
            return name or load(project).registry.name, wanted
    if not reference.strip("@:/"):
        raise ConfigurationError(
            f"{reference!r}: expected MODEL@ALIAS or MODEL@VERSION, such as policy@champion"
        )
    return load(project).registry.name, reference.strip("@:/")


def show_lineage(project: Path, reference: str, console: Console) -> None:
    """A tree of what a version came from."""
    from tasks.history import chain

    name, wanted = parse_reference(project, reference)
    require_versions(project, name)
    for link in chain(project, name, wanted):
        digest = f" [dim]{link.digest[:12]}[/]" if link.digest else ""
        run = f" [dim]run {link.run_id[:8]}[/]" if link.run_id else ""
        detail = f"  {escape(mask(link.detail))}" if link.detail else ""
        console.print(f"{'  ' * link.depth}[bold]{escape(link.what)}[/]{digest}{run}{detail}", soft_wrap=True)


def show_touched(project: Path, reference: str, row: str, console: Console) -> None:
    """The stages and registered versions that a record reached."""
    from tasks.history import forward

    name, _ = parse_reference(project, reference)
    touches = forward(project, name, row)
    if not touches:
        console.print(f"no record matches {row!r} in any recorded validate run", markup=False)
        return
    table = Table(pad_edge=False)
    for head in ("record", "file", "stage", "run", "versions"):
        table.add_column(head)
    for touch in touches:
        versions = ", ".join(touch.versions) or "none registered"
        table.add_row(escape(touch.row), touch.file, touch.stage, touch.run_id[:8], versions)
    console.print(table)


def require_versions(project: Path, name: str) -> None:
    """Said at once, and before mlflow is imported: there is nothing to look at or to move."""
    if not peek(project, name):
        raise DataError(
            f"{name}: no version is registered under this name; a run that is promoted registers one "
            "(`plumbline run`), and registry.name in params.yaml says where"
        )


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def promote_by_hand(
    project: Path, wanted: str, reason: str, force: bool, name: str | None, console: Console
) -> None:
    """Champion by a person's word, against the champion that is there at this moment."""
    from tasks.registry import Registry

    model, version = (name, wanted) if name else parse_reference(project, wanted)
    require_versions(project, model)
    registry = Registry(project, model)
    current = registry.champion()
    expected = current.digest if current else None
    made = registry.promote(registry.find(version), expected, _who(), _reason(reason), force)
    before = f", before it version {current.version}" if current else ""
    console.print(f"{model}: version {made.version} is champion{before}", markup=False)


def roll_back(project: Path, reason: str, name: str | None, console: Console) -> None:
    """The champion before, again."""
    from tasks.registry import Registry

    model = name or load(project).registry.name
    require_versions(project, model)
    previous = Registry(project, model).rollback(_who(), _reason(reason))
    if previous is None:
        console.print(f"{model}: there was no champion before; nobody is champion now", markup=False)
    else:
        console.print(f"{model}: version {previous.version} is champion again", markup=False)


def _reason(text: str) -> str:
    if not text.strip():
        raise ConfigurationError("--reason: it is empty; say in a few words why, it is kept with the version")
    return mask(text.strip())


def sweep_all(project: Path, console: Console) -> None:
    """Close what kills left open, everywhere."""
    from flows import servers
    from tasks import lineage
    from tasks.publish import tidy

    done = [f"tracking run {run_id}: closed" for run_id in lineage.sweep(project)]
    done += dvc.mend_locks(project)
    done += [f"work folder of {stage}: its output is in dvc.lock, removed" for stage in tidy(project)]
    if (home(project) / "prefect" / "prefect.db").is_file():
        with servers.server(project, "prefect") as server:
            os.environ.update(servers.prefect_environment(project, server.api))
            from flows import orphans

            done += [f"flow run {name}: marked as crashed" for name in orphans.mark_crashed()]
    try:
        done += servers.end_unused(project)
    except PlumblineError as error:
        done.append(str(error))
    for line in done or ["nothing was left over"]:
        console.print(mask(line), markup=False)
