"""Canonical records: equal content gives equal bytes, groups gather what is the same question."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data.errors import DataError
from data.records import (
    Message,
    Preference,
    Prompt,
    canonical_json,
    digest,
    group_key,
    normalise_prompt,
    read_records,
    to_line,
)


def _prompt(*texts: str) -> tuple[Message, ...]:
    return tuple(Message(role=("user", "assistant")[at % 2], content=text) for at, text in enumerate(texts))  # type: ignore[arg-type]


def test_canonical_json_orders_keys_and_escapes_line_separators() -> None:
    assert canonical_json({"b": 1, "a": "x\u2028y\u0085é"}) == '{"a":"x\\u2028y\\u0085é","b":1}'


def test_a_record_is_one_line_for_every_reader() -> None:
    record = Prompt(prompt=_prompt("a\u2028b\u2029c\u0085d\ne\x0bf"), id="0" * 16, group="0" * 16)
    line = to_line(record)
    assert len(line.splitlines()) == 1
    assert Prompt.model_validate_json(line) == record


@given(st.text(st.characters(exclude_categories=("Cs",))), st.text(st.characters(exclude_categories=("Cs",))))
def test_records_survive_their_bytes(chosen: str, rejected: str) -> None:
    record = Preference(
        prompt=_prompt("why?"), id="1" * 16, group="2" * 16, chosen=chosen, rejected=rejected, votes=(2, 1)
    )
    assert Preference.model_validate_json(to_line(record)) == record


def test_records_are_frozen_and_closed() -> None:
    record = Prompt(prompt=_prompt("a"), id="0", group="0")
    with pytest.raises(ValidationError):
        record.id = "1"
    with pytest.raises(ValidationError):
        Prompt.model_validate(
            {"prompt": [{"role": "user", "content": "a"}], "id": "0", "group": "0", "more": 1}
        )


def test_digest_keeps_parts_apart() -> None:
    assert digest("ab", "c") != digest("a", "bc")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What is TCP?", "  what is\ttcp "),
        ("“Why”, he said", '"Why" he said'),
        ("ｆｕｌｌ width", "full width"),
        ("line one\nline two", "line one line two"),
        ("STRASSE", "straße"),
    ],
)
def test_normalise_gathers_the_same_question(left: str, right: str) -> None:
    assert normalise_prompt(left) == normalise_prompt(right)


@pytest.mark.parametrize(
    ("left", "right"), [("2 + 3", "2 * 3"), ("2 + 3", "2 - 3"), ("?", "!!"), ("是", "不")]
)
def test_normalise_keeps_different_questions_apart(left: str, right: str) -> None:
    assert normalise_prompt(left) != normalise_prompt(right)


@given(st.text())
def test_normalise_is_idempotent_enough_to_group_by(text: str) -> None:
    assert normalise_prompt(normalise_prompt(text)) == normalise_prompt(text)


def test_groups_by_opening_and_by_prompt() -> None:
    short, grown = _prompt("Why?"), _prompt("why", "Because.", "Really?")
    other = _prompt("why", "Because.", "And then?")
    assert group_key(short) == group_key(grown) == group_key(other)
    assert len({group_key(item, "prompt") for item in (short, grown, other)}) == 3
    system = (Message(role="system", content="Be brief."), *short)
    assert group_key(system, "prompt") == group_key(short, "prompt")


def test_read_records_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(to_line(Prompt(prompt=_prompt("a"), id="0", group="0")) + "{}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: not a Prompt record"):
        list(read_records(path, Prompt))
