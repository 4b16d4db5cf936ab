"""Rewards that can be checked: GSM8K's final number, reasoning-gym's own checks, IFEval's instructions.

Each is named by its dotted path in `optimize.rewards.scorers` (kind: function), as
`training.verify:gsm8k`, `training.verify:ifeval`, `training.verify:ifeval_strict` or
`training.verify:ReasoningGym`, and is called as

    check(prompt, answer, reference, extra) -> number from 0 to 1, or None

prompt: turns as {"role", "content"}; reference and extra: those of the Prompt record, extra holding what no
field holds. None says that the row gives nothing to check against, so the answer is masked, not punished. An
empty answer scores 0: it would pass every check of the kind "no more than" or "without". No check of this
file reads the network, and torch is not loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

Turns = Sequence[Mapping[str, str]]
Check = Callable[..., bool]


# -- GSM8K ---------------------------------------------------------------------------------------------------

_SIGN = r"(?:[-+]\s?)?"
_COIN = "[$\u20ac\u00a3]?\\s?"
_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_RAISED = r"(?:[eE][-+]?\d{1,2}(?!\d)|(?:\s?(?:\\times|\\cdot|[x\u00d7*])\s?10)?\^\{?[-+]?\d{1,2}(?!\d)\}?)"
_NUMBER = rf"{_SIGN}{_COIN}{_SIGN}(?:\d{{1,4}}\s+\d+/\d+|{_PLAIN}{_RAISED}?(?:\s?/\s?[-+]?{_PLAIN})?)"
_FOUND = re.compile(rf"(?<![\w.,/^])(?=[-+$\u20ac\u00a3.\d]){_NUMBER}")
_STATED = (
    re.compile(rf"####\s*({_NUMBER})"),
    re.compile(rf"\\boxed\{{\s*(?:[A-Za-z]\s*=\s*)?({_NUMBER})"),
    re.compile(rf"(?:^|\n)\s*A:\s*({_NUMBER})"),
    re.compile(rf"\banswer(?: is|:)[\s*:=]*({_NUMBER})", re.IGNORECASE),
)
_WRITTEN = re.compile(
    rf"(?P<sign>[-+$\u20ac\u00a3\s]*)(?:(?P<whole>\d+)\s+(?=\d+/))?(?P<top>{_PLAIN})(?P<raised>{_RAISED})?"
    rf"(?:\s*/\s*(?P<bottom>[-+]?{_PLAIN}))?\s*%?\.?"
)
_TYPESET = (
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<=\d)\s*\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"(?<=\d)\s*\\[dtc]?frac\s*(\d)\s*(\d)"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
)
_SPACING = re.compile(r"\\(?:left|right)\b|\\[,!()\[\]]|\\(?=[$%])|\{(?=,\})|(?<=\{,)\}")
_DEEP = 4
"""Braces in braces that are taken apart: \\boxed{\\mathbf{\\frac{1}{2}}} has three."""


def _untypeset(text: str) -> str:
    """LaTeX's way to write numbers as plain text: \\frac{1}{2} is 1/2, 2\\frac{1}{2} is 2 1/2, 1{,}000 is
    1,000, \\text{} what stands in it; the minus sign of typesetting is the one of keyboards."""
    text = _SPACING.sub("", text.replace("\u2212", "-").replace("{,}", ","))
    for _ in range(_DEEP):
        before = text
        for pattern, plain in _TYPESET:
            text = pattern.sub(plain, text)
        if text == before:
            break
    return text


def number(text: str) -> Fraction | None:
    """Exact value of one number as people write it: $1,234.50, -3, 3/4, 2 1/2, 1e3, 10^3, \\frac{3}{4}; None
    when it is none. A per cent sign is a unit like any other: 50% is 50."""
    found = _WRITTEN.fullmatch(_untypeset(text).strip())
    if found is None:
        return None
    try:
        value = _raised(_value(found["top"]), found["raised"] or "")
        if found["bottom"]:
            value /= _value(found["bottom"])
        value += int(found["whole"] or 0)
    except (ValueError, ZeroDivisionError):  # over Python's limit of digits; over nothing
        return None
    return -value if found["sign"].count("-") % 2 else value


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _raised(value: Fraction, how: str) -> Fraction:
    """value e3, value^3, or value * 10^3; exponents have two digits, so nothing grows beyond measure."""
    if not how:
        return value
    exponent = int(how.lstrip("eE") if how[0] in "eE" else how.partition("^")[2].strip("{}"))
    ten = how[0] != "^"
    return value * Fraction(10) ** exponent if ten else Fraction(value**exponent)


def final_number(text: str) -> Fraction | None:
    """The number that an answer ends on: after ####, in \\boxed{}, after "A:" or "answer is", else its last.

    A stated one counts before any later number, and the last statement of a kind before an earlier one. What
    follows a number (a unit, a full stop) does not matter.
    """
    text = _untypeset(text)
    for pattern in _STATED:
        stated = [value for match in pattern.finditer(text) if (value := number(match[1])) is not None]
        if stated:
            return stated[-1]
    found = [value for match in _FOUND.finditer(text) if (value := number(match[0])) is not None]
    return found[-1] if found else None


def gsm8k(prompt: Turns, answer: str, reference: str | None, extra: Mapping[str, Any]) -> float | None:
    """1 when the final numbers of answer and reference are equal as fractions, else 0 [2110.14168].

    reference: the number alone or a worked solution that ends on "#### N"; extra.answer stands in for it.
    """
    wanted = final_number(reference or str(extra.get("answer", "")))
    return None if wanted is None else float(final_number(answer) == wanted)


# -- reasoning-gym -------------------------------------------------------------------------------------------


class ReasoningGym:
    """The check of the reasoning-gym data set that made the row; it may give credit in part [2505.24760].

    extra.metadata names the data set (source_dataset) and holds what its check reads; reference is the oracle
    answer. What stands in the last <answer> tag counts, without a tag the whole answer. Some checks read more
    than JSON can keep (tuples, numbers as keys): a row whose own oracle does not pass gives None. It is a
    class because the library takes seconds to load, which is done before the clock of a call runs.
    """

    def __init__(self) -> None:
        import reasoning_gym
        from reasoning_gym.utils import extract_answer

        self._extract = extract_answer
        self._check = cache(reasoning_gym.get_score_answer_fn)
        self._sound = lru_cache(maxsize=1024)(self._oracle_passes)

    def __call__(
        self, prompt: Turns, answer: str, reference: str | None, extra: Mapping[str, Any]
    ) -> float | None:
        metadata = extra.get("metadata")
        if not isinstance(metadata, dict) or "source_dataset" not in metadata or reference is None:
            return None
        entry = {"question": prompt[-1]["content"], "answer": reference, "metadata": metadata}
        if not self._sound(json.dumps(entry, sort_keys=True)):
            return None
        said = self._extract(answer)
        return self._score(answer.strip() if said is None else said, entry)

    def _score(self, answer: str, entry: dict[str, Any]) -> float:
        return float(self._check(entry["metadata"]["source_dataset"])(answer, entry))

    def _oracle_passes(self, entry: str) -> bool:
        whole = json.loads(entry)
        return self._score(whole["answer"], whole) >= 0.999


# -- IFEval --------------------------------------------------------------------------------------------------
# The checks decide as the paper's program does [2311.07911], oddities included. Left out are those that need
# a language detector or a trained sentence or word splitter: response_language, english_capital,
# english_lowercase, number_sentences, capital_word_frequency.


def _related(count: int, relation: str, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def existence(text: str, *, keywords: Sequence[str]) -> bool:
    """All keywords occur, in any case."""
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of these occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs at least, or less than, so often."""
    return _related(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The character occurs at least, or less than, so often, in any case."""
    return _related(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """Runs of word characters."""
    return _related(len(re.findall(r"\w+", text)), relation, num_words)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs parted by ***; an empty one is allowed at the ends only."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1 if not parts[0] else 0 : -1 if len(parts) > 1 and not parts[-1] else None]
    return all(inner) and len(inner) == num_paragraphs


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs parted by blank lines, and the first word of one of them."""
    parts = re.split(r"\n\n", text)
    count = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"').lower()
    return count == num_paragraphs and re.split(r"[.,?!'\"]", word)[0] == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least so many [placeholders]."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """A postscript that opens with the marker."""
    known = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = known.get(postscript_marker, rf"\s*{re.escape(postscript_marker.lower())}.*$")
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Exactly so many lines that open with * or -."""
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    """One of three fixed sentences occurs."""
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """At least so many *parts* or **parts**."""
    single = [part for part in re.findall(r"\*[^\n\*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", text) if part[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many "Section 1", "Section 2" and so on."""
    return len(re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) - 1 >= num_sections


def json_format(text: str) -> bool:
    """JSON as a whole, in a code fence or not."""
    plain = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        plain = plain.removeprefix(fence)
    try:
        json.loads(plain.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def title(text: str) -> bool:
    """A <<title>>."""
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """The request comes first, word for word, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def two_responses(text: str) -> bool:
    """Two different responses, parted by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    said = [part for part in parts if part]
    return all(parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def no_comma(text: str) -> bool:
    """No comma at all."""
    return "," not in text


def end_checker(text: str, *, end_phrase: str) -> bool:
    """The phrase ends it, in any case, a closing quotation mark aside."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """The whole stands in double quotation marks."""
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


IFEVAL_CHECKS: dict[str, Check] = {
    "keywords:existence": existence,
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": frequency,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:number_words": number_words,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:repeat_prompt": repeat_prompt,
    "combination:two_responses": two_responses,
    "punctuation:no_comma": no_comma,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
}


def followed(answer: str, extra: Mapping[str, Any]) -> list[bool | None]:
    """For each instruction of the row whether it was followed; None where it can't be checked here."""
    said = bool(answer.strip())
    verdicts: list[bool | None] = []
    names, given_each = extra.get("instruction_id_list", ()), extra.get("kwargs", ())
    for name, settings in zip(names, given_each, strict=True):
        check = IFEVAL_CHECKS.get(name)
        given = {key: value for key, value in settings.items() if value is not None}
        verdicts.append(None if check is None else said and bool(check(answer, **given)))
    return verdicts


def ifeval(prompt: Turns, answer: str, reference: str | None, extra: Mapping[str, Any]) -> float | None:
    """Share of the instructions followed, among those that can be checked [2311.07911, strict accuracy]."""
    known = [verdict for verdict in followed(answer, extra) if verdict is not None]
    return sum(known) / len(known) if known else None


def ifeval_strict(
    prompt: Turns, answer: str, reference: str | None, extra: Mapping[str, Any]
) -> float | None:
    """1 when all instructions were followed, 0 when one was not, None when one can't be checked, or where the
    row has none."""
    verdicts = followed(answer, extra)
    if not verdicts:
        return None
    return 0.0 if False in verdicts else None if None in verdicts else 1.0
