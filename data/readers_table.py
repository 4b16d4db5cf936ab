"""CSV, Parquet and Arrow files and Hugging Face data sets as raw rows."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pydantic import JsonValue

from data.checks import Fault
from data.config import HubParams
from data.errors import DataError, InfrastructureError
from data.hub import reachable
from data.readers_json import BOM, RawRow, bounded_lines, oversize

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_TYPED_COLUMNS = ("votes", "weight", "disputed")
_BATCH = 64


def read_csv(stream: BinaryIO, limit: int) -> Iterator[RawRow]:
    """Rows of a table with a header. Its separator is what the header has most of: comma, semicolon or tab.

    An empty cell is null. A cell that spells a list of messages is read as one; all others are text.
    """
    rows = _table_rows(stream, limit)
    _, head = next(rows, (0, ""))
    if isinstance(head, Fault):
        raise DataError(f"the header can not be read: {head.message}")
    separator = _separator(head)
    csv.field_size_limit(limit)
    try:
        names = _named([name.strip() for name in _cells(head, separator)])
    except csv.Error as error:
        raise DataError(f"the header can not be read: {error}") from error
    for line, text in rows:
        if isinstance(text, Fault):
            yield RawRow(line, text)
            continue
        try:
            cells = _cells(text, separator)
        except csv.Error as error:
            yield RawRow(line, Fault("bad_row", "row", f"not a row of the table: {error}", text))
            continue
        if len(cells) != len(names):
            message = f"the row has {len(cells)} cells, the header {len(names)}; mind quotes and separators"
            yield RawRow(line, Fault("bad_row", "row", message, text))
            continue
        yield RawRow(line, {name: _cell(name, cell) for name, cell in zip(names, cells, strict=True)})


def _named(names: list[str]) -> list[str]:
    """The columns' names, `column N` for one without; DataError where two have the same."""
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{names.count(twice)} columns have the name {twice!r}, and only one of them could be read; "
            "rename or remove the others"
        )
    return [name or f"column {at}" for at, name in enumerate(names, 1)]


def _separator(head: str) -> str:
    return max(",;\t", key=head.count)


def _open_after(line: str, separator: str, quoted: bool) -> bool:
    """Whether a quoted cell is still open at the end of the line. A quote within a bare cell opens none."""
    at = 0
    while True:
        if not quoted and line.startswith('"', at):
            quoted, at = True, at + 1
        while quoted:
            at = line.find('"', at) + 1
            if at == 0:
                return True
            quoted = line.startswith('"', at)  # Doubled: a mark in the cell, which stays open.
            at += quoted
        at = line.find(separator, at) + 1
        if at == 0:
            return False


def _table_rows(stream: BinaryIO, limit: int) -> Iterator[tuple[int, str | Fault]]:
    """(first line, text) of each row; a row goes on over line ends while a quote is open."""
    start, pieces, size, quoted, separator = 1, list[str](), 0, False, ","
    for number, raw in bounded_lines(stream, limit):
        if isinstance(raw, Fault):
            yield (start if quoted else number), raw
            pieces, size, quoted = [], 0, False
            continue
        if number == 1:
            raw = raw.removeprefix(BOM)
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            yield number, Fault("encoding", "row", f"byte {error.start} is not UTF-8; save the file as UTF-8")
            pieces, size, quoted = [], 0, False
            continue
        if number == 1:
            separator = _separator(line)
        if not quoted:
            start, pieces, size = number, [], 0
        quoted = _open_after(line, separator, quoted)
        size += len(raw) + 1
        if size <= limit + 1:
            pieces.append(line)
        if quoted:
            continue
        if size > limit + 1:
            yield start, oversize(size, limit)
        elif text := "\n".join(pieces).removesuffix("\r"):
            yield start, text
    if quoted:
        yield start, Fault("bad_row", "row", "a quote is opened here and never closed; close it or double it")


def _cells(text: str, separator: str) -> list[str]:
    """The cells of one row; csv.Error where a bare carriage return ends it and another begins."""
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    if len(rows) > 1:
        raise csv.Error("a line ends in a carriage return alone; save the file with LF or CRLF line ends")
    return rows[0] if rows else []


def _cell(name: str, cell: str) -> JsonValue:
    if cell == "":
        return None
    typed = name in _TYPED_COLUMNS
    if typed or (cell.startswith("[{") and ('"role"' in cell or '"from"' in cell)):
        try:
            value: JsonValue = json.loads(cell.lower() if typed else cell)
        except ValueError:
            return cell
        return value
    return cell


def read_parquet(path: Path, limit: int) -> Iterator[RawRow]:
    """Rows of a Parquet file."""
    return _read_batches(_parquet_batches(path), "Parquet", limit)


def read_arrow(path: Path, limit: int) -> Iterator[RawRow]:
    """Rows of an Arrow file (Feather version 2 is one) or of a stored Arrow stream."""
    return _read_batches(_arrow_batches(path), "Arrow", limit)


def _read_batches(batches: Iterator[RecordBatch], kind: str, limit: int) -> Iterator[RawRow]:
    """Rows, a few at a time; `line` is the row's number. The file is opened when the first is asked for."""
    import pyarrow

    number = 0
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH):
                for row in _rows_of(batch.slice(start, _BATCH)):
                    number += 1
                    yield _plain(number, row, limit)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"the {kind} file can not be read beyond row {number} ({error}); fetch or write it again"
        ) from error


def _parquet_batches(path: Path) -> Iterator[RecordBatch]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        _named(table.schema_arrow.names)
        yield from table.iter_batches(batch_size=_BATCH)


def _arrow_batches(path: Path) -> Iterator[RecordBatch]:
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(path)) as source:
        try:
            table = ipc.open_file(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            stream = ipc.open_stream(source)
            _named(stream.schema.names)
            yield from stream
            return
        _named(table.schema.names)
        for at in range(table.num_record_batches):
            yield table.get_batch(at)


def read_dataset(name: str, hub: HubParams, limit: int) -> Iterator[RawRow]:
    """Rows of a data set saved by `save_to_disk` (a folder) or on the hub (an id, streamed)."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets

    rows: Iterable[Mapping[str, object]]
    notice: str | None = None
    if not Path(name).is_dir() and not reachable():
        raise InfrastructureError(
            f"data.files: {name} is no local path and the hub can not be reached; give a local path"
        )
    try:
        if Path(name).is_dir():
            rows, notice = _saved(name, hub.split)
        else:
            rows = datasets.load_dataset(
                name, hub.config, split=hub.split, revision=hub.revision, streaming=True
            )
    except (ConnectionError, TimeoutError) as error:
        raise InfrastructureError(
            f"data.files: {name} is no local path and the hub can not be reached ({error}); give a local path"
        ) from error
    except (FileNotFoundError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.files: {name} is neither a path nor a readable data set: {error}") from error
    for number, row in enumerate(rows, 1):
        yield replace(_plain(number, row, limit), notice=notice if number == 1 else None)


def _saved(name: str, split: str) -> tuple[Iterable[Mapping[str, object]], str | None]:
    """The rows below a folder of `save_to_disk`, and what is left out of it."""
    import datasets

    loaded = datasets.load_from_disk(name)
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded, None
    if split not in loaded:
        splits = ", ".join(sorted(loaded))
        raise DataError(f"{name}: no split {split!r}, only: {splits}; set data.hub.split")
    others = ", ".join(sorted(set(loaded) - {split}))
    left = f"of its splits {split!r} is read (data.hub.split) and not: {others}" if others else None
    return loaded[split], left


def _rows_of(batch: RecordBatch) -> Iterator[Mapping[str, object] | Fault]:
    """The rows of a batch; a row whose text is not UTF-8 is a Fault, and takes no other with it."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for at in range(batch.num_rows):
            try:
                yield from batch.slice(at, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield _not_utf8(error)


def _not_utf8(error: UnicodeDecodeError) -> Fault:
    return Fault("encoding", "row", f"byte {error.start} of a cell is not UTF-8; write the text as UTF-8")


def _plain(number: int, row: Mapping[str, object] | Fault, limit: int) -> RawRow:
    """A row of typed columns as JSON: times and decimals become text, a NaN (how tables write a gap) null."""
    if isinstance(row, Fault):
        return RawRow(number, row)
    try:
        text = json.dumps(row, default=_as_json, ensure_ascii=False)
    except UnicodeDecodeError as error:
        return RawRow(number, _not_utf8(error))
    size = len(text.encode("utf-8"))
    if size > limit:
        return RawRow(number, oversize(size, limit))
    value: dict[str, JsonValue] = json.loads(text, parse_constant=lambda name: None)
    return RawRow(number, value)


def _as_json(cell: object) -> str:
    """Bytes are text in a column that was written without saying so; the rest as Python writes it."""
    return cell.decode("utf-8") if isinstance(cell, bytes) else str(cell)
