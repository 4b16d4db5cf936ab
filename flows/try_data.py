"""Trying records before a run: the validate stage's own work in a scratch folder, and its card on the
screen."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from flows import inputs
from flows.run import located
from tasks.overrides import overridden
from tasks.params import load, parse, read_raw
from tasks.places import home


def try_files(
    project: Path, here: Path, files: Sequence[str], overrides: Sequence[str], console: Console
) -> None:
    """Read, check, split; a refusal is raised as the stage would, after the pages are written."""
    params = load(project)
    if files or overrides:
        params = parse(_changed(project, here, files, overrides), "command line")
    inputs.require_files(project, params)
    names = ", ".join((*params.data.files, *params.data.prompts, *params.data.eval_prompts))
    console.print(f"reading {names} ...", markup=False, soft_wrap=True)
    from data.pipeline import run

    def report(step: int, total: int, unit: str) -> None:
        if 0 < step == total:
            console.print("all is read; checking the whole", markup=False)
        elif step:
            console.print(f"{step}{f' of {total}' if total else ''} {unit} read", markup=False)

    folder = home(project) / "tried"
    shutil.rmtree(folder, ignore_errors=True)
    result = run(params.data, params.seed, folder / "out", folder / "docs", report)
    console.print(Markdown((folder / "out" / "card.md").read_text(encoding="utf-8")))
    console.print(f"kept {result['rows_kept']} of {result['rows_in']} rows", markup=False)
    console.print(f"data docs:  {folder / 'docs' / 'index.html'}", markup=False, soft_wrap=True)
    console.print(f"quarantine: {folder / 'out' / 'quarantine.jsonl'}", markup=False, soft_wrap=True)


def _changed(project: Path, here: Path, files: Sequence[str], overrides: Sequence[str]) -> dict[str, object]:
    raw = read_raw(project / "params.yaml")
    section = raw.get("data")
    known: dict[str, object] = dict(section) if isinstance(section, dict) else {}
    if files:
        known["files"] = [located(project, here, name, bare=False) for name in files]
        known["eval_prompts"] = []
    named = [override if override.startswith("data.") else f"data.{override}" for override in overrides]
    return overridden({**raw, "data": known}, named)
