from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from training import verify
from training.verify import IFEVAL_CHECKS, ReasoningGym, final_number, followed, gsm8k, ifeval, ifeval_strict


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18), ("$1,234.50", Fraction(2469, 2)), ("- 3", -3), ("3/4", Fraction(3, 4)),
        (".5", Fraction(1, 2)), ("\u20ac5", 5), ("1/0", None), ("", None), ("seven", None), ("+7", 7),
        (r"\frac{1}{2}", Fraction(1, 2)), (r"\dfrac{1}{2}", Fraction(1, 2)), (r"\frac12", Fraction(1, 2)),
        (r"-\tfrac{3}{4}", Fraction(-3, 4)), (r"\frac{-3}{4}", Fraction(-3, 4)), ("3/-4", Fraction(-3, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)), ("2 1/2", Fraction(5, 2)), ("-2 1/2", Fraction(-5, 2)),
        ("0.50", Fraction(1, 2)), ("1e3", 1000), ("1.5E+3", 1500), ("1E-2", Fraction(1, 100)), ("5.", 5),
        ("10^3", 1000), ("2^{10}", 1024), (r"1.5 \times 10^{3}", 1500), ("2 \u00d7 10^-1", Fraction(1, 5)),
        ("1,000", 1000), ("1{,}000", 1000), (r"1\,000", 1000), ("1,0000", None), ("3,5", None),
        ("1 000", None), ("50%", 50), (r"12.5\%", Fraction(25, 2)), (r"\$18", 18), ("-$3", -3), ("$-3", -3),
        ("\u22123", -3), ("\u20131", None), ("inf", None), ("nan", None), ("1_000", None),
        ("0^{-1}", None), ("9" * 5000, None), ("1e999999999", None), ("9^999999999", None),
    ],
)  # fmt: skip
def test_a_number_is_read_exactly(text: str, value: Fraction | int | None) -> None:
    assert verify.number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6 - 2 = <<6-2=4>>4 eggs\n#### 4", 4),
        ("#### 1,080", 1080),
        ("#### -12\n", -12),
        ("First 3, then 5, so it is 8.", 8),
        ("The answer is **42**, not 41.", 42),
        ("The answer is 41. No: the answer is 42. See page 7.", 42),
        (r"so \boxed{17} of 20", 17),
        (r"\boxed{\$18}", 18),
        ("A: 26", 26),
        ("She pays $3.50.", Fraction(7, 2)),
        ("from 10-4", 4),
        ("it costs 5% more", 5),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"so \boxed{-\dfrac{3}{4}}, not 7.", Fraction(-3, 4)),
        (r"\boxed{\mathbf{\frac{1}{2}}} of 9", Fraction(1, 2)),
        (r"\boxed{2\frac{1}{2}}", Fraction(5, 2)),
        (r"\boxed{\text{18 dollars}} of 20", 18),
        (r"\boxed{12\text{ cm}} of 20", 12),
        (r"\boxed{x = 5}, and 6", 5),
        (r"\boxed{50\%} of 9", 50),
        (r"\boxed{1{,}000}", 1000),
        (r"\boxed{3} and then \boxed{4}", 4),
        ("#### 1e3", 1000),
        ("#### 5%", 5),
        ("#### 18.", 18),
        ("The answer is 12 apples in 3 bags.", 12),
        ("The answer is 2 1/2 cups.", Fraction(5, 2)),
        ("The answer is \u22123 degrees.", -3),
        (r"The answer is \(42\), see 7.", 42),
        (r"The answer is $\frac{3}{4}$ of 8.", Fraction(3, 4)),
        ("She earns $18/hour.", 18),
        ("1,000,000 people", 1000000),
        ("2^10 = 1024", 1024),
        ("5-3 = 2", 2),
        ("nothing to count", None),
        ("", None),
    ],
)
def test_the_final_number_is_the_stated_one_else_the_last(text: str, value: Fraction | int | None) -> None:
    assert final_number(text) == value


def test_gsm8k_is_right_wrong_or_not_to_be_judged() -> None:
    assert gsm8k([], "It is 72.0", "Natalia sold 48+24 = <<48+24=72>>72\n#### 72", {}) == 1.0
    assert gsm8k([], "It is 71", "72", {}) == 0.0 and gsm8k([], "", "72", {}) == 0.0
    assert gsm8k([], "It is 72", None, {"answer": "#### 72"}) == 1.0
    assert gsm8k([], "It is 72", None, {}) is None and gsm8k([], "It is 72", "many", {}) is None


def test_numbers_are_equal_however_they_are_written() -> None:
    for said in ("1/2", "0.5", ".50", r"\boxed{\frac{1}{2}}", r"\dfrac{1}{2}", "The answer is $0.50."):
        assert gsm8k([], said, r"\frac{1}{2}", {}) == 1.0 == gsm8k([], said, "#### 0.5", {})
    assert gsm8k([], "50%", "#### 50", {}) == 1.0 and gsm8k([], "50%", "#### 0.5", {}) == 0.0


def test_a_row_without_instructions_gives_nothing_to_check() -> None:
    for extra in ({}, {"instruction_id_list": [], "kwargs": []}):
        assert ifeval([], "Yes.", None, extra) is None and ifeval_strict([], "Yes.", None, extra) is None


def test_gsm8k_agrees_with_its_own_labels(shared_data: Path) -> None:
    labelled = right = 0
    for line in (shared_data / "gsm8k" / "example_model_solutions.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        for said in (value for value in row.values() if isinstance(value, dict)):
            labelled += 1
            right += gsm8k([], said["solution"], row["ground_truth"], {}) == float(said["is_correct"])
    assert (right, labelled) == (5276, 5276)
    for line in (shared_data / "gsm8k" / "test.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        assert gsm8k([], row["answer"], row["answer"].rpartition("####")[2], {}) == 1.0


# For each check: settings, a text that follows, one that does not. The two differ in what the check is about.
CASES: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "keywords:existence": [({"keywords": ["mom", "c++"]}, "C++ for Mom", "C for Mom")],
    "keywords:forbidden_words": [({"forbidden_words": ["rock", "war"]}, "rocks, award", "a Rock")],
    "keywords:frequency": [
        ({"keyword": "war", "frequency": 2, "relation": "at least"}, "War and warm", "war and peace"),
        ({"keyword": "war", "frequency": 2, "relation": "less than"}, "war and peace", "War and war"),
    ],
    "keywords:letter_frequency": [
        ({"letter": "!", "let_frequency": 2, "let_relation": "at least"}, "a! b!", "a! b"),
        ({"letter": "T", "let_frequency": 2, "let_relation": "less than"}, "at", "tT"),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, "one two-three", "one two"),
        ({"num_words": 3, "relation": "less than"}, "one two", "it's two"),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "a\n***\nb\n***", "a\n\nb"),
        ({"num_paragraphs": 2}, "***\na\n***\nb", "a\n***\n***\nb"),
        ({"num_paragraphs": 1}, "a", "***"),
    ],
    "length_constraints:nth_paragraph_first_word": [
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"}, "a\n\n'well, b", "a\n\nbut well"),
        ({"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a"}, "A.\n\nb", "a\n\nb\n\nc"),
        ({"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"}, "b", "b"),
    ],
    "detectable_content:number_placeholders": [({"num_placeholders": 2}, "[a] and [b c]", "[a] and (b)")],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "bye\nP. S. more", "bye\nPS more"),
        ({"postscript_marker": "P.P.S"}, "P.S. a\nP.P.S b", "P.S. a"),
        ({"postscript_marker": "N.B."}, "n.b. x", "nxb. x"),
    ],
    "detectable_format:number_bullet_lists": [({"num_bullets": 2}, "* a\n - b", "* a\n- b\n- c")],
    "detectable_format:constrained_response": [({}, "Well. My answer is maybe.", "My answer is perhaps.")],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
        ({"num_highlights": 1}, "**a**", "** **"),
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Section", "num_sections": 2},
            "Section 1\na\nSection 2\nb",
            "Section 1 a section 2",
        ),
    ],
    "detectable_format:json_format": [({}, '```json\n{"a": 1}\n```', "{'a': 1}")],
    "detectable_format:title": [({}, "<<Night>>\nx", "<< >>\nx")],
    "combination:repeat_prompt": [({"prompt_to_repeat": "Say it."}, " say it. It.", "It. Say it.")],
    "combination:two_responses": [({}, "a******b", "a******a"), ({}, "a******b******", "a************b")],
    "punctuation:no_comma": [({}, "a; b", "a, b")],
    "startend:end_checker": [({"end_phrase": "Any more?"}, 'So. any more?" ', "Any more? No.")],
    "startend:quotation": [({}, ' "a" ', '"a')],
}


def test_each_instruction_has_cases() -> None:
    assert set(CASES) == set(IFEVAL_CHECKS)


@pytest.mark.parametrize(
    ("name", "settings", "good", "bad"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_an_instruction_is_followed_or_not(name: str, settings: dict[str, Any], good: str, bad: str) -> None:
    if good != bad:
        assert IFEVAL_CHECKS[name](good, **settings)
    assert not IFEVAL_CHECKS[name](bad, **settings)


def test_a_quotation_mark_alone_is_no_quotation() -> None:
    assert not verify.quotation('"')


def test_shares_and_strictness() -> None:
    known = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, {"num_words": None}],
    }
    assert ifeval([], '"a"', None, known) == 1.0 and ifeval_strict([], '"a"', None, known) == 1.0
    assert ifeval([], "a", None, known) == 0.5 and ifeval_strict([], "a", None, known) == 0.0
    assert ifeval([], "  ", None, known) == 0.0, "an empty answer follows nothing"
    partly = {
        "instruction_id_list": ["punctuation:no_comma", "language:response_language"],
        "kwargs": [{}, {"language": "de"}],
    }
    assert followed("a", partly) == [True, None]
    assert ifeval([], "a", None, partly) == 1.0 and ifeval_strict([], "a", None, partly) is None
    assert ifeval_strict([], "a, b", None, partly) == 0.0, "one broken instruction is enough"
    unknown = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
    assert ifeval([], "a", None, unknown) is None


def test_the_public_rows_can_be_checked(shared_data: Path) -> None:
    checked = total = 0
    for line in (shared_data / "ifeval" / "input_data.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        verdicts = followed("Some words. My answer is yes.", row)
        total += len(verdicts)
        checked += sum(verdict is not None for verdict in verdicts)
    assert (checked, total) == (662, 834)


@pytest.mark.slow
def test_reasoning_gym_judges_its_own_answers() -> None:
    import reasoning_gym

    check = ReasoningGym()
    for name in ("basic_arithmetic", "chain_sum", "countdown", "leg_counting", "word_sorting"):
        entry = json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=3)[0]))
        prompt = [{"role": "user", "content": entry["question"]}]
        extra = {"metadata": entry["metadata"]}
        assert check(prompt, f"I think <answer>{entry['answer']}</answer>", entry["answer"], extra) == 1.0, (
            name
        )
        wrong = check(prompt, "<answer>no idea</answer>", entry["answer"], extra)
        assert wrong is not None and wrong < 0.2, name
    assert check([], "4", None, {}) is None and check([], "4", "4", {}) is None
    board = json.loads(json.dumps(reasoning_gym.create_dataset("graph_color", size=1, seed=3)[0]))
    turns = [{"role": "user", "content": board["question"]}]
    assert check(turns, "x", str(board["answer"]), {"metadata": board["metadata"]}) is None, (
        "JSON lost what it needs"
    )
