"""`plumbline doctor`: what would stop a run, found before it starts. Nothing is changed, nothing is trained.

Each check gives one line: fine, worth a look, or broken with its remedy. The exit code is that of the first
broken one.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data.errors import EXIT_CODES, PlumblineError
from flows import inputs, records
from flows.dag import read_dag
from flows.dead import dead
from flows.finding import Finding
from flows.memory import Shape, at_once, estimate, shape_of
from flows.secrets import mask
from tasks.overrides import read_profile
from tasks.params import Params, load, parse
from tasks.places import home
from tasks.publish import check_writable
from training.config_optimize import ON_PAIRS
from training.device import cpu_gains_by_bf16, resolve


def examine(project: Path, profile: str | None, console: Console) -> int:
    """Print all findings; 0 when nothing is broken."""
    findings = list(look(project, profile))
    table = Table(title="Doctor", title_justify="left", pad_edge=False)
    for head in ("what", "verdict", "seen", "remedy"):
        table.add_column(head, overflow="fold")
    colours = {"fine": "green", "look": "yellow", "broken": "red"}
    for one in findings:
        verdict = f"[{colours[one.verdict]}]{one.verdict}[/]"
        table.add_row(one.what, verdict, escape(mask(one.seen)), escape(mask(one.remedy)))
    console.print(table)
    broken = [one for one in findings if one.verdict == "broken"]
    return EXIT_CODES[broken[0].kind] if broken else 0


def look(project: Path, profile: str | None = None) -> Iterator[Finding]:
    """All findings; a broken check does not hide the later ones, unless they need what it checks."""
    yield _python()
    yield from _packages(project)
    yield from _guarded("folders", lambda: _folders(project))
    yield from _guarded("dvc.yaml", lambda: _dag(project))
    try:
        params = _params(project, profile)
    except PlumblineError as error:
        yield Finding("parameters", "broken", str(error), "change the named keys", error.kind)
        return
    yield Finding("parameters", "fine", f"profile {profile}" if profile else "params.yaml")
    yield from _dead(params)
    yield from _temperature(params)
    yield from _guarded("data", lambda: _data(project, params))
    yield from _guarded("model", lambda: inputs.models(project, params))
    yield from _guarded("lengths", lambda: inputs.lengths(project, params))
    yield from _machine(project, params)


def _guarded(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except PlumblineError as error:
        yield Finding(what, "broken", str(error), "see left", error.kind)


def _params(project: Path, profile: str | None) -> Params:
    if profile is None:
        return load(project)
    return parse(read_profile(project, profile), profile)


def _python() -> Finding:
    version = platform.python_version()
    fits = (3, 11) <= tuple(map(int, platform.python_version_tuple()[:2])) < (3, 14)
    remedy = "" if fits else "use Python 3.11 to 3.13: make venv PYTHON=python3.11"
    return Finding("Python", "fine" if fits else "broken", version, remedy)


def _packages(project: Path) -> Iterator[Finding]:
    """Installed versions against constraints.txt: another version can change digests."""
    file = project / "constraints.txt"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.finditer(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE)
    wanted: dict[str, str] = {match[1]: match[2] for match in found}
    others: list[str] = []
    for name in (
        "torch",
        "transformers",
        "peft",
        "deepspeed",
        "datasets",
        "prefect",
        "mlflow",
        "dvc",
        "numpy",
    ):
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "broken", "not installed", "run `make venv`")
            continue
        if name in wanted and have.split("+")[0] != wanted[name].split("+")[0]:
            others.append(f"{name} {have} (constraints: {wanted[name]})")
    if others:
        yield Finding(
            "versions", "look", ", ".join(others), "digests may differ; `make venv` installs the constraints"
        )
    else:
        yield Finding("versions", "fine", "as in constraints.txt")


def _folders(project: Path) -> Iterator[Finding]:
    check_writable(project)
    free = shutil.disk_usage(home(project)).free / 2**30
    # Base, SFT and candidate in the saved precision, their work copies, and checkpoints with optimizer state.
    needed = 8.0
    yield Finding(
        "disk",
        "fine" if free >= needed else "look",
        f"{free:.1f} GiB free",
        ""
        if free >= needed
        else f"below {needed:.0f} GiB a run may end early; free some space or set PLUMBLINE_HOME",
    )
    yield from inputs.workspace(project)


def _dag(project: Path) -> Iterator[Finding]:
    dag = read_dag(project)
    missing = [
        f"{step.name}: {dep}"
        for step in dag
        for dep in step.deps
        if not dep.startswith("data/stages/") and not (project / dep).exists()
    ]
    if missing:
        yield Finding(
            "dvc.yaml", "broken", "missing: " + ", ".join(missing), "restore the files or correct `deps`"
        )
    else:
        yield Finding("dvc.yaml", "fine", " > ".join(step.name for step in dag))
    yield from inputs.sections(project, dag)


def _dead(params: Params) -> Iterator[Finding]:
    found = list(dead(params))
    if found:
        yield Finding(
            "dead settings", "look", ", ".join(found), "remove them, or change what makes them dead"
        )


def _temperature(params: Params) -> Iterator[Finding]:
    """The judged answers should be sampled as the trained ones were."""
    trained, judged = params.optimize.temperature, params.evaluate.temperature
    if trained != judged and params.optimize.algorithm not in ON_PAIRS:
        yield Finding(
            "temperature", "look", f"optimize samples at {trained:g}, evaluate at {judged:g}",
            "set evaluate.temperature to optimize's, or mean it: another policy is judged than was trained",
        )  # fmt: skip


def _data(project: Path, params: Params) -> Iterator[Finding]:
    """Files, records, tokens: each needs what is before it."""
    there = list(inputs.files(project, params.data))
    yield from there
    if any(one.verdict == "broken" and one.what == "data.files" for one in there):
        return
    seen = records.read(project, params.data)
    yield records.counted(seen, params.data)
    folder = records.tokenizer_folder(project, params)
    if folder is not None and seen.pairs:
        from training.chat import load_tokenizer

        yield from records.tokens(params, load_tokenizer(folder), seen.pairs)
    yield from records.templates(project)


def _machine(project: Path, params: Params) -> Iterator[Finding]:
    cores = os.cpu_count() or 1
    side = params.pipeline.max_parallel_stages
    wanted = max(
        section.processes * section.threads
        for section in (params.sft, params.reward, params.judge, params.optimize)
    )
    side_by_side = sum(s.processes * s.threads for s in (params.reward, params.judge)) if side > 1 else 0
    over = max(wanted, side_by_side) > cores
    yield Finding(
        "cores",
        "look" if over else "fine",
        f"{cores} here; a stage uses {wanted}, reward and judge together {side_by_side or wanted}",
        "lower threads, processes or pipeline.max_parallel_stages" if over else "",
    )
    yield _memory(project, params)
    yield from _precision(params)


def _memory(project: Path, params: Params) -> Finding:
    """The estimate of the stage that needs most, against this machine's memory or one accelerator's."""
    import torch

    shape = _shape(project, params)
    on_device = torch.accelerator.is_available()
    if on_device:
        free, total = torch.accelerator.get_memory_info()
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    here = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if shape is None:
        enough = free > 4 * 2**30
        remedy = "" if enough else "below 4 GiB; lower token budgets, or end other programs"
        return Finding(
            "memory", "fine" if enough else "look", f"{here}; the model's size is not known yet", remedy
        )
    precision = {
        name: resolve(getattr(params, name).precision)
        for name in ("sft", "reward", "judge", "optimize", "evaluate")
    }
    needs = estimate(params, shape, precision)
    shared = not on_device and params.pipeline.hostfile is None
    most = at_once(needs, params.pipeline.max_parallel_stages, shared)
    parts = ", ".join(
        f"{name} {size / 2**30:.1f}" for name, size in most.parts.items() if size > 0.05 * 2**30
    )
    seen = f"{here}; about {most.rank / 2**30:.1f} GiB at most, in {most.stage} ({parts})"
    if most.rank < free:
        return Finding("memory", "fine", seen)
    return Finding("memory", "look", seen, MEMORY_REMEDY)


MEMORY_REMEDY = (
    "lower token_budget or pipeline.max_parallel_stages, take lora, engine.gradient_checkpointing or a "
    "higher engine.zero, or end other programs"
)


def _shape(project: Path, params: Params) -> Shape | None:
    config = inputs.base_config(project, params)
    return None if config is None else shape_of(config)


def _precision(params: Params) -> Iterator[Finding]:
    """bf16 without hardware for it works, but slower than float32."""
    import torch

    asked = {s.precision for s in (params.sft, params.reward, params.judge, params.optimize, params.evaluate)}
    accelerator = torch.accelerator.is_available()
    gains = accelerator or cpu_gains_by_bf16()
    where = "an accelerator" if accelerator else f"CPU {'with' if gains else 'without'} fast bf16"
    slow = "bf16" in asked and not gains
    remedy = "precision: auto or fp32 is faster here" if slow else ""
    yield Finding("precision", "look" if slow else "fine", f"{', '.join(sorted(asked))}; {where}", remedy)
