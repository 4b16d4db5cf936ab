"""`plumbline doctor --run`: the decision tree of tasks/diagnosis.py over the last run, as a table and a
headline.

Below the table stands for each cause what to try next, as a command on one line. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.secrets import mask
from flows.table import NOT_PROMOTED
from tasks.diagnosis import Answer, causes, walk
from tasks.evidence import Facts, gather

COLOURS = {"fine": "green", "suspicious": "yellow", "cause": "red", "unknown": "dim"}


def diagnose(project: Path, console: Console) -> int:
    """Print the path and its end; 0 when the run was promoted or no cause was found, else 3."""
    facts = gather(project)
    answers = walk(facts)
    console.print(_table(answers))
    found = causes(answers)
    for line in _conclusion(facts, answers, found):
        console.print(mask(line), markup=False, soft_wrap=True)
    return NOT_PROMOTED if found and not facts.promoted else 0


def _table(answers: Sequence[Answer]) -> Table:
    table = Table(title="Diagnosis", title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    table.add_column("verdict", no_wrap=True)
    table.add_column("question", overflow="fold", ratio=2)
    table.add_column("evidence (value, bound; file of data/stages)", overflow="fold", ratio=3)
    branch = ""
    for answer in answers:
        if answer.branch != branch:
            branch = answer.branch
            table.add_section()
            table.add_row("", f"[bold]{branch}[/]", "")
        verdict = f"[{COLOURS[answer.verdict]}]{answer.verdict}[/]"
        table.add_row(verdict, answer.node.question, escape(mask(_evidence(answer))))
    return table


def _evidence(answer: Answer) -> str:
    if answer.value is None:
        return answer.seen
    return f"{answer.seen} ({answer.value:.3g}, {answer.bound}; {answer.file})"


def _conclusion(facts: Facts, answers: Sequence[Answer], found: Sequence[Answer]) -> list[str]:
    decision = _decision(facts)
    if not found:
        asked = [answer for answer in answers if answer.verdict == "suspicious"]
        head = decision or "No cause found."
        look = "; ".join(f"{answer.branch}: {answer.node.question}" for answer in asked)
        return [head, f"Worth a look: {look}"] if asked else [head]
    lines = [f"{decision} Weak points all the same:" if facts.promoted else decision] if decision else []
    for number, answer in enumerate(found):
        head = "Cause" if number == 0 else "Also"
        lines.append(f"{head}: {answer.node.means} ({answer.branch}: {answer.seen})")
        if answer.remedy is not None:
            lines += [f"  Try: {answer.remedy.what}", f"    {answer.remedy.command}"]
    return lines


def _decision(facts: Facts) -> str:
    """What became of a candidate that passed all gates; "" of one that did not."""
    if facts.promoted:
        return "The candidate was promoted."
    if not facts.passed:
        return ""
    registered = facts.results.get("register")
    if registered is None:
        return "All gates passed, but `register` has not carried that out: the champion stays as it was."
    state = f"it is {registered['alias']}" if registered.get("alias") else str(registered.get("reason"))
    return f"All gates passed, but the candidate is not champion: {state}."
