"""Lineage read backwards and forwards: from a registered model to the files it came from, from a row to its
models.

A run's tags hold the digests of what it read and wrote, by path. An input is traced to the run that wrote the
same path with the same digest, whichever pipeline run that was in, so reused and restored outputs are
followed too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from tasks.lineage import client, experiment_id, read_artifact
from tasks.registry import Registry, Version

_IN, _OUT = "plumbline.in.", "plumbline.out."


@dataclass(frozen=True)
class Link:
    """One step of a chain."""

    depth: int
    what: str
    digest: str
    run_id: str | None
    detail: str


def chain(project: Path, name: str, wanted: str) -> list[Link]:
    """Everything that a registered version came from, the version first, the input files last in each
    branch.
    """
    version = Registry(project, name).find(wanted)
    tracking = client(project)
    where = experiment_id(tracking)
    links = [_head(version)]
    run = tracking.get_run(version.run_id)
    links += _circumstances(run)
    links += _walk(tracking, where, run, 1, set())
    return links


def _head(version: Version) -> Link:
    aliases = ", ".join(version.aliases) or "no alias"
    baseline = (version.baseline or "unknown")[:12]
    why = version.tags.get("plumbline.promoted_why", "")
    detail = f"{aliases}; win rate {_win_rate(version)} against {baseline}; {why}"
    what = f"{version.name} version {version.version}"
    return Link(0, what, version.digest, version.run_id, detail.rstrip("; "))


def _win_rate(version: Version) -> str:
    """Estimate and interval as the report has them."""
    rate, ends = (
        json.loads(version.tags.get(f"plumbline.{key}", "null")) for key in ("win_rate", "interval")
    )
    if not isinstance(rate, int | float):
        return "unknown"
    return f"{rate:.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if isinstance(ends, list) else "")


def _circumstances(run: Any) -> list[Link]:
    tags = run.data.tags
    changed = tags.get("plumbline.git_changed")
    words = {"true": "with changes that are not committed", "false": "as committed"}
    return [
        Link(1, "git commit", tags.get("mlflow.source.git.commit", "unknown"), None, words.get(changed, "")),
        Link(
            1,
            "dvc.lock",
            tags.get("plumbline.dvc_lock", "unknown"),
            None,
            tags.get("plumbline.fingerprint", ""),
        ),
        Link(1, "versions", "", None, _listed(tags.get("plumbline.versions", ""))),
        Link(1, "hardware", "", None, _listed(tags.get("plumbline.hardware", ""))),
    ]


def _listed(text: str) -> str:
    """A tag's JSON object as `name value, name value`."""
    return ", ".join(f"{name} {value}" for name, value in json.loads(text).items()) if text else ""


def _walk(tracking: Any, where: str, run: Any, depth: int, seen: set[tuple[str, str]]) -> Iterator[Link]:
    for tag, digest in sorted(run.data.tags.items()):
        if not tag.startswith(_IN):
            continue
        path = tag.removeprefix(_IN)
        maker = _maker(tracking, where, path, digest)
        known = (path, digest) in seen
        seen.add((path, digest))
        if maker is None:
            yield Link(depth, path, digest, None, "made before this store was kept, or elsewhere")
            continue
        again = "; shown above" if known else ""
        yield Link(
            depth, path, digest, str(maker.info.run_id), f"stage {maker.data.tags['plumbline.stage']}{again}"
        )
        if known:
            continue
        if maker.data.tags["plumbline.stage"] == "sources":
            yield from _files(maker, Path(path).name, depth + 1)
        else:
            yield from _walk(tracking, where, maker, depth + 1, seen)


def _maker(tracking: Any, where: str, path: str, digest: str) -> Any | None:
    query = f"tags.`{_OUT}{path}` = '{digest}'"
    found = tracking.search_runs([where], query, order_by=["attributes.start_time DESC"], max_results=1)
    return found[0] if found else None


def _files(run: Any, name: str, depth: int) -> Iterator[Link]:
    """The outside files of a sources run: the end of the chain."""
    text = read_artifact(run, name)
    value = json.loads(text) if text else {}
    if "source" in value:
        yield Link(depth, str(value["source"]), str(value["digest"]), None, "base model")
        return
    for purpose, files in value.items():
        if isinstance(files, dict):
            for file, digest in files.items():
                yield Link(depth, str(file), str(digest), None, f"input file ({purpose})")
    if "model" in value:
        digest = str(value["digest"]) if value["digest"] != value["model"] else ""
        yield Link(depth, str(value["model"]), digest, None, "model that scores start from")


@dataclass(frozen=True)
class Touch:
    """One use of a row: the file that held it and the model that was made from that file."""

    row: str
    file: str
    stage: str
    run_id: str
    versions: tuple[str, ...]


def forward(project: Path, name: str, row: str) -> list[Touch]:
    """The models that a row touched: by record id, FILE:LINE of its source, or a piece of its text."""
    tracking = client(project)
    where = experiment_id(tracking)
    versions = Registry(project, name).versions()
    touches: list[Touch] = []
    makers = tracking.search_runs([where], "tags.`plumbline.stage` = 'validate'", max_results=1000)
    for maker in makers:
        for file in sorted(_record_files(maker)):
            ids = sorted(_matching(read_artifact(maker, file) or "", row))
            if not ids:
                continue
            path = f"data/stages/validate/{file}"
            digest = maker.data.tags.get(_OUT + path)
            users = tracking.search_runs([where], f"tags.`{_IN}{path}` = '{digest}'", max_results=1000)
            for user in users:
                touched = tuple(v.version for v in versions if _descends(tracking, where, user, v))
                stage = str(user.data.tags["plumbline.stage"])
                touches += [Touch(key, file, stage, str(user.info.run_id), touched) for key in ids]
    if not makers:
        raise DataError(f"{row!r}: no validate run is recorded in this store; run the pipeline first")
    return touches


def _record_files(run: Any) -> list[str]:
    prefix = f"{_OUT}data/stages/validate/"
    return [
        tag.removeprefix(prefix) for tag in run.data.tags if tag.startswith(prefix) and tag.endswith(".jsonl")
    ]


def _matching(text: str, row: str) -> Iterator[str]:
    for line in text.splitlines():
        if row not in line:
            continue
        record = json.loads(line)
        if row in (record.get("id"), record.get("source")) or len(row) >= 12:
            yield str(record.get("id", ""))


def _descends(tracking: Any, where: str, user: Any, version: Version) -> bool:
    """Whether a registered version came from what this run made."""
    wanted = str(user.info.run_id)
    front, seen = [version.run_id], set[str]()
    while front:
        run_id = front.pop()
        if run_id == wanted:
            return True
        if run_id in seen:
            continue
        seen.add(run_id)
        for tag, digest in tracking.get_run(run_id).data.tags.items():
            if tag.startswith(_IN):
                maker = _maker(tracking, where, tag.removeprefix(_IN), digest)
                if maker is not None:
                    front.append(str(maker.info.run_id))
    return False
