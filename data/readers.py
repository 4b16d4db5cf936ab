"""From a source (file, folder, hub id) to records: which container, which shape, then the rules of `checks`.

Both are decided by content: the container by the first bytes of the file, the shape of each row by its keys.
`read_source` yields every item exactly once, as a record or as a refusal, so that nothing is lost in between;
a notice tells of something odd in a row that was kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from data.checks import Draft, Fault, Record, Refusal, judge_draft
from data.compressed import ENDINGS, bare, opened
from data.config import DataParams, Format
from data.errors import DataError
from data.folders import files_below
from data.readers_chat import (
    looks_alpaca,
    looks_hh,
    looks_messages,
    looks_preference,
    looks_prompts,
    looks_question_answer,
    looks_sharegpt,
    looks_stepwise,
    looks_unpaired,
    read_alpaca,
    read_answered,
    read_conversation,
    read_hh,
    read_preference,
    read_prompt,
    read_stepwise,
    scores_of,
)
from data.readers_fields import Fields, turns_of
from data.readers_json import BOM, RawRow, bounded_lines, parse_object, read_json, read_jsonl
from data.readers_table import read_arrow, read_csv, read_dataset, read_parquet
from data.readers_trees import looks_label_studio, looks_tree, read_label_studio, read_tree

Purpose = Literal["files", "prompts", "eval_prompts"]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ANSWER = re.compile(r"(answer|response|completion|output|candidate|generation)", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\{\{\s*[a-z_]+\s*\}\}")


@dataclass(frozen=True)
class Notice:
    """Something odd in a row that was kept all the same."""

    file: str
    line: int
    """0: of the whole file or folder."""
    message: str


@dataclass(frozen=True)
class Shape:
    """A row format: whether a row has it, and what the row then says."""

    name: Format
    looks: Callable[[Fields], bool]
    read: Callable[[Fields], Iterator[Draft | Fault]]


SHAPES: tuple[Shape, ...] = (
    Shape("label_studio", looks_label_studio, read_label_studio),
    Shape("tree", looks_tree, read_tree),
    Shape("hh", looks_hh, read_hh),
    Shape("preference", looks_preference, read_preference),
    Shape("sharegpt", looks_sharegpt, read_conversation),
    Shape("messages", looks_messages, read_conversation),
    Shape("alpaca", looks_alpaca, read_alpaca),
    Shape("question_answer", looks_question_answer, read_answered),
    Shape("stepwise", looks_stepwise, read_stepwise),
    Shape("unpaired", looks_unpaired, read_answered),
    Shape("prompts", looks_prompts, read_prompt),
)


def read_source(
    source: str, params: DataParams, purpose: Purpose
) -> Iterator[tuple[str, Record | Refusal | Notice]]:
    """(shape, item) for every item of a source; the shape is "" where none was recognised."""
    for notice in _passed_over(source):
        yield "", notice
    for label, rows in _files_of(source, params):
        for row in rows:
            if row.notice is not None:
                yield "", Notice(label, row.line, row.notice)
            yield from _read_row(row, label, params, purpose)


def _read_row(
    row: RawRow, label: str, params: DataParams, purpose: Purpose
) -> Iterator[tuple[str, Record | Refusal | Notice]]:
    shape_name = ""
    try:
        if isinstance(row.value, Fault):
            raise row.value
        fields = Fields(_renamed(row.value, params.columns), params.coerce)
        shape = _shape(fields, params.format if purpose == "files" else "auto")
        shape_name = shape.name
        if purpose == "files" and shape.name == "prompts":
            _refuse_half_a_pair(fields)
        reading = _open_ended(fields) if purpose != "files" and _is_plain_chat(fields) else shape.read(fields)
        for item in reading:
            yield shape_name, _judged(item, label, row.line, params, purpose)
            if isinstance(item, Draft):
                for message in _oddities(item, purpose):
                    yield shape_name, Notice(label, row.line, message)
    except Fault as fault:
        yield shape_name, _refusal(fault, label, row.line)


def _oddities(draft: Draft, purpose: Purpose) -> Iterator[str]:
    if any(_PLACEHOLDER.search(answer) for answer in draft.answers):
        yield "an answer has an unfilled {{placeholder}}"
    if draft.implied:
        yield (
            "no prompt: what both answers begin with is taken for it; if that is wrong, name the prompt's "
            "column in data.columns"
        )
    if draft.kind == "preference" and (scores := scores_of(draft.extra)) and scores[1] < scores[2]:
        yield f"the rejected answer has the higher score ({scores[0]}), and is taken as rejected all the same"
    if draft.kind != "prompt" or purpose != "files":
        return
    if answers := [key for key in draft.extra if _ANSWER.match(key)]:
        yield (
            f"read as a prompt alone, the answers in {', '.join(answers[:4])} are not used; name the columns "
            "in data.columns (chosen and rejected, or answer), or write the rows as pairs"
        )


def _refuse_half_a_pair(fields: Fields) -> None:
    """A row with one answer of two is a faulty pair, not a prompt."""
    for there, missing in (("chosen", "rejected"), ("rejected", "chosen")):
        if fields.has(there) and not fields.has(missing):
            raise Fault(
                "missing", missing, f"the field is absent or null beside {there!r}; a pair needs both answers"
            )


def _judged(
    item: Draft | Fault, label: str, line: int, params: DataParams, purpose: Purpose
) -> Record | Refusal:
    if isinstance(item, Fault):
        return _refusal(item, label, line)
    try:
        return judge_draft(item if purpose == "files" else _prompt_only(item), params, f"{label}:{line}")
    except Fault as fault:
        return _refusal(fault, label, line)


def _prompt_only(draft: Draft) -> Draft:
    """The prompt of a draft of any kind; its answers are not used."""
    if draft.kind == "prompt":
        return draft
    meta = {key: draft.meta[key] for key in ("reference",) if key in draft.meta}
    extra = dict(draft.extra)
    part = extra.pop("slice", None)
    if part is not None:
        meta["slice"] = part
    return Draft("prompt", draft.prompt, meta=meta, extra=extra)


def _is_plain_chat(fields: Fields) -> bool:
    """Messages that nobody parted into prompt and answer."""
    return fields.first("messages", "conversations") is not None and not fields.has("chosen")


def _open_ended(fields: Fields) -> Iterator[Draft]:
    """A conversation as a prompt for rollouts: it ends with the user (with a label, its answer is cut)."""
    if "label" in fields.row:
        yield from read_conversation(fields)
        return
    fields.refuse_media_and_tools()
    key = "conversations" if fields.has("conversations") else "messages"
    turns = turns_of(fields.take(key), key, fields.coerce)
    system = fields.optional_text("system")
    if system.strip():
        turns.insert(0, ("system", system))
    yield Draft("prompt", turns, meta=fields.meta("slice", "reference"), extra=fields.rest())


def _shape(fields: Fields, wanted: Format) -> Shape:
    fitting = next((shape for shape in SHAPES if shape.looks(fields)), None)
    keys = ", ".join(sorted(fields.row)[:12])
    if wanted == "auto":
        if fitting is None:
            remedy = "name the columns in data.columns (prompt, chosen, rejected, answer ...)"
            if key := next((key for key, value in fields.row.items() if _are_rows(value)), None):
                remedy += f"; if the rows are in the list below {key!r}, make that list the whole file"
            raise Fault("unknown_shape", "row", f"no known format has the keys {keys}; {remedy}", keys)
        return fitting
    named = next((shape for shape in SHAPES if shape.name == wanted and shape.looks(fields)), None)
    if named is None:
        seen = fitting.name if fitting else "none that is known"
        raise Fault("wrong_format", "row", f"not {wanted}, as data.format demands, but {seen}", keys)
    return named


def _are_rows(value: JsonValue) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _renamed(row: dict[str, JsonValue], columns: dict[str, str]) -> dict[str, JsonValue]:
    names = {theirs: ours for ours, theirs in columns.items() if theirs in row}
    return {names.get(key, key): value for key, value in row.items()} if names else row


def _refusal(fault: Fault, label: str, line: int) -> Refusal:
    return Refusal(label, line, fault.field, fault.reason, fault.message, fault.value)


# Sources and containers


def label_of(path: Path) -> str:
    """The path as results name it: relative to the project, or the bare name of a file elsewhere."""
    if path.is_absolute():
        here = Path.cwd()
        return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name
    return path.as_posix()


def files_in(source: str) -> list[Path]:
    """The files of a local source, in the order of their names; [] for a hub id or a saved data set."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir() and not _is_saved_dataset(path):
        below = files_below(path)
        if saved := [name for name in below if Path(name).name in _SAVED]:
            folders = ", ".join(dict.fromkeys(str((path / name).parent) for name in saved[:5]))
            raise DataError(f"{source}: the folder holds saved data sets; name each of them: {folders}")
        found = [path / name for name in below if _is_read(name)]
        if not found:
            raise DataError(
                f"{source}: no file with one of {', '.join(SUFFIXES)} in the folder (hidden ones are not "
                "read); name the files"
            )
        return found
    return []


def source_digest(source: str) -> str | None:
    """SHA-256 over the bytes of a local source; None for a data set on the hub."""
    path = Path(source)
    files = [path / name for name in files_below(path)] if path.is_dir() else [path] if path.is_file() else []
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest() if files else None


def _files_of(source: str, params: DataParams) -> Iterator[tuple[str, Iterator[RawRow]]]:
    files = files_in(source)
    for path in files:
        yield label_of(path), _rows(path, params.max_row_bytes)
    if not files:
        path = Path(source)
        looks_like_file = _suffix(path) in SUFFIXES or path.is_absolute() or source.startswith((".", "data/"))
        if not path.is_dir() and (looks_like_file or not _HUB_ID.fullmatch(source)):
            raise DataError(f"{source}: no such file or folder; correct the path in data (params.yaml)")
        label = label_of(path) if path.is_dir() else source
        yield label, read_dataset(source, params.hub, params.max_row_bytes)


_SAVED = ("dataset_dict.json", "state.json")


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED)


def _is_read(name: str) -> bool:
    return _suffix(Path(name)) in SUFFIXES


def _passed_over(source: str) -> Iterator[Notice]:
    """What is in a folder of records and is not read."""
    path = Path(source)
    if path.is_dir() and not _is_saved_dataset(path):
        left = [name for name in files_below(path) if not _is_read(name)]
        if left:
            names = ", ".join(left[:5]) + (" ..." if len(left) > 5 else "")
            message = f"{len(left)} files of the folder are not read, for their names end otherwise: {names}"
            yield Notice(label_of(path), 0, message)


def _suffix(path: Path) -> str:
    return Path(bare(path.name)).suffix


def _rows(path: Path, limit: int) -> Iterator[RawRow]:
    try:
        container = _container(path, limit)
        if container == "parquet":
            yield from read_parquet(path, limit)
        elif container == "arrow":
            yield from read_arrow(path, limit)
        else:
            with opened(path) as stream:
                yield from _TEXTS[container](stream, limit)
    except DataError as error:
        raise DataError(f"{label_of(path)}: {error}") from error


_TEXTS = {"csv": read_csv, "json": read_json, "jsonl": read_jsonl}
_ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # a file (Feather too) and a stream
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def _container(path: Path, limit: int) -> Literal["parquet", "arrow", "csv", "json", "jsonl"]:
    """By the first bytes; the suffix decides only between JSON and JSONL that is broken in its first line."""
    with opened(path) as stream:
        start = stream.read(64)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(_ARROW):
        return "arrow"
    if b"\0" in start:
        what = "it is UTF-16 or UTF-32" if start.startswith(_UTF16) else "no text: it holds zero bytes"
        raise DataError(
            f"{what} (it begins with {start[:8]!r}); give UTF-8 JSONL, JSON or CSV, Parquet or Arrow, "
            f"or text packed as {', '.join(ENDINGS)}"
        )
    head = start.removeprefix(BOM).lstrip()
    if head.startswith(b"["):
        return "json"
    suffix = _suffix(path)
    if head.startswith(b"{"):
        whole = _begins_with_a_row(path, limit)
        return "jsonl" if whole or suffix in (".jsonl", ".ndjson") else "json"
    return "csv" if suffix in (".csv", ".tsv") else "jsonl"


def _begins_with_a_row(path: Path, limit: int) -> bool:
    """Whether the first line that is not empty is an object, or too long to tell."""
    with opened(path) as stream:
        lines = (line for _, line in bounded_lines(stream, limit) if isinstance(line, Fault) or line.strip())
        first = next(lines)
        return isinstance(first, Fault) or isinstance(parse_object(first.removeprefix(BOM)), dict)
