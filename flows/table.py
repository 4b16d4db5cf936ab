"""The table that a run ends with, and the exit code that its decision stands for."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.changes import registered_version
from flows.dag import read_dag
from flows.secrets import mask
from tasks.places import home, stage_folder
from tasks.report import build, summary
from tasks.results import results
from tasks.status import read_status

NOT_PROMOTED = 3


def print_summary(project: Path, console: Console) -> None:
    """Rows, accuracies, win rate, gates, decision, version, and where the report is."""
    if not (stage_folder(project, "validate") / "result.json").is_file():
        return
    table = Table(title="What happened", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(overflow="fold")
    for row in summary(project, registered_version(project)):
        style = {"FAILED": "red", "passed": "green"}.get(row.value, "")
        table.add_row(
            row.label, f"[{style}]{row.value}[/]" if style else _plain(row.value), _plain(row.detail)
        )
    console.print(table)
    page = home(project) / "reports" / "report.html"
    if not page.is_file():
        page = build(project)
    console.print(f"report: {page}", markup=False, soft_wrap=True)


def has_run(project: Path) -> bool:
    """Whether any stage of the DAG has begun here, or its outputs were fetched."""
    return any(
        read_status(project, step.name) is not None or stage_folder(project, step.name).exists()
        for step in read_dag(project)
    )


def _plain(text: str) -> str:
    return mask(text).replace("[", r"\[")


def outcome_code(project: Path) -> int:
    """0 when the candidate is champion, 3 when the champion stays, a person has to decide, or nothing is
    decided yet."""
    return 0 if results(project)["register"].get("alias") == "champion" else NOT_PROMOTED
