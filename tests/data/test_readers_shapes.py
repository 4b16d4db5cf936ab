"""What each row format says, and what is said of rows that are not quite of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.checks import REASONS
from data.readers import Notice
from data.records import Demonstration, Feedback, Preference, Prompt, StepLabels
from tests.data.samples import Row, pair, read, records, refusals, write_jsonl

ASK = {"role": "user", "content": "Why?"}
TELL = {"role": "assistant", "content": "Because."}
DENY = {"role": "assistant", "content": "No idea."}


@pytest.fixture
def one(tmp_path: Path) -> Any:
    """Reads one row: the record, or its reason."""

    def read_one(row: Row, purpose: Any = "files", **params: Any) -> Any:
        items = read(write_jsonl(tmp_path / "row.jsonl", [row]), purpose, **params)
        kept = records(items)
        assert len(kept) + len(refusals(items)) == 1
        return kept[0] if kept else refusals(items)[0][1]

    return read_one


def _turns(record: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in record.prompt]


def _hh(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[n % 2]}: {text}" for n, text in enumerate(turns))


# HH transcripts


def test_transcripts_are_cut_at_the_last_assistant_turn(one: Any) -> None:  # F03
    for human_turns in (1, 2, 9, 18):
        shared = [f"turn {n}" for n in range(2 * human_turns - 1)]
        found = one({"chosen": _hh(*shared, "good"), "rejected": _hh(*shared, "bad")})
        assert isinstance(found, Preference)
        assert [text for _, text in _turns(found)] == shared
        assert (found.chosen, found.rejected) == ("good", "bad")


def test_transcripts_that_differ_before_the_answer_are_refused(one: Any) -> None:  # F03
    assert one({"chosen": _hh("a", "b", "c", "d"), "rejected": _hh("a", "B", "c", "e")}) == "prompt_mismatch"
    assert one({"chosen": _hh("a", "b", "c", "d"), "rejected": _hh("a", "b")}) == "prompt_mismatch"


def test_transcripts_that_end_badly_are_refused(one: Any) -> None:
    assert one({"chosen": _hh("a", "b", "c"), "rejected": _hh("a", "b", "c")}) == "last_turn"
    assert one({"chosen": _hh("a", ""), "rejected": _hh("a", "b")}) == "empty_answer"
    assert one({"chosen": _hh("a", "", "c", "d"), "rejected": _hh("a", "", "c", "e")}) == "empty_turn"
    doubled = "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c\n\nHuman: d\n\nAssistant: "
    assert one({"chosen": doubled + "c", "rejected": doubled + "d"}) == "role_order"


def test_a_transcript_as_prompt_field(one: Any) -> None:
    found = one({"prompt": _hh("a", "b", "c", ""), "chosen": " good", "rejected": " bad"})
    assert _turns(found) == [("user", "a"), ("assistant", "b"), ("user", "c")]


# TRL


def test_trl_preference_standard_and_conversational(one: Any) -> None:
    plain = one({"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."})
    explicit = one({"prompt": [ASK], "chosen": [TELL], "rejected": [DENY]})
    implicit = one({"chosen": [ASK, TELL], "rejected": [ASK, DENY]})
    repeated = one({"prompt": "Why?", "chosen": [ASK, TELL], "rejected": [ASK, DENY]})
    assert plain.id == explicit.id == implicit.id == repeated.id


def test_trl_implicit_prompt_of_plain_text(one: Any) -> None:
    found = one({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert (_turns(found), found.chosen, found.rejected) == ([("user", "The sky is")], "blue.", "green.")
    found = one({"chosen": "The sky is blue.", "rejected": "The sky is bluish."})
    assert (found.chosen, found.rejected) == ("blue.", "bluish.")
    assert one({"chosen": "Blue.", "rejected": "Green."}) == "missing"


@pytest.mark.parametrize("half", ["chosen", "rejected"])
def test_half_a_pair_is_no_prompt(one: Any, half: str) -> None:
    other = {"chosen": "rejected", "rejected": "chosen"}[half]
    assert one({"prompt": "What is 2 + 2?", half: "4"}) == "missing"
    assert one({"prompt": "What is 2 + 2?", half: "4", other: None}) == "missing"
    assert one({"prompt": "What is 2 + 2?", half: "4"}, purpose="prompts").id


@pytest.mark.parametrize("names", ["score_chosen score_rejected", "chosen_rating rejected_rating"])
def test_scores_beside_a_pair_are_heeded(one: Any, tmp_path: Path, names: str) -> None:
    chosen, rejected = names.split()
    row = {"prompt": "Why?", "chosen": [ASK, TELL], "rejected": [ASK, DENY], chosen: 3}
    assert one({**row, rejected: 3.0}) == "tie"
    assert one({**row, rejected: 2}).extra == {chosen: 3, rejected: 2}
    assert one({**row, rejected: None}).id == one({**row, rejected: "3"}).id
    items = read(write_jsonl(tmp_path / "row.jsonl", [{**row, rejected: 5}, {**row, rejected: 1}]))
    assert len(records(items)) == 2
    assert [(item.line, item.message) for item in items if isinstance(item, Notice)] == [
        (1, f"the rejected answer has the higher score ({chosen}), and is taken as rejected all the same")
    ]


@pytest.mark.parametrize("more", [{"response_0": "a", "response_1": "b"}, {"answers": [{"rank": 1}]}])
def test_answers_under_other_names_are_told_and_not_lost_silently(tmp_path: Path, more: Row) -> None:
    path = write_jsonl(tmp_path / "row.jsonl", [{"prompt": "Why?", **more}, {"prompt": "Who?"}])
    notices = [item for item in read(path) if isinstance(item, Notice)]
    assert [item.line for item in notices] == [1]
    assert f"the answers in {', '.join(more)} are not used; name the columns" in notices[0].message
    assert not [item for item in read(path, "prompts") if isinstance(item, Notice)]


def test_a_prompt_that_is_taken_from_the_answers_is_told(tmp_path: Path) -> None:
    row = {"chosen": "Why is it so? Because.", "rejected": "Why is it so? No."}
    path = write_jsonl(tmp_path / "row.jsonl", [row, {**row, "prompt": "Say why."}])
    items = read(path)
    assert [record.prompt[0].content for record in records(items)] == ["Why is it so?", "Say why."]
    (notice,) = [item for item in items if isinstance(item, Notice)]
    assert notice.line == 1 and "what both answers begin with is taken for it" in notice.message


def test_sides_with_different_histories_are_refused(one: Any) -> None:
    other = [{"role": "user", "content": "How?"}, DENY]
    assert one({"chosen": [ASK, TELL], "rejected": other}) == "prompt_mismatch"


def test_trl_unpaired_completion_and_prompt_only(one: Any) -> None:
    liked = one({"prompt": "Why?", "completion": "Because.", "label": True})
    assert isinstance(liked, Feedback) and liked.label is True
    assert isinstance(one({"prompt": [ASK], "completion": [TELL]}), Demonstration)
    assert isinstance(one({"messages": [ASK, TELL]}), Demonstration)
    assert isinstance(one({"prompt": [ASK]}), Prompt)
    assert one({"prompt": "Why?", "completion": "Because.", "label": "maybe"}) == "not_label"
    assert one({"prompt": "Why?", "completion": "Because.", "label": 0.5}) == "not_label"
    for yes, no in ((1, 0), (1.0, 0.0), ("True", "false"), ("1.0", "0.0")):  # As tables write them.
        assert one({"prompt": "Why?", "completion": "Because.", "label": yes}).label is True
        assert one({"prompt": "Why?", "completion": "Because.", "label": no}).label is False
    assert one({"text": "The sky is blue."}) == "unknown_shape"


# Answers in steps


def test_steps_with_a_label_each(one: Any) -> None:
    found = one({"prompt": "Why?", "completions": ["a", "b"], "labels": [True, False]})
    assert isinstance(found, StepLabels) and _turns(found) == [("user", "Why?")]
    assert found.steps == ("a", "b") and found.labels == (True, False) and found.annotator is None
    found = one({"question": "Why?", "steps": ["a", "b", "c"], "labels": [1, 0, None], "annotator": 7})
    assert found.labels == (True, False, None) and found.annotator == "7" and not found.extra
    assert one({"prompt": [ASK], "steps": ["a"], "labels": [1], "origin": "x"}).extra == {"origin": "x"}
    assert isinstance(one({"prompt": "Why?", "steps": ["a"], "labels": [1]}, purpose="prompts"), Prompt)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": [True]}, "not_label"),
        ({"labels": [True, False, True]}, "not_label"),
        ({"labels": [None, None]}, "not_label"),
        ({"labels": [True, -1]}, "not_label"),
        ({"labels": [True, 1.0]}, "not_label"),
        ({"labels": [True, "yes"]}, "not_label"),
        ({"labels": True}, "not_label"),
        ({"labels": None}, "missing"),
        ({"completions": []}, "missing"),
        ({"completions": "a"}, "missing"),
        ({"completions": ["a", 5]}, "not_text"),
        ({"completions": ["a", "  "]}, "empty_answer"),
    ],
)
def test_steps_that_do_not_fit_their_labels_are_refused(
    one: Any, changes: dict[str, Any], reason: str
) -> None:
    assert one({"prompt": "Why?", "completions": ["a", "b"], "labels": [True, False], **changes}) == reason


def test_all_steps_together_count_against_the_bound(one: Any) -> None:
    row = {"prompt": "Why?", "steps": ["a" * 48, "b" * 48], "labels": [1, 1]}
    assert one(row, max_chars=99) == "too_long" and isinstance(one(row, max_chars=100), StepLabels)


def test_a_list_called_steps_without_labels_is_an_answers_extra(one: Any) -> None:
    found = one({"prompt": "Why?", "answer": "Because.", "steps": ["a"]})
    assert isinstance(found, Demonstration) and found.extra == {"steps": ["a"]}


# ShareGPT and LLaMA-Factory


def test_sharegpt_demonstration_pair_and_feedback(one: Any) -> None:
    asked, told = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}
    denied = {"from": "gpt", "value": "No idea."}
    demonstration = one({"conversations": [asked, told], "system": "Be brief."})
    assert _turns(demonstration) == [("system", "Be brief."), ("user", "Why?")]
    found = one({"conversations": [asked], "chosen": told, "rejected": denied})
    assert (found.chosen, found.rejected) == ("Because.", "No idea.")
    assert one({"messages": [ASK], "chosen": TELL, "rejected": DENY}).id == found.id
    assert one({"messages": [ASK, TELL], "label": False}).label is False
    assert one({"conversations": [asked], "chosen": asked, "rejected": denied}) == "last_turn"


def test_content_parts_are_joined(one: Any) -> None:
    parts = [{"type": "text", "value": "W"}, {"type": "text", "text": "hy?"}]
    row = {"chosen_messages": [{"role": "user", "content": parts}, TELL], "rejected_messages": [ASK, DENY]}
    assert one(row).prompt[0].content == "Why?"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, TELL], "images": ["a.jpg"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, TELL]},
        pair(audios=["a.wav"]),
    ],
)
def test_images_and_sound_are_refused(one: Any, row: Row) -> None:
    assert one(row) == "multimodal"


def test_a_question_about_an_image_tag_is_text(one: Any) -> None:
    assert isinstance(one(pair("How do I use the <image> element?")), Preference)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [ASK, {"from": "function_call", "value": "{}"}, TELL]},
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"messages": [ASK, TELL], "tools": '[{"name": "f"}]'},
    ],
)
def test_tools_are_refused(one: Any, row: Row) -> None:
    assert one(row) == "tool_call"


def test_an_empty_list_of_tools_is_no_tool(one: Any) -> None:
    assert isinstance(one({"messages": [ASK, TELL], "tools": "[]"}), Demonstration)


# Alpaca, question and answer


def test_alpaca(one: Any) -> None:
    assert one({"instruction": "Add.", "input": "2 3", "output": "5"}).prompt[0].content == "Add.\n2 3"
    found = one({"instruction": "So?", "input": "", "output": "Yes.", "history": [["Hi.", "Hello."]]})
    assert _turns(found) == [("user", "Hi."), ("assistant", "Hello."), ("user", "So?")]
    assert isinstance(one({"instruction": "Add.", "input": "2", "chosen": "2", "rejected": "3"}), Preference)


def test_seed_tasks_give_one_demonstration_an_instance(tmp_path: Path) -> None:
    instances = [{"input": "2", "output": "4"}, {"input": "3", "output": "9"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "Square.", "instances": instances}])
    assert [item.answer for item in records(read(path))] == ["4", "9"]


def test_gsm8k_keeps_its_final_answer(one: Any) -> None:
    row = {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    assert one(row).reference == "5"
    assert one(row, "prompts").reference == "5"


@pytest.mark.parametrize("value", [True, 3, {"a": 1}, [1]])
def test_values_that_are_no_text_are_refused_or_coerced(one: Any, value: Any) -> None:  # F17
    row = {"instruction": "Is 7 prime?", "output": value}
    assert one(row) == "not_text"
    assert one(row, coerce=True).answer in ("true", "3", '{"a": 1}', "[1]")


def test_a_null_answer_is_missing_not_coerced(one: Any) -> None:
    assert one({"prompt": "Why?", "chosen": None, "rejected": "No."}, coerce=True) != "None"


# Prompts


def test_prompt_files(one: Any) -> None:
    assert one({"prompt": "Why?", "slice": "advice"}, "eval_prompts").slice == "advice"
    assert one({"Behavior": "Why?"}, "eval_prompts").prompt[0].content == "Why?"
    turns = one({"turns": ["First?", "Second?"], "category": "writing"}, "eval_prompts")
    assert (_turns(turns), turns.slice) == ([("user", "First?")], "writing")
    assert turns.extra == {"turns": ["First?", "Second?"]}


def test_prompts_are_taken_from_rows_with_answers(one: Any) -> None:
    for row in (
        pair("Why?"),
        {"question": "Why?", "answer": "So."},
        {"messages": [ASK, TELL], "label": True},
    ):
        found = one(row, "prompts")
        assert isinstance(found, Prompt) and _turns(found) == [("user", "Why?")]


def test_a_conversation_as_prompt_must_end_with_the_user(one: Any) -> None:  # F04
    assert _turns(one({"messages": [ASK, TELL, ASK]}, "prompts"))[-1] == ("user", "Why?")
    assert one({"messages": [ASK, TELL]}, "prompts") == "last_turn"


# Ranked trees


def _node(text: str, role: str, rank: int | None = None, *replies: Row, **more: Any) -> Row:
    return {"text": text, "role": role, "rank": rank, "replies": list(replies), **more}


def _tree_pairs(tmp_path: Path, root: Row) -> tuple[list[tuple[str, str]], list[str]]:
    path = write_jsonl(tmp_path / "tree.jsonl", [{"message_tree_id": "1", "prompt": root}])
    items = read(path)
    return [(r.chosen, r.rejected) for r in records(items)], [reason for _, reason in refusals(items)]


def test_ranked_siblings_make_pairs_best_first(tmp_path: Path) -> None:
    answers = [_node(text, "assistant", rank) for text, rank in (("c", 2), ("a", 0), ("b", 1))]
    found, refused = _tree_pairs(tmp_path, _node("Why?", "prompter", None, *answers))
    assert found == [("a", "b"), ("a", "c"), ("b", "c")] and not refused


def test_deep_pairs_carry_their_history_and_leaves_of_prompters_give_none(tmp_path: Path) -> None:
    deep = [_node("yes", "assistant", 0), _node("no", "assistant", 1, _node("Hm?", "prompter"))]
    root = _node(
        "Why?", "prompter", None, _node("So.", "assistant", None, _node("Sure?", "prompter", None, *deep))
    )
    path = write_jsonl(tmp_path / "tree.jsonl", [root])
    (found,) = records(read(path))
    assert _turns(found) == [("user", "Why?"), ("assistant", "So."), ("user", "Sure?")]


def test_what_a_tree_can_not_compare_is_counted(tmp_path: Path) -> None:
    answers = [
        _node("a", "assistant", 0),
        _node("b", "assistant", 0),
        _node("c", "assistant", None),
        _node("d", "assistant", 1, deleted=True),
    ]
    found, refused = _tree_pairs(tmp_path, _node("Why?", "prompter", None, *answers))
    assert found == [] and sorted(refused) == ["no_ranking", "no_ranking", "tie"]
    assert _tree_pairs(tmp_path, _node("Why?", "prompter", None, answers[0])) == ([], ["no_ranking"])


# Label Studio


def _annotation(by: Any, selected: Any = "left", **more: Any) -> Row:
    result = [
        {"type": "pairwise", "from_name": "pw", "to_name": "answer1,answer2", "value": {"selected": selected}}
    ]
    return {"completed_by": by, "was_cancelled": False, "result": result, **more}


def _task(*annotations: Row, **data: Any) -> Row:
    answers = {"prompt": "Why?", "answer1": "Because.", "answer2": "No idea."}
    return {"id": 1, "data": {**answers, **data}, "annotations": list(annotations)}


def test_all_annotators_of_a_task_are_kept(tmp_path: Path) -> None:  # F24
    person = {"id": 7, "email": "someone@example.com"}
    task = _task(
        _annotation(3),
        _annotation(person, "right"),
        _annotation(4, was_cancelled=True),
        _annotation(5, result=[]),
        _annotation(6, "tie"),
    )
    items = read(write_jsonl(tmp_path / "export.jsonl", [task]))
    found = [(item.annotator, item.chosen) for item in records(items)]
    assert found == [("3", "Because."), ("7", "No idea.")]
    assert [reason for _, reason in refusals(items)] == ["cancelled", "empty_annotation", "tie"]
    assert "example.com" not in repr(items)


def test_label_studio_faults_are_named(one: Any) -> None:
    assert one(_task()) == "no_annotation"
    assert one(_task(_annotation(1, "middle"))) == "bad_value"
    assert one(_task(_annotation(1, result=[{"type": "choices"}]))) == "unsupported"
    assert one({"id": 1, "data": {"prompt": "Why?"}, "annotations": [_annotation(1)]}) == "missing"
    assert one(_task(_annotation(1), prompt="")) == "missing"


def test_label_studio_follows_the_names_of_the_control(one: Any) -> None:
    annotation = _annotation(1, "right")
    annotation["result"][0] |= {"from_name": "safety", "to_name": ["reply_x", "reply_y"]}
    task = {"data": {"question": "Why?", "reply_x": "X", "reply_y": "Y", "answer1": "1", "answer2": "2"}}
    found = one({**task, "annotations": [annotation]})
    assert (found.chosen, found.rejected, found.dimension) == ("Y", "X", "safety")


# Formats by name, columns, keys


def test_a_named_format_refuses_other_shapes(one: Any) -> None:
    assert one(pair(), format="hh") == "wrong_format"
    assert isinstance(one(pair(), format="preference"), Preference)
    assert isinstance(one(pair(), format="prompts"), Prompt)


def test_columns_rename(one: Any) -> None:
    row = {"Q": "Why?", "good": "Because.", "bad": "No idea."}
    assert one(row) == "unknown_shape"
    assert "data.columns" in REASONS["unknown_shape"]
    found = one(row, columns={"prompt": "Q", "chosen": "good", "rejected": "bad"})
    assert found.id == one({"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}).id


def test_unknown_keys_are_kept_or_refused(one: Any) -> None:
    assert one(pair(mood="fine", empty=None, none=[])).extra == {"mood": "fine"}
    assert one(pair(mood="fine"), unknown_keys="reject") == "unknown_key"
    assert isinstance(one(pair(style="concise"), unknown_keys="reject"), Preference)
