"""`plumbline reproduce VERSION`: builds a registered model again from its records, and compares.

A fresh clone at the recorded commit gets the recorded parameters and the same input files, and runs the
stages up to `optimize` from empty stores. On the same CPU model, thread count and versions all digests must
be equal; elsewhere the headline numbers are compared with a tolerance, and the answer says which of the two
it was.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from data.errors import ConfigurationError, InfrastructureError
from flows import dvc
from flows.dag import read_dag
from flows.secrets import mask
from flows.views import parse_reference, require_versions
from tasks import facts
from tasks.params import load
from tasks.places import digest, home, read_json, write_text
from tasks.publish import Lock, link_tree, parse_lock, read_lock

UP_TO = "optimize"
TOLERANCE = 0.1
"""Relative, for numbers of another machine: bf16 kernels and thread counts move sampling, and sampling
moves all."""
DIFFERENT = 3


@dataclass(frozen=True)
class Recorded:
    """What lineage kept of a version."""

    label: str
    digest: str
    commit: str
    params: str
    lock: Mapping[str, Lock]
    result: Mapping[str, object]
    same_machine: bool
    elsewhere: str


def reproduce(project: Path, reference: str, keep: bool, console: Console) -> int:
    """0 when equal (or within tolerance elsewhere), 3 when not."""
    name, wanted = parse_reference(project, reference)
    require_versions(project, name)
    known = recorded(project, name, wanted)
    folder = home(project) / "reproduce" / f"{name}-{known.digest[:12]}"
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"rebuilding {known.label} in {folder}", markup=False, soft_wrap=True)
    _workspace(project, folder, known)
    _rebuild(folder, console)
    code = _compare(folder, known, console)
    if code == 0 and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def recorded(project: Path, name: str, wanted: str) -> Recorded:
    """A version's circumstances, from the run that made it and the pipeline run around it."""
    from tasks.lineage import client, read_artifact
    from tasks.registry import Registry

    version = Registry(project, name).find(wanted)
    tracking = client(project)
    run = tracking.get_run(version.run_id)
    parent = run.data.tags.get("mlflow.parentRunId")
    pipeline = tracking.get_run(parent) if parent else run
    params, lock = read_artifact(pipeline, "params.yaml"), read_artifact(pipeline, "dvc.lock")
    if params is None or lock is None:
        raise ConfigurationError(
            f"{name} {version.version}: its pipeline run kept no params.yaml and dvc.lock (it did not "
            f"reach its end), so "
            "it can not be rebuilt; choose a version that was registered by a finished run"
        )
    tags = run.data.tags
    differ = _circumstances(tags)
    return Recorded(
        label=f"{name} version {version.version}",
        digest=version.digest,
        commit=tags.get("mlflow.source.git.commit", "none"),
        params=params,
        lock=parse_lock(lock.encode(), "dvc.lock of the pipeline run"),
        result=json.loads(read_artifact(run, "result.json") or "{}"),
        same_machine=not differ,
        elsewhere=", ".join(differ),
    )


def _circumstances(tags: Mapping[str, Any]) -> list[str]:
    """What differs between the recorded machine and this one, of what can change digests."""
    differ: list[str] = []
    for tag, now in (("versions", facts.versions()), ("hardware", facts.hardware())):
        then = json.loads(tags.get(f"plumbline.{tag}", "{}"))
        wanted = now if tag == "versions" else {k: now[k] for k in ("cpu", "accelerators") if k in now}
        differ += [f"{k} {then.get(k)} then, {v} now" for k, v in wanted.items() if then.get(k) != v]
    return differ


def _workspace(project: Path, folder: Path, known: Recorded) -> None:
    _git(project, "clone", "--quiet", "--shared", "--no-checkout", str(project), str(folder))
    if known.commit != "none":
        _git(folder, "checkout", "--quiet", "--detach", known.commit)
    else:
        _git(folder, "checkout", "--quiet")
    write_text(folder / "params.yaml", known.params)
    (folder / "dvc.lock").unlink(missing_ok=True)
    params = load(folder)
    names = [*params.data.files, *params.data.prompts, *params.data.eval_prompts, params.model.source]
    names += [params.reward.model, params.judge.model, *(s.path for s in params.optimize.rewards.scorers)]
    for name in names:
        source, target = project / name, folder / name
        if name and not Path(name).is_absolute() and source.exists() and not target.exists():
            link_tree(source, target)


def _git(where: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["git", "-C", str(where), *arguments], capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        raise InfrastructureError(f"git {arguments[0]} failed: {' '.join(done.stderr.split())}")


def _rebuild(folder: Path, console: Console) -> None:
    environment = dvc.environment(folder)
    environment.pop("PLUMBLINE_HOME", None)
    environment["DVC_SITE_CACHE_DIR"] = str(folder / ".plumbline" / "dvc")
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", UP_TO], cwd=folder, env=environment, text=True, encoding=(
            ""
            "utf-8"
        ),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.stdout is not None
    for line in done.stdout:
        console.print("  " + mask(line.rstrip()), markup=False, soft_wrap=True)
    if done.wait() != 0:
        raise InfrastructureError(
            f"the rebuild stopped (dvc ended with {done.returncode}); its folder is {folder}"
        )


def _compare(folder: Path, known: Recorded, console: Console) -> int:
    """Digests where they have to be equal, numbers elsewhere."""
    dag = read_dag(folder)
    needed = [step.name for step in dag if step.name == UP_TO or UP_TO in dag.below(step.name)]
    here = read_lock(folder)
    lines = dvc.differences(
        {name: known.lock[name] for name in needed if name in known.lock},
        {name: here[name] for name in needed if name in here},
    )
    rebuilt = digest(folder / "data" / "stages" / UP_TO / "model")
    if rebuilt == known.digest:
        console.print(f"equal: {known.label} was rebuilt bit for bit (digest {rebuilt[:12]})", markup=False)
        for line in lines:
            console.print(f"  but the way differs: {line}", markup=False, soft_wrap=True)
        return 0
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if known.same_machine:
        console.print(
            f"different: the weights are {rebuilt[:12]}, recorded {known.digest[:12]}, although CPU, "
            f"accelerators and "
            "versions are the same; the first line above names the earliest difference",
            style="red", markup=False,
        )  # fmt: skip
        return DIFFERENT
    far = far_numbers(known.result, read_json(folder / "data" / "stages" / UP_TO / "result.json"))
    console.print(
        f"another machine or other versions ({known.elsewhere}): digests need not be equal.", markup=False
    )
    verdict = "the numbers agree" if not far else f"the numbers differ: {', '.join(far)}"
    console.print(f"compared within {TOLERANCE:.0%} relative instead: {verdict}", markup=False)
    return DIFFERENT if far else 0


def far_numbers(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Headline numbers of two results that differ by more than the tolerance."""
    far: list[str] = []
    for key in ("reward_before", "reward_after", "kl", "steps"):
        one, other = then.get(key), now.get(key)
        if isinstance(one, int | float) and isinstance(other, int | float):
            if not math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-3):
                far.append(f"{key} {one:.4g} then, {other:.4g} now")
        elif one != other:
            far.append(f"{key} {one!r} then, {other!r} now")
    return far
