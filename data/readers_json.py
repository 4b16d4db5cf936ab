"""JSONL and JSON files as raw rows, in bounded memory.

Lines end at LF only (a carriage return before it is dropped), never at U+2028 and its kin. A byte order mark
at the start of the file is dropped; one at the start of a later line (two files put together) is dropped with
a notice. A row above the limit is passed over, not held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from pydantic import JsonValue

from data.checks import Fault, type_name

BOM = b"\xef\xbb\xbf"
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')
_CHUNK = 1 << 16


@dataclass(frozen=True)
class RawRow:
    """One row as it stands in the file: its first line, and its fields or why they can not be read."""

    line: int
    value: dict[str, JsonValue] | Fault
    notice: str | None = None


def bounded_lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | Fault]]:
    """(line number, bytes without LF) for each line; a Fault instead of a line of more than `limit` bytes."""
    number = 0
    while line := stream.readline(limit + 2):
        number += 1
        size = len(line.removesuffix(b"\n").removesuffix(b"\r"))
        tail = line
        while not tail.endswith(b"\n") and (tail := stream.readline(_CHUNK)):
            size += len(tail.removesuffix(b"\n"))
        hint = _ONE if number == 1 else ""
        yield number, oversize(size, limit, hint) if size > limit else line.removesuffix(b"\n")


_ONE = "; a file of one object is one row: several stand in a list, or one a line"


def oversize(size: int, limit: int, hint: str = "") -> Fault:
    return Fault(
        "oversize",
        "row",
        f"the row has {size} bytes, at most {limit}; shorten it or raise data.max_row_bytes{hint}",
    )


def parse_object(raw: bytes) -> dict[str, JsonValue] | Fault:
    """The object that the bytes spell, or why not."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_double)
    except UnicodeDecodeError as error:
        return Fault("encoding", "row", f"byte {error.start} is not UTF-8; save the file as UTF-8", raw[:80])
    except RecursionError:
        return Fault("bad_json", "row", "the row is nested too deeply to be read")
    except ValueError as error:
        return Fault("bad_json", "row", f"not valid JSON: {error}", raw[:80].decode("utf-8", "replace"))
    if not isinstance(value, dict):
        return Fault(
            "not_object", "row", f"must be an object with named fields, is {type_name(value)}", value
        )
    return value


def _no_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is no JSON value")


def _no_double(pairs: Sequence[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [key for key, _ in pairs]
        double = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {double!r} stands twice")
    return value


def read_jsonl(stream: BinaryIO, limit: int) -> Iterator[RawRow]:
    """One row a line; lines of white space are no rows."""
    for number, line in bounded_lines(stream, limit):
        if isinstance(line, Fault):
            yield RawRow(number, line)
            continue
        notice = None
        if line.startswith(BOM):
            line = line.replace(BOM, b"", 1)
            notice = "a byte order mark stands in mid-file" if number > 1 else None
        if line.strip():
            yield RawRow(number, parse_object(line), notice)


def read_json(stream: BinaryIO, limit: int) -> Iterator[RawRow]:
    """The elements of a top-level array, or the one object of a file, without holding the file."""
    first = stream.read(3)
    head = b"" if first == BOM else first
    while head.strip() == b"" and (more := stream.read(1)):
        head += more
    line = 1 + head.count(b"\n", 0, len(head) - len(head.lstrip()))
    head = head.lstrip()
    if head.startswith(b"["):
        yield from _Elements(limit, line).read(head[1:], stream)
    else:
        whole = head + stream.read(limit + 1)
        size = len(whole)
        while more := stream.read(_CHUNK):
            size += len(more)
        if size:
            yield RawRow(line, oversize(size, limit, _ONE) if size > limit else parse_object(whole))


class _Elements:
    """Cuts a stream of bytes into the elements of a JSON array, which begins after its bracket."""

    def __init__(self, limit: int, line: int) -> None:
        self.limit = limit
        self.line = line
        self.depth = 1
        self.size = 0
        self.kept = bytearray()
        self.newlines = 0
        self.in_string = False
        self.escaped = False

    def read(self, head: bytes, stream: BinaryIO) -> Iterator[RawRow]:
        chunk = head
        while chunk or (chunk := stream.read(_CHUNK)):
            if self.depth == 0:
                if chunk.strip():
                    yield RawRow(self.line, Fault("bad_json", "file", "text follows the end of the array"))
                    return
            else:
                yield from self._scan(chunk)
            chunk = b""
        if self.depth:
            fault = Fault("bad_json", "file", "the file ends inside the array; the last row is cut off")
            yield RawRow(self.line, fault)

    def _scan(self, chunk: bytes) -> Iterator[RawRow]:
        start = at = 0
        if self.escaped:
            at, self.escaped = 1, False
        while self.depth and (found := (_INSIDE if self.in_string else _OUTSIDE).search(chunk, at)):
            at = found.end()
            mark = found[0]
            if mark == b"\\":
                at += 1
                self.escaped = at > len(chunk)
            elif mark == b'"':
                self.in_string = not self.in_string
            elif mark in b"[{":
                self.depth += 1
            elif mark in b"]}":
                self.depth -= 1
            if (mark == b"," and self.depth == 1) or self.depth == 0:
                self._keep(chunk[start : at - 1])
                yield from self._element(last=self.depth == 0)
                start = at
        if self.depth:
            self._keep(chunk[start:])
        elif chunk[start:].strip():
            yield RawRow(self.line, Fault("bad_json", "file", "text follows the end of the array"))

    def _keep(self, piece: bytes) -> None:
        if not self.size:  # White space before an element is no part of it.
            bare = piece.lstrip()
            self.line += piece.count(b"\n", 0, len(piece) - len(bare))
            piece = bare
        self.size += len(piece)
        self.newlines += piece.count(b"\n")
        if self.size <= self.limit:
            self.kept += piece

    def _element(self, last: bool) -> Iterator[RawRow]:
        line, size, raw = self.line, self.size, bytes(self.kept)
        self.line += self.newlines
        self.size = self.newlines = 0
        self.kept.clear()
        if size > self.limit:
            yield RawRow(line, oversize(size, self.limit))
        elif size or not last:  # Nothing before the last bracket: an empty array, or a comma too many.
            yield RawRow(line, parse_object(raw))
