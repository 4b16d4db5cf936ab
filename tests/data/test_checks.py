"""The rules on single rows: roles, empties, sizes, labels; each fault has its reason and says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from data.checks import EXCLUSIONS, REASONS, Draft, Fault, judge_draft, shown
from data.config import DataParams
from data.records import Preference

ASK, TELL = ("user", "Why?"), ("assistant", "So.")


def _judge(draft: Draft, **params: Any) -> Any:
    try:
        return judge_draft(draft, DataParams(**params), "file.jsonl:7")
    except Fault as fault:
        return fault.reason


def _demo(*turns: tuple[str, str], answer: str = "Yes.", **params: Any) -> Any:
    return _judge(Draft("demonstration", list(turns), (answer,)), **params)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ((ASK, ASK), "role_order"),
        ((TELL, ASK), "role_order"),
        ((ASK, TELL, TELL, ASK), "role_order"),
        ((ASK, ("system", "Be."), ASK), "role_order"),
        ((("system", "Be."), ("system", "Be."), ASK), "role_order"),
        ((ASK, TELL), "last_turn"),
        ((("system", "Be."),), "missing"),
        ((), "missing"),
        ((("narrator", "Once."), ASK), "unknown_role"),
        ((("user", " \n"),), "empty_turn"),
        ((ASK, ("assistant", ""), ASK), "empty_turn"),
    ],
)
def test_roles_alternate_and_end_with_the_user(turns: Any, reason: str) -> None:  # F04
    assert _demo(*turns) == reason


def test_a_role_fault_names_the_sequence() -> None:  # F04
    with pytest.raises(Fault, match="the roles are: user, user, assistant") as caught:
        judge_draft(Draft("prompt", [ASK, ASK, TELL]), DataParams(), "f:1")
    assert caught.value.field == "prompt"


def test_the_system_message_is_kept_folded_or_refused() -> None:  # F05
    turns = (("system", "Be brief."), ASK, TELL, ASK)
    assert [m.role for m in _demo(*turns).prompt] == ["system", "user", "assistant", "user"]
    folded = _demo(*turns, system_role="fold").prompt
    assert [m.role for m in folded] == ["user", "assistant", "user"]
    assert folded[0].content == "Be brief.\n\nWhy?"
    assert _demo(*turns, system_role="reject") == "system_role"


@pytest.mark.parametrize("answer", ["", "  \n\t", "\u2003"])
def test_answers_without_text_are_refused(answer: str) -> None:  # F04
    assert _demo(ASK, answer=answer) == "empty_answer"
    assert _judge(Draft("preference", [ASK], ("ok", answer))) == "empty_answer"


def test_identical_sides_are_refused() -> None:
    assert _judge(Draft("preference", [ASK], ("Same.", " Same.\n"))) == "identical"
    assert isinstance(_judge(Draft("preference", [ASK], ("Same.", "same."))), Preference)


def test_length_is_bounded_at_its_bound() -> None:  # F50
    assert _demo(ASK, answer="x" * 96, max_chars=100) != "too_long"
    assert _demo(ASK, answer="x" * 97, max_chars=100) == "too_long"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("weight", 0, "bad_value"),
        ("weight", -1.0, "bad_value"),
        ("weight", True, "bad_value"),
        ("weight", "2", "bad_value"),
        ("weight", float("inf"), "bad_value"),
        ("votes", [0, 0], "bad_value"),
        ("votes", [1], "bad_value"),
        ("votes", [1, -1], "bad_value"),
        ("votes", [True, False], "bad_value"),
        ("votes", [1.5, 1], "bad_value"),
        ("disputed", "yes", "bad_value"),
        ("style", 3, "not_text"),
        ("dimension", ["safety"], "not_text"),
        ("annotator", "\ud800", "encoding"),
    ],
)
def test_labels_out_of_bounds_are_refused(name: str, value: Any, reason: str) -> None:
    assert _judge(Draft("preference", [ASK], ("a", "b"), meta={name: value})) == reason


def test_labels_are_carried() -> None:
    meta: dict[str, Any] = {
        "annotator": 12,
        "style": "concise",
        "dimension": "safety",
        "error_type": "unsafe",
        "topic": "tools",
        "weight": 2,
        "votes": [1, 2],
        "disputed": True,
    }
    found = _judge(Draft("preference", [ASK], ("a", "b"), meta=meta))
    assert (found.annotator, found.weight, found.votes, found.disputed) == ("12", 2.0, (1, 2), True)
    assert (found.style, found.dimension, found.error_type, found.topic) == (
        "concise",
        "safety",
        "unsafe",
        "tools",
    )
    assert found.source == "file.jsonl:7"


def test_extra_must_have_a_json_form() -> None:
    assert _judge(Draft("prompt", [ASK], extra={"score": float("nan")})) == "bad_value"
    assert _judge(Draft("prompt", [ASK], extra={"note": "\ud800"})) == "encoding"


def test_ids_are_of_content() -> None:
    first = _judge(Draft("preference", [ASK], ("a", "b"), meta={"annotator": "x"}))
    assert first.id != _judge(Draft("preference", [ASK], ("b", "a"), meta={"annotator": "x"})).id
    assert first.id != _judge(Draft("preference", [ASK], ("a", "b"), meta={"annotator": "y"})).id
    assert first.id == _judge(Draft("preference", [ASK], ("a", "b"), meta={"annotator": "x", "weight": 2})).id


def test_messages_show_values_briefly_and_encodable() -> None:
    assert shown("x" * 300) == "x" * 200 + "... (300 characters)"
    shown("\ud800").encode()
    assert shown(None) == ""


def test_reasons_are_explained_and_exclusions_are_reasons() -> None:
    assert set(REASONS) > EXCLUSIONS
    assert all(REASONS.values())
