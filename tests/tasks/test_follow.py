"""A file that is being written gives each step once, also when it is cut and written on."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.follow import Metrics
from tasks.status import Status, masked, read_status


def line(step: int, loss: float) -> str:
    return json.dumps({"step": step, "loss": loss, "who": "x"}) + "\n"


def test_only_whole_lines_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = Metrics(file)
    assert rows.read() == []
    file.write_text(line(1, 0.5) + line(2, 0.4)[:-5])
    assert rows.read() == [(1, {"loss": 0.5})]
    with file.open("a") as stream:
        stream.write(line(2, 0.4)[-5:])
    assert rows.read() == [(2, {"loss": 0.4})]
    assert rows.read() == []


def test_line_separators_in_a_name_end_no_row(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    row = {"step": 1, "a\u0085b": 0.5}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert Metrics(file).read() == [(1, {"a\u0085b": 0.5})]


def test_a_cut_file_gives_only_what_changed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = Metrics(file)
    file.write_text("".join(line(step, 1 / step) for step in range(1, 7)))
    assert len(rows.read()) == 6
    # Cut to step 4 and already longer than before when it is read again; 5 as it was, 6 with other values.
    file.write_text("".join(line(step, 1 / step) for step in range(1, 6)) + line(6, 9.0) + line(7, 8.0))
    assert rows.read() == [(6, {"loss": 9.0}), (7, {"loss": 8.0})]


def test_credentials_are_masked(tmp_path: Path, monkeypatch: object) -> None:
    import os

    os.environ["MY_API_KEY"] = "very-secret-value"
    try:
        text = masked("very-secret-value https://me:pass@host/x hf_abcdefghijklmnopqrst plain")
    finally:
        del os.environ["MY_API_KEY"]
    assert text == "*** https://***@host/x *** plain"


def test_status_is_replaced_as_a_whole(tmp_path: Path) -> None:
    status = Status(tmp_path, "sft")
    status.metrics({"loss": 0.25})
    status.update(message="see http://u:p@h/", state="failed", kind="data")
    said = read_status(tmp_path, "sft")
    assert said is not None
    assert (said["metrics"], said["message"], said["kind"]) == ({"loss": 0.25}, "see http://***@h/", "data")
    assert read_status(tmp_path, "judge") is None
    assert [f.name for f in (tmp_path / ".plumbline" / "status").iterdir()] == ["sft.json"]
