"""CSV, Parquet, zipped files, folders and Hugging Face data sets give the same records as JSONL."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from data.checks import Fault
from data.config import DataParams
from data.errors import DataError, InfrastructureError
from data.readers import Notice, files_in, label_of, read_source, source_digest
from data.readers_json import BOM
from data.readers_table import read_csv
from tests.data.samples import Row, pair, pairs, read, records, refusals, write_jsonl

LIMIT = 1 << 20


def _table(rows: list[Row], delimiter: str = ",", end: str = "\n") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), delimiter=delimiter, lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def _rows(data: bytes, limit: int = LIMIT) -> list[Any]:
    found = read_csv(io.BytesIO(data), limit)
    return [(row.line, row.value.reason if isinstance(row.value, Fault) else row.value) for row in found]


@pytest.mark.parametrize(("delimiter", "end"), [(",", "\n"), (";", "\r\n"), ("\t", "\n")])
def test_csv_keeps_quotes_separators_and_line_ends_in_cells(delimiter: str, end: str) -> None:
    cells = [{"a": 'say "hi",\n\nthen; go\t', "b": "x\u2028y"}, {"a": 'a 5" pipe', "b": "plain"}]
    values = [value for _, value in _rows(BOM + _table(cells, delimiter, end))]
    assert values == cells


def test_csv_rows_know_their_first_line() -> None:
    assert [line for line, _ in _rows(b'a,b\n"1\n2",x\n3,y\n')] == [2, 4]


def test_csv_faults_do_not_take_other_rows_with_them() -> None:
    data = b"a,b\n1,2\n3\n4,5,6\n\n" + b"7," + b"x" * 99 + b"\n8,\xff\n9," + b'\n5" pipe,ok\n'
    assert _rows(data, 64) == [
        (2, {"a": "1", "b": "2"}),
        (3, "bad_row"),
        (4, "bad_row"),
        (6, "oversize"),
        (7, "encoding"),
        (8, {"a": "9", "b": None}),
        (9, {"a": '5" pipe', "b": "ok"}),
    ]


def test_csv_with_an_open_quote_is_refused() -> None:
    assert _rows(b'a,b\n1,2\n"3,4\n5,6\n') == [(2, {"a": "1", "b": "2"}), (3, "bad_row")]


def test_csv_lines_that_end_in_a_carriage_return_alone_are_not_lost() -> None:
    mixed = b"a,b\n1,2\n3,4\r5,6\n" + b'"7\r8",9\n'
    assert _rows(mixed) == [(2, {"a": "1", "b": "2"}), (3, "bad_row"), (4, {"a": "7\r8", "b": "9"})]
    with pytest.raises(DataError, match="header can not be read: a line ends in a carriage return alone"):
        _rows(b"a,b\r1,2\r3,4\r")


def test_columns_of_one_name_are_refused_and_those_without_get_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 columns have the name 'b', and only one of them could be read"):
        _rows(b"a,b,b\n1,2,3\n")
    assert _rows(b",a,\n1,2,3\n") == [(2, {"column 1": "1", "a": "2", "column 3": "3"})]
    names = ["prompt", "chosen", "chosen", "rejected"]
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 4, names=names)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: 2 columns have the name 'chosen'"):
        read(tmp_path / "a.parquet")


def test_a_csv_file_without_anything_has_no_rows() -> None:
    assert _rows(b"") == _rows(b"\n\n") == _rows(BOM) == []


def test_csv_cells_of_known_columns_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    row = pair(votes="[2, 1]", weight="0.5", disputed="True")
    row["prompt"] = '[{"role": "user", "content": "Why?"}]'
    path.write_bytes(_table([row]))
    (found,) = records(read(path))
    assert (found.votes, found.weight, found.disputed) == ((2, 1), 0.5, True)
    assert found.prompt[0].content == "Why?"


def zstd(data: bytes) -> bytes:
    whole = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(whole, "zstd") as stream:
        stream.write(data)
    return bytes(whole.getvalue().to_pybytes())


def _parquet(path: Path, rows: list[Row]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_every_container_gives_the_same_records(tmp_path: Path) -> None:
    rows = pairs(150)
    expected = [item.id for item in records(read(write_jsonl(tmp_path / "a.jsonl", rows)))]
    (tmp_path / "b.csv").write_bytes(_table(rows))
    _parquet(tmp_path / "c.parquet", rows)
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())
    text, table = (tmp_path / "a.jsonl").read_bytes(), pyarrow.Table.from_pylist(rows)
    (tmp_path / "e.jsonl.xz").write_bytes(lzma.compress(text))
    (tmp_path / "f.jsonl.bz2").write_bytes(bz2.compress(text))
    (tmp_path / "g.csv.zst").write_bytes(zstd(_table(rows)) + zstd(b""))
    pyarrow.feather.write_feather(table, tmp_path / "h.feather", chunksize=40)
    with pyarrow.ipc.new_stream(str(tmp_path / "i.arrow"), table.schema) as stream:
        stream.write_table(table)
    for path in sorted(tmp_path.iterdir()):
        name = path.name
        assert [item.id for item in records(read(tmp_path / name))] == expected, name


def test_parquet_types_become_json(tmp_path: Path) -> None:
    rows = [pair(when=datetime.datetime(2024, 1, 2), score=float("nan"), weight=None), pair("Or?", score=1.5)]
    first, second = records(read(_parquet(tmp_path / "a.parquet", rows)))
    assert first.extra == {"when": "2024-01-02 00:00:00"}
    assert second.extra == {"score": 1.5}


def test_bytes_in_a_typed_table_are_text(tmp_path: Path) -> None:
    rows = [{name: text.encode() for name, text in row.items()} for row in (pair("Qué?"), pair("Or?"))]
    rows[1]["rejected"] = b"\xff\xfe"
    items = read(_parquet(tmp_path / "a.parquet", rows))
    assert [item.prompt[0].content for item in records(items)] == ["Qué?"]
    assert refusals(items) == [(2, "encoding")]


def test_a_parquet_text_that_is_not_utf8_takes_no_other_row_with_it(tmp_path: Path) -> None:
    ends = np.array([0, 2, 4, 6], np.int32).tobytes()
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"q1\xff\xfeq3")]
    prompts = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers)
    table = {"prompt": prompts, "chosen": ["a"] * 3, "rejected": ["b"] * 3}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    items = read(tmp_path / "a.parquet")
    assert [item.prompt[0].content for item in records(items)] == ["q1", "q3"]
    assert refusals(items) == [(2, "encoding")]


def test_the_size_of_a_typed_row_is_that_of_its_text_in_utf8(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "a.parquet", [pair("字" * 100)])
    assert len(records(read(path, max_row_bytes=500, max_chars=500))) == 1
    assert refusals(read(path, max_row_bytes=300, max_chars=300)) == [(1, "oversize")]


def test_a_folder_is_read_file_by_file_in_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [pair("second?")])
    write_jsonl(tmp_path / "a.jsonl", [pair("first?")])
    (tmp_path / "notes.md").write_text("no data")
    (tmp_path / "c.jsonl.7z").write_bytes(b"7z")
    (left,) = [item for item in read(tmp_path) if isinstance(item, Notice)]
    assert left.message.startswith("2 files of the folder are not read")
    assert left.message.endswith(": c.jsonl.7z, notes.md")
    assert [path.name for path in files_in(str(tmp_path))] == ["a.jsonl", "b.jsonl"]
    assert [item.prompt[0].content for item in records(read(tmp_path))] == ["first?", "second?"]


def test_a_saved_hugging_face_data_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = pairs(5)
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select(range(2))}).save_to_disk(str(tmp_path / "two"))
    monkeypatch.chdir(tmp_path)
    assert [item.source for item in records(read("one"))] == [f"one:{n}" for n in range(1, 6)]
    assert len(records(read("two", hub={"split": "test"}))) == 2
    (left,) = [item for item in read("two") if isinstance(item, Notice)]
    assert left.message == "of its splits 'train' is read (data.hub.split) and not: test"
    with pytest.raises(DataError, match=r"saved data sets; name each of them: one, two"):
        read(".")
    with pytest.raises(DataError, match="no split 'dev', only: test, train"):
        read("two", hub={"split": "dev"})


def test_a_hub_id_without_network_says_so() -> None:
    with pytest.raises((DataError, InfrastructureError), match="no-such-owner/no-such-data"):
        read("no-such-owner/no-such-data")


@pytest.mark.parametrize("source", ["absent.jsonl", "./absent", "data/absent", "/absent/file"])
def test_an_absent_path_is_named(source: str) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read(source)


def test_labels_hold_no_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert label_of(tmp_path / "data" / "a.jsonl") == "data/a.jsonl"
    assert label_of(Path("/elsewhere/a.jsonl")) == "a.jsonl"
    assert label_of(Path("../a.jsonl")) == "../a.jsonl"


def test_rows_that_change_shape_deep_in_a_file_are_judged_one_by_one(tmp_path: Path) -> None:  # F10, F11
    rows = [pair(f"q {n}?", system=None) for n in range(2000)] + [pair("q last?", system="Be brief.")]
    rows += [pair("q extra?", meta={"a": 1}, more=[1, "a"]), pair("q number?", meta=1)]
    rows += [{"messages": [], "meta": 1}, {"messages": [{"role": "user", "content": 5}]}]
    items = read(write_jsonl(tmp_path / "a.jsonl", rows))
    assert refusals(items) == [(2004, "missing"), (2005, "not_text")]
    kept = records(items)
    assert kept[2000].prompt[0].role == "system"
    assert kept[2001].extra == {"meta": {"a": 1}, "more": [1, "a"]}
    assert kept[2002].extra == {"meta": 1}


def test_digest_of_a_source_follows_its_bytes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", pairs(2))
    before = source_digest(str(path))
    write_jsonl(path, pairs(3))
    assert before != source_digest(str(path))
    assert source_digest(str(tmp_path)) is not None
    assert source_digest("owner/name") is None


@pytest.mark.parametrize("cut", [40, -30])
def test_a_damaged_parquet_file_is_an_error_of_the_data(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "rows.parquet"
    rows = [{"prompt": f"p {number}", "chosen": "a", "rejected": "b"} for number in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"rows\.parquet: the Parquet file can not be read") as caught:
        list(read_source(str(file), DataParams(), "files"))
    assert "fetch or write it again" in str(caught.value)


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress, zstd])
def test_what_is_packed_and_cut_off_is_an_error_of_the_data(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "rows.jsonl.packed"
    rows = write_jsonl(tmp_path / "a.jsonl", pairs(3000)).read_bytes()
    file.write_bytes(pack(rows)[:-50])
    with pytest.raises(DataError, match=r"rows\.jsonl\.packed: the compressed file is damaged or cut off"):
        read(file)


def test_a_damaged_arrow_file_and_utf16_are_errors_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(pairs(50)), file, compression="uncompressed")
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"rows\.arrow: the Arrow file can not be read beyond row"):
        read(file)
    (tmp_path / "a.csv").write_bytes("prompt,chosen\nx,y\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"a\.csv: it is UTF-16 or UTF-32 .* give UTF-8"):
        read(tmp_path / "a.csv")


def test_a_gzip_file_that_is_cut_off_and_a_program_are_errors_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    rows = "".join(
        json.dumps({"prompt": f"{i * 7919}", "chosen": "a", "rejected": "b"}) + "\n" for i in range(500)
    )
    file.write_bytes(gzip.compress(rows.encode())[:-200])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: the compressed file is damaged or cut off"):
        list(read_source(str(file), DataParams(), "files"))
    program = tmp_path / "setup.jsonl"
    program.write_bytes(b"MZ\x90\0\x03\0\0\0" + bytes(500))
    with pytest.raises(DataError, match=r"setup\.jsonl: no text"):
        list(read_source(str(program), DataParams(), "files"))
