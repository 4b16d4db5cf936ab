"""The command line, `plumbline`. Imports what a command needs only when it is called, so that help is
instant.

Exit codes: 0 promoted or up to date, 2 wrong usage, 3 not promoted, 10 configuration, 11 data, 12 divergence,
13 infrastructure, 14 stopped.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from data.errors import EXIT_CODES, DataError, PlumblineError

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = (
    "Exit codes: 0 promoted or up to date, 2 wrong usage, 3 not promoted, 10 configuration, 11 data, "
    "12 divergence, "
    "13 infrastructure (run again), 14 stopped."
)
app = typer.Typer(
    name="plumbline",
    help="From preference records and a base model to a model that is proven better.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_debug = False
Given = TypeVar("Given", str, list[str], None)


def _not_empty(value: Given) -> Given:
    """An empty text is a shell variable that is not set: taken for nothing it would run something else."""
    texts: Sequence[str] = [value] if isinstance(value, str) else value or ()
    if any(not text.strip() for text in texts):
        raise typer.BadParameter("it is empty; give a value or leave it out")
    return value


Reason = Annotated[
    str, typer.Option("--reason", help="Why; it is kept with the version.", show_default=False)
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", help="Registered model; default: registry.name of params.yaml.", callback=_not_empty
    ),
]


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole log, and tracebacks.")] = False,
    project: Annotated[
        Path | None,
        typer.Option(
            "--project", "-C", help="Project folder; default: the one around here.", show_default=False
        ),
    ] = None,
) -> None:
    global _debug  # noqa: PLW0603 - one process, one command
    _debug = debug
    if project is not None:
        os.environ["PLUMBLINE_PROJECT"] = str(project.absolute())


def _project() -> Path:
    """The project folder, which becomes the working directory."""
    from tasks.places import root

    given = os.environ.get("PLUMBLINE_PROJECT")
    folder = root(Path(given) if given else None)
    os.chdir(folder)
    return folder


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a log or a pipe has no width of its own
    return console


@app.command(epilog="Example: plumbline run --data my.jsonl --model ./my-model --set optimize.steps=20")
def run(
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", help="File, folder or hub id with records; may be repeated.", callback=_not_empty
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Base model: folder, .gguf, gguf:PACKAGE or hub id.", callback=_not_empty
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="Name in profiles/ or a YAML file, which becomes params.yaml first.",
            callback=_not_empty,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value, written into params.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run all stages, up to date or not.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for another run in this folder.")
    ] = 600.0,
) -> None:
    """Bring the pipeline up to date: from records to a decision about the candidate.

    Says so within seconds when nothing is to do. A killed run goes on from its last complete checkpoint.
    """
    from flows.run import Request
    from flows.run import run as run_pipeline

    here = Path.cwd()
    request = Request(data or (), model, profile, overrides or (), force, wait, _debug, here)
    raise typer.Exit(run_pipeline(_project(), request, _console()))


@app.command(epilog="Example: plumbline status")
def status() -> None:
    """Each stage: what it is doing now or how it ended, and whether it would run."""
    from flows.views import show_status

    show_status(_project(), _console())


@app.command(epilog="Example: plumbline report")
def report() -> None:
    """The table of the last run, and the HTML page made anew; ends as the run did: 0 promoted, 3 not
    promoted, or nothing decided yet."""
    from flows.table import has_run, outcome_code, print_summary
    from tasks.report import build

    project = _project()
    if not has_run(project):
        raise DataError(
            f"{project}: nothing has run here yet, so there is nothing to report; `plumbline run`"
        )
    build(project)
    print_summary(project, _console())
    raise typer.Exit(outcome_code(project))


@app.command(epilog="Example: plumbline lineage policy@champion")
def lineage(
    reference: Annotated[
        str,
        typer.Argument(help="MODEL@ALIAS, MODEL@VERSION, a version or a digest."),
    ] = "@champion",
    row: Annotated[
        str | None,
        typer.Option(
            "--row",
            help="Forward instead: which models a record touched (id or text).",
            callback=_not_empty,
        ),
    ] = None,
) -> None:
    """The whole chain behind a registered model, down to the input files; with --row from a record
    forward."""
    from flows.views import show_lineage, show_touched

    project = _project()
    if row is None:
        show_lineage(project, reference, _console())
    else:
        show_touched(project, reference, row, _console())


@app.command(epilog="Example: plumbline reproduce policy@3")
def reproduce(
    reference: Annotated[str, typer.Argument(help="MODEL@VERSION, MODEL@ALIAS or a version.")],
    keep: Annotated[bool, typer.Option("--keep", help="Leave the rebuilt workspace for a look.")] = False,
) -> None:
    """Rebuild a registered model in a fresh workspace and compare all digests."""
    from flows.reproduce import reproduce as rebuild

    raise typer.Exit(rebuild(_project(), reference, keep, _console()))


@app.command(epilog='Example: plumbline promote 3 --reason "passed the human audit"')
def promote(
    version: Annotated[str, typer.Argument(help="Version, alias or digest.")],
    reason: Reason,
    force: Annotated[bool, typer.Option("--force", help="Even if it was rolled back before.")] = False,
    name: Name = None,
) -> None:
    """Make a registered version champion by hand; compare-and-set, with who and why."""
    from flows.views import promote_by_hand

    promote_by_hand(_project(), version, reason, force, name, _console())


@app.command(epilog='Example: plumbline rollback --reason "complaints about refusals"')
def rollback(reason: Reason, name: Name = None) -> None:
    """Give the crown back to the champion before; the weights do not return by themselves."""
    from flows.views import roll_back

    roll_back(_project(), reason, name, _console())


@app.command(
    epilog="Example: plumbline doctor --profile gpu-8 (before a run); plumbline doctor --run (after one). "
    "Exit codes with --run: 0 promoted, or no cause found; 3 a cause found; 10 params.yaml is wrong; "
    "11 no run to look at."
)
def doctor(
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="Judge a profile instead of params.yaml.", callback=_not_empty),
    ] = None,
    after: Annotated[
        bool, typer.Option("--run", help="Diagnose the last run instead: why it failed or was not promoted.")
    ] = False,
) -> None:
    """Look over environment, disk, parameters, data and model before a run; with --run walk a decision tree
    over the last one, and name the cause and the next thing to try. Changes nothing.
    """
    if after and profile is not None:
        raise typer.BadParameter("a run is judged by the parameters that made it; leave --profile out")
    if after:
        from flows.diagnose import diagnose

        raise typer.Exit(diagnose(_project(), _console()))
    from flows.doctor import examine

    raise typer.Exit(examine(_project(), profile, _console()))


@app.command(epilog="Example: plumbline sweep")
def sweep() -> None:
    """Tidy up after kills: open tracking runs, flow runs, locks and servers without a living owner."""
    from flows.views import sweep_all

    sweep_all(_project(), _console())


@app.command(epilog="Example: plumbline ui")
def ui() -> None:
    """The pages of Prefect and MLflow on this project's stores, until Ctrl-C."""
    from flows.pages import serve

    serve(_project(), _console())


@app.command(epilog="Example: plumbline worker")
def worker() -> None:
    """Serve the deployments of prefect.yaml (schedules included) from this machine, until Ctrl-C."""
    from flows.deploy import work

    raise typer.Exit(work(_project(), _console()))


@app.command(epilog="Example: plumbline data my.jsonl")
def data(
    files: Annotated[list[str], typer.Argument(help="Files, folders or hub ids.", callback=_not_empty)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the data section, such as min_pairs=0.")
    ] = None,
) -> None:
    """Try files: read, check and split them as the pipeline would, show the card; the stages' outputs
    stay as they are."""
    from flows.try_data import try_files

    here = Path.cwd()
    try_files(_project(), here, files, overrides or (), _console())


@app.command(epilog="Example: plumbline validate")
def validate() -> None:
    """Check params.yaml and the records that it names, and show their card; trains nothing."""
    from flows.try_data import try_files

    try_files(_project(), Path.cwd(), (), (), _console())


@app.command(epilog="Example: plumbline params --set seed=1 --set optimize.steps=60")
def params(
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="Name in profiles/ or a YAML file.", callback=_not_empty),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value, written into params.yaml.")
    ] = None,
) -> None:
    """Write into params.yaml without running, and show all parameters with their defaults filled in."""
    from flows.views import show_params

    show_params(_project(), profile, overrides or (), _console())


def main() -> None:
    """Entry point: failures by kind as one block, without traceback unless asked."""
    try:
        app()
    except PlumblineError as error:
        _block(error.kind, str(error))
        if _debug:
            raise
        sys.exit(EXIT_CODES[error.kind])
    except (KeyboardInterrupt, BrokenPipeError) as error:
        sys.exit(EXIT_CODES["stopped"] if isinstance(error, KeyboardInterrupt) else 0)
    except SystemExit as error:
        sys.exit(EXIT_CODES["stopped"] if error.code == 1 else error.code)
    except Exception as error:
        if _debug:
            raise
        if isinstance(error, OSError) and error.errno in _DISK:
            _block("infrastructure", f"{error.filename or _project_hint()}: {_DISK[error.errno]}")
            sys.exit(EXIT_CODES["infrastructure"])
        _block("infrastructure", f"{type(error).__name__}: {error}\nThe traceback: plumbline --debug ...")
        sys.exit(EXIT_CODES["infrastructure"])


_DISK = {
    errno.ENOSPC: "the disk is full; free some space, or put the run's files elsewhere (PLUMBLINE_HOME)",
    errno.EDQUOT: "the disk quota is used up; free some space, or set PLUMBLINE_HOME to a folder elsewhere",
    errno.EROFS: "the file system is read-only; work in a copy of the project on a disk that can be written",
    errno.EACCES: "it may not be read or written by this user; correct its owner or mode",
    errno.EPERM: "it may not be changed by this user; correct its owner, mode or attributes",
}


def _project_hint() -> str:
    return os.environ.get("PLUMBLINE_HOME") or os.environ.get("PLUMBLINE_PROJECT") or str(Path.cwd())


def _block(kind: str, message: str) -> None:
    from rich.console import Console

    from flows.secrets import mask

    console = Console(stderr=True, highlight=False)
    console.print(f"plumbline: {kind}", style="bold red", markup=False)
    for line in mask(message).splitlines():
        console.print(f"  {line}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
