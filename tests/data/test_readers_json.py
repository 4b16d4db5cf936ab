"""JSONL and JSON in bounded memory: where rows begin and end, and what is said of broken ones."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from data.checks import Fault, Refusal
from data.readers import Notice
from data.readers_json import BOM, RawRow, bounded_lines, read_json, read_jsonl
from tests.data.samples import pair, pairs, read, records, refusals, write_jsonl

LIMIT = 1 << 20


def _values(rows: list[RawRow]) -> list[Any]:
    return [row.value.reason if isinstance(row.value, Fault) else row.value for row in rows]


def _lines(data: bytes, limit: int = LIMIT) -> list[Any]:
    found = bounded_lines(io.BytesIO(data), limit)
    return [(number, line.reason if isinstance(line, Fault) else line) for number, line in found]


def test_lines_end_at_lf_only() -> None:
    text = "a\u2028b\u0085c\x0bd\x0c".encode()
    assert _lines(text + b"\n" + b"e\rf\n") == [(1, text), (2, b"e\rf")]


def test_the_last_line_needs_no_lf_and_crlf_is_no_content_above_the_limit() -> None:
    assert _lines(b"abcd\r\nabcd\nabcd", 4) == [(1, b"abcd\r"), (2, b"abcd"), (3, b"abcd")]
    assert _lines(b"abcde\r\nabcde\nabcde", 4) == [(1, "oversize"), (2, "oversize"), (3, "oversize")]


def test_unicode_separators_inside_a_string_do_not_cut_the_row(tmp_path: Path) -> None:  # F14
    rows = [pair(f"a\u2028b\u2029c\u0085d {n}?") for n in range(3)]
    items = read(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [item.prompt[0].content for item in records(items)] == [row["prompt"] for row in rows]
    assert not refusals(items)


def test_crlf_and_bom_change_nothing(tmp_path: Path) -> None:  # F12
    plain = write_jsonl(tmp_path / "a.jsonl", pairs(3))
    expected = records(read(plain))
    for data in (BOM + plain.read_bytes(), plain.read_bytes().replace(b"\n", b"\r\n")):
        plain.write_bytes(data)
        assert records(read(plain)) == expected


def test_a_bom_in_mid_file_is_reported_with_its_line(tmp_path: Path) -> None:  # F12
    first, second = pairs(2), pairs(4)[2:]
    path = tmp_path / "joined.jsonl"
    halves = [BOM + write_jsonl(tmp_path / "half.jsonl", rows).read_bytes() for rows in (first, second)]
    path.write_bytes(b"".join(halves))
    items = read(path)
    assert len(records(items)) == 4
    notices = [item for item in items if isinstance(item, Notice)]
    assert [(item.line, "byte order mark" in item.message) for item in notices] == [(3, True)]


def test_broken_rows_do_not_take_others_with_them() -> None:
    data = b'{"a":1}\n{"a":\n\n  \n[1]\n"s"\n{"a":NaN}\n{"a":1,"a":2}\n\xff\xfe{}\n{"a":2}'
    rows = list(read_jsonl(io.BytesIO(data), LIMIT))
    assert [row.line for row in rows] == [1, 2, 5, 6, 7, 8, 9, 10]
    expected = ["bad_json", "not_object", "not_object", "bad_json", "bad_json", "encoding"]
    assert _values(rows) == [{"a": 1}, *expected, {"a": 2}]


def test_absurd_nesting_and_numbers_are_refused_not_raised() -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    huge = b'{"a":' + b"1" * 6000 + b"}"
    assert _values(list(read_jsonl(io.BytesIO(deep + b"\n" + huge), LIMIT))) == ["bad_json", "bad_json"]


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt":"why","chosen":"ok \\ud800","rejected":"no"}\n' + json.dumps(pair()), "utf-8")
    items = read(path)
    assert refusals(items) == [(1, "encoding")]
    assert len(records(items)) == 1


def test_a_giant_line_is_refused_in_bounded_memory(tmp_path: Path) -> None:  # F19
    path = tmp_path / "giant.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(pair("first?")) + "\n" + '{"prompt":"')
        for _ in range(40):
            file.write("x" * 1_000_000)
        file.write('","chosen":"a","rejected":"b"}\n' + json.dumps(pair("last?")) + "\n")
    tracemalloc.start()
    items = read(path, max_row_bytes=200_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusals(items) == [(2, "oversize")]
    message = next(item for item in items if isinstance(item, Refusal)).message
    assert "40000041 bytes" in message and "200000" in message
    assert [item.prompt[0].content for item in records(items)] == ["first?", "last?"]
    assert peak < 4_000_000


@pytest.mark.parametrize(("opening", "ending"), [("[", "]"), ("", "")])
def test_a_giant_object_is_refused_in_bounded_memory(
    tmp_path: Path, opening: str, ending: str
) -> None:  # F19
    path = tmp_path / "giant.json"
    with path.open("w", encoding="utf-8") as file:
        file.write(opening + '{\n"prompt":"')
        for _ in range(20):
            file.write("x" * 1_000_000)
        file.write('","chosen":"a","rejected":"b"}' + ending)
    tracemalloc.start()
    items = read(path, max_row_bytes=200_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusals(items) == [(1, "oversize")]
    assert peak < 4_000_000


def _array(rows: list[Any], indent: int | None = None) -> bytes:
    return json.dumps(rows, indent=indent, ensure_ascii=False).encode()


class _Drip(io.BytesIO):
    """A stream that gives a few bytes a read, so that every cut is met."""

    def __init__(self, data: bytes, seed: int) -> None:
        super().__init__(data)
        self.random = random.Random(seed)

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size, self.random.randint(1, 3)) if size and size > 0 else size)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("seed", range(5))
def test_array_elements_are_cut_right_at_every_chunk_border(indent: int | None, seed: int) -> None:
    rows = [{"a": 'x"]},{[\\', "b": [1, {"c": "é\u2028"}]}, {}, {"a": "\\"}, {"n": [[], {}]}]
    assert _values(list(read_json(_Drip(_array(rows, indent), seed), LIMIT))) == rows


def test_array_elements_know_their_line() -> None:
    data = b'\n [\n {"a":1},\n\n {"a":\n2}, {"a":3}\n]\n'
    assert [(row.line, row.value) for row in read_json(io.BytesIO(data), LIMIT)] == [
        (3, {"a": 1}),
        (5, {"a": 2}),
        (6, {"a": 3}),
    ]


def test_array_faults() -> None:
    def reasons(data: bytes, limit: int = LIMIT) -> list[Any]:
        return _values(list(read_json(io.BytesIO(data), limit)))

    assert reasons(b"[]") == []
    assert reasons(BOM + b'[{"a":1}]') == [{"a": 1}]
    assert reasons(b'[{"a":1},{"a":2') == [{"a": 1}, "bad_json"]
    assert reasons(b'[{"a":1},,{"a":2}]') == [{"a": 1}, "bad_json", {"a": 2}]
    assert reasons(b'[{"a":1}] {"a":2}') == [{"a": 1}, "bad_json"]
    assert reasons(b'[1,{"a":1}]') == ["not_object", {"a": 1}]
    assert reasons(b'[{"a":"' + b"x" * 50 + b'"},{"a":1}]', 20) == ["oversize", {"a": 1}]
    assert reasons(b'{"a":\n1}') == [{"a": 1}]
    assert reasons(b"") == []


def test_the_container_is_found_by_content(tmp_path: Path) -> None:
    rows = pairs(3)
    expected = [item.id for item in records(read(write_jsonl(tmp_path / "a.jsonl", rows)))]
    named = {
        "lines.json": (tmp_path / "a.jsonl").read_bytes(),
        "array.jsonl": _array(rows, 2),
        "c.txt": _array(rows),
    }
    for name, data in named.items():
        (tmp_path / name).write_bytes(data)
        assert [item.id for item in records(read(tmp_path / name))] == expected


@pytest.mark.parametrize(("limit", "said"), [(LIMIT, "list below 'data'"), (400, "one object is one row")])
def test_rows_wrapped_under_a_key_are_told_as_such(tmp_path: Path, limit: int, said: str) -> None:
    file = tmp_path / "wrapped.json"
    for indent in (None, 2):
        file.write_text(json.dumps({"version": 1, "data": pairs(9)}, indent=indent))
        first = read(file, max_row_bytes=limit, max_chars=min(limit, 100))[0]
        assert isinstance(first, Refusal)
        assert said in first.message
