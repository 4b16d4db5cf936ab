"""The canonical records that every later stage reads, and their bytes.

Each record knows its prompt as messages, its `group` (records of one group are never parted between splits),
an `id` made from its content, and its `source` (file and line), so that a model can be followed back to the
rows that taught it and a row forward to the models that it touched. The bytes are canonical: keys in order,
no spaces, UTF-8, one record a line, and the three line separators that some readers split at are escaped.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from data.errors import DataError

Role = Literal["system", "user", "assistant"]

# U+0085, U+2028 and U+2029 are legal in JSON strings, but str.splitlines() cuts there.
_LINE_SEPARATORS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\u0085\u2028\u2029"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Message(_Frozen):
    """One turn of a conversation."""

    role: Role
    content: str


class _Record(_Frozen):
    prompt: tuple[Message, ...] = Field(strict=False)
    """An optional system message, then user and assistant turns in alternation, the last one the user's."""
    id: str
    """First 16 hexadecimal digits of the SHA-256 of the record's content."""
    group: str
    """Key of the prompt group; splits keep a group together."""
    source: str = ""
    """FILE:LINE of the row, relative to the project."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Keys of the row that no field holds."""


class Prompt(_Record):
    """A prompt without an answer: for rollouts and for evaluation."""

    slice: str = "all"
    """Part of the evaluation that is reported apart."""
    reference: str | None = None
    """Checkable final answer, when the row has one (for verifiable rewards)."""


class Demonstration(_Record):
    """A prompt and an answer worth imitating."""

    answer: str
    reference: str | None = None


class Preference(_Record):
    """A prompt and two answers, one preferred by an annotator."""

    chosen: str
    rejected: str
    annotator: str | None = None
    style: str | None = None
    dimension: str | None = None
    """What the preference is about: quality, factuality or safety."""
    error_type: str | None = None
    """The fault of the rejected answer."""
    topic: str | None = None
    weight: float = 1.0
    """Positive factor of the pair in a loss."""
    votes: tuple[int, int] | None = Field(default=None, strict=False)
    """Judgements for and against this order, when the row stands for several."""
    disputed: bool = False
    """The row says so, or another row of the data set prefers the other answer."""
    agreement: float | None = None
    """Share of all judgements of these two answers that agree with this row; None when there is only one."""


class Feedback(_Record):
    """A prompt and one answer with a thumb up (True) or down (False)."""

    answer: str
    label: bool
    annotator: str | None = None


class StepLabels(_Record):
    """A prompt and an answer in steps, each found right (True), wrong (False) or not judged (None)."""

    steps: tuple[str, ...] = Field(strict=False, min_length=1)
    labels: tuple[bool | None, ...] = Field(strict=False, min_length=1)
    """One a step; at least one is no None."""
    annotator: str | None = None


class Judgement(_Record):
    """A verdict on two answers, by a person or a judge, whose identity was hidden from it."""

    left: str
    right: str
    verdict: Literal["left", "right", "tie"]
    annotator: str | None = None
    dimension: str | None = None


AnyRecord = TypeVar("AnyRecord", bound=_Record)


def canonical_json(value: JsonValue) -> str:
    """The one text of a JSON value; equal values give equal bytes."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.translate(_LINE_SEPARATORS)


def to_line(record: _Record) -> str:
    """Canonical JSON of a record without the fields that hold their default, ended by LF."""
    return canonical_json(record.model_dump(mode="json", exclude_defaults=True)) + "\n"


def read_records(path: Path, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
    """Records of a file written by the validate stage, one at a time."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield kind.model_validate_json(line)
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: not a {kind.__name__} record ({error}); run the validate stage again"
                ) from error


def digest(*parts: str) -> str:
    """First 16 hexadecimal digits of the SHA-256 of `parts`, kept apart by lengths."""
    whole = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8")
        whole.update(len(encoded).to_bytes(8, "big"))
        whole.update(encoded)
    return whole.hexdigest()[:16]


def prompt_text(prompt: Sequence[Message]) -> str:
    """Canonical text of the messages: equal only for equal conversations."""
    return canonical_json([[message.role, message.content] for message in prompt])


def normalise_prompt(text: str) -> str:
    """`text` without what does not make it another question: case, width, punctuation, symbols and spaces.

    A text of nothing but punctuation keeps its marks, so that "?" and "!!" do not become one prompt.
    Arithmetic signs stay, because "2 + 3" and "2 * 3" are different questions.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(
        character if unicodedata.category(character)[0] in "LNM" or character in "+-*/=<>^%" else " "
        for character in folded
    )
    return " ".join(kept.split()) or " ".join(folded.split())


def group_key(prompt: Sequence[Message], by: Literal["opening", "prompt"] = "opening") -> str:
    """Key of the prompt group, on normalised text.

    `opening`: the first user turn. Conversations that grew from one question share their history, and an
    answer judged in one is context in the other, so they stay together. `prompt`: all turns but the system's.
    """
    turns = [message for message in prompt if message.role != "system"]
    if by == "opening":
        turns = [message for message in turns if message.role == "user"][:1]
    return digest(*(f"{message.role}:{normalise_prompt(message.content)}" for message in turns))
