"""Verdicts on single rows: a draft becomes a canonical record, or a fault with a reason.

A reader turns a row into drafts: the kind of record, unchecked messages, answers. `judge_draft` applies the
rules. Everything that is not kept carries a reason code of REASONS: rows in = rows kept + rows refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pydantic import JsonValue

from data.config import DataParams
from data.records import (
    Demonstration,
    Feedback,
    Message,
    Preference,
    Prompt,
    Role,
    StepLabels,
    canonical_json,
    digest,
    group_key,
    prompt_text,
)

Record = Preference | Demonstration | Feedback | StepLabels | Prompt
Kind = Literal["preference", "demonstration", "feedback", "steplabels", "prompt"]

REASONS: dict[str, str] = {
    # The bytes
    "oversize": "the row is longer than data.max_row_bytes",
    "encoding": "the text is not valid UTF-8, or holds half of a surrogate pair",
    "bad_json": "the row is not valid JSON",
    "bad_row": "the row does not have the columns of its header",
    "not_object": "the row is not an object with named fields",
    # The shape
    "unknown_shape": "no known format has these keys; data.columns says which of them are meant",
    "wrong_format": "the row has another format than data.format",
    "unknown_key": "the row has a key that no field holds, and data.unknown_keys is reject",
    "missing": "a field that is needed is absent, null or empty",
    "not_text": "a field holds another type where text is due",
    "not_label": "a label is neither true nor false",
    "bad_value": "a number, a vote or a flag is out of its bounds",
    "multimodal": "the row has images, sound or video; only text is supported",
    "tool_call": "the row defines or calls tools; only plain turns are supported",
    "unsupported": "the row has a known shape that no stage can use",
    # The conversation
    "unknown_role": "a role is none of system, user and assistant",
    "role_order": "the turns do not alternate between user and assistant, beginning with the user",
    "last_turn": "the conversation ends with the wrong speaker",
    "empty_turn": "a turn of the prompt is empty",
    "empty_answer": "an answer is empty",
    "system_role": "the prompt has a system message and data.system_role is reject",
    "prompt_mismatch": "the two sides do not share one prompt",
    "identical": "chosen and rejected are the same",
    "too_long": "prompt and answer together are longer than data.max_chars",
    # Not faults: rows that say nothing, or nothing new
    "duplicate": "the same row was read before",
    "tie": "the annotator had no preference",
    "cancelled": "the annotation was skipped or cancelled",
    "empty_annotation": "the annotation has no result",
    "no_annotation": "the task has no annotation",
    "no_ranking": "the tree has no ranked answers to compare",
    "no_prompt": "the row has no prompt of its own to use",
    "overlap": "the prompt's group belongs to a part that this record must not meet",
}

EXCLUSIONS = frozenset(
    {
        "duplicate",
        "tie",
        "cancelled",
        "empty_annotation",
        "no_annotation",
        "no_ranking",
        "no_prompt",
        "overlap",
    }
)
"""Reasons that count as refused, but not as faulty, in data.max_quarantine_share."""

_SHOWN = 200


class Fault(ValueError):
    """Why a row, or one item of a row, is not kept. A reader adds file and line."""

    def __init__(self, reason: str, field_name: str, message: str, value: object = None) -> None:
        super().__init__(message)
        assert reason in REASONS, reason
        self.reason = reason
        self.field = field_name
        self.message = message
        self.value = shown(value)


@dataclass(frozen=True)
class Refusal:
    """A fault with its place: one line of quarantine.jsonl."""

    file: str
    line: int
    field: str
    reason: str
    message: str
    value: str = ""

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "file": self.file,
            "line": self.line,
            "field": self.field,
            "reason": self.reason,
            "message": self.message,
            "value": self.value,
        }

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.message} [{self.reason}]"


@dataclass
class Draft:
    """What a reader understood of a row, before the rules."""

    kind: Kind
    prompt: list[tuple[str, str]]
    """(role, content) in our names of roles; unknown roles as they came."""
    answers: tuple[str, ...] = ()
    """(chosen, rejected), (answer,), all steps of one answer, or ()."""
    label: bool | None = None
    meta: dict[str, JsonValue] = field(default_factory=dict)
    """Further fields of the record by name, unchecked."""
    extra: dict[str, JsonValue] = field(default_factory=dict)
    implied: bool = False
    """The prompt is what both answers begin with: the row had none."""


def shown(value: object) -> str:
    """A short, encodable rendering of a value for a message; empty for None."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def type_name(value: object) -> str:
    """JSON's name of a value's type."""
    names = {
        type(None): "null",
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        list: "array",
    }
    return names.get(type(value), "object")


def judge_draft(draft: Draft, params: DataParams, source: str) -> Record:
    """The canonical record of a draft; raises Fault."""
    prompt = check_prompt(draft.prompt, params.system_role)
    for name, answer in zip(_answer_names(draft), draft.answers, strict=True):
        check_text(answer, name)
        if not answer.strip():
            raise Fault("empty_answer", name, "the answer has no text; give one or remove the row", answer)
    lengths = [len(answer) for answer in draft.answers]
    spoken = sum(lengths) if draft.kind == "steplabels" else max(lengths, default=0)
    size = sum(len(message.content) for message in prompt) + spoken
    if size > params.max_chars:
        raise Fault(
            "too_long",
            "prompt",
            f"{size} characters, at most {params.max_chars}; shorten the row or raise data.max_chars",
        )
    if draft.extra and params.unknown_keys == "reject":
        keys = ", ".join(sorted(draft.extra))
        raise Fault(
            "unknown_key",
            min(draft.extra),
            f"no field holds {keys}; name them in data.columns or set data.unknown_keys: keep",
        )
    _check_encodable(draft.extra, "extra")
    return _build(draft, prompt, params, source)


def check_prompt(turns: Sequence[tuple[str, str]], system_role: str) -> tuple[Message, ...]:
    """Messages of a prompt: optional system, then user and assistant in alternation, the user last."""
    roles = [role for role, _ in turns]
    sequence = ", ".join(roles)
    for position, (role, content) in enumerate(turns):
        name = f"prompt[{position}]"
        if role not in get_args(Role):
            raise Fault("unknown_role", name, f"role {role!r} is none of system, user, assistant", role)
        check_text(content, name)
        if not content.strip():
            raise Fault("empty_turn", name, f"the {role} turn has no text (roles: {sequence})", content)
    rest = roles[1:] if roles[:1] == ["system"] else roles
    if not rest:
        raise Fault("missing", "prompt", "the prompt has no user turn")
    for position, role in enumerate(rest):
        if role != ("user", "assistant")[position % 2]:
            raise Fault(
                "role_order",
                "prompt",
                f"turns must alternate from the user on, the roles are: {sequence}; repair or remove the row",
                sequence,
            )
    if rest[-1] != "user":
        raise Fault("last_turn", "prompt", f"the prompt must end with a user turn, the roles are: {sequence}")
    messages = [Message(role=role, content=content) for role, content in turns]  # type: ignore[arg-type]
    if messages[0].role == "system":
        if system_role == "reject":
            raise Fault(
                "system_role",
                "prompt[0]",
                "the row has a system message; set data.system_role to keep or fold to use it",
                messages[0].content,
            )
        if system_role == "fold":
            first = Message(role="user", content=f"{messages[0].content}\n\n{messages[1].content}")
            messages = [first, *messages[2:]]
    return tuple(messages)


def check_text(text: str, name: str) -> None:
    """Refuse text that has no UTF-8 form (half of a surrogate pair, written as an escape in JSON)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Fault(
            "encoding", name, f"character {error.start} is half of a surrogate pair; repair the text", text
        ) from error


def _check_encodable(value: JsonValue, name: str) -> None:
    try:
        check_text(canonical_json(value), name)
    except ValueError as error:
        if isinstance(error, Fault):
            raise
        raise Fault("bad_value", name, f"{error}; write null or a finite number") from error


def _answer_names(draft: Draft) -> tuple[str, ...]:
    if draft.kind == "steplabels":
        return tuple(f"steps[{position}]" for position in range(len(draft.answers)))
    return ("chosen", "rejected") if draft.kind == "preference" else ("answer",) * len(draft.answers)


def _build(draft: Draft, prompt: tuple[Message, ...], params: DataParams, source: str) -> Record:
    text = prompt_text(prompt)
    group = group_key(prompt, params.group_by)
    if draft.kind == "prompt":
        return Prompt(
            prompt=prompt,
            id=digest("prompt", text),
            group=group,
            source=source,
            extra=draft.extra,
            slice=_text(draft.meta, "slice") or "all",
            reference=_text(draft.meta, "reference"),
        )
    if draft.kind == "demonstration":
        return Demonstration(
            prompt=prompt,
            id=digest("demonstration", text, draft.answers[0]),
            group=group,
            source=source,
            extra=draft.extra,
            answer=draft.answers[0],
            reference=_text(draft.meta, "reference"),
        )
    annotator = _text(draft.meta, "annotator")
    if draft.kind == "feedback":
        if draft.label is None:
            raise Fault("not_label", "label", "the label is missing; it must be true or false")
        return Feedback(
            prompt=prompt,
            id=digest("feedback", text, draft.answers[0], str(draft.label), annotator or ""),
            group=group,
            source=source,
            extra=draft.extra,
            answer=draft.answers[0],
            label=draft.label,
            annotator=annotator,
        )
    if draft.kind == "steplabels":
        labels = _step_labels(draft.meta.get("labels"), len(draft.answers))
        return StepLabels(
            prompt=prompt,
            id=digest("steplabels", text, *draft.answers, canonical_json(list(labels)), annotator or ""),
            group=group,
            source=source,
            extra=draft.extra,
            steps=draft.answers,
            labels=labels,
            annotator=annotator,
        )
    chosen, rejected = draft.answers
    if chosen.strip() == rejected.strip():
        raise Fault(
            "identical", "rejected", "chosen and rejected are the same text; nothing to learn", chosen
        )
    return Preference(
        prompt=prompt,
        id=digest("preference", text, chosen, rejected, annotator or ""),
        group=group,
        source=source,
        extra=draft.extra,
        chosen=chosen,
        rejected=rejected,
        annotator=annotator,
        style=_text(draft.meta, "style"),
        dimension=_text(draft.meta, "dimension"),
        error_type=_text(draft.meta, "error_type"),
        topic=_text(draft.meta, "topic"),
        weight=_weight(draft.meta.get("weight")),
        votes=_votes(draft.meta.get("votes")),
        disputed=_flag(draft.meta.get("disputed")),
    )


def _text(meta: Mapping[str, JsonValue], name: str) -> str | None:
    value = meta.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and name == "annotator":
        return str(value)  # Annotators are often numbers; the name is an identity, not text to learn from.
    if not isinstance(value, str):
        raise Fault("not_text", name, f"must be a string, is {type_name(value)}", value)
    check_text(value, name)
    return value


def _weight(value: JsonValue) -> float:
    if value is None:
        return 1.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise Fault("bad_value", "weight", "the weight must be a finite number above 0", value)
    return float(value)


def _votes(value: JsonValue) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        first, second = value
        whole = isinstance(first, int) and isinstance(second, int)
        if whole and not isinstance(first, bool) and not isinstance(second, bool):
            assert isinstance(first, int) and isinstance(second, int)
            if first >= 0 and second >= 0 and first + second > 0:
                return first, second
    raise Fault("bad_value", "votes", "must be [for, against], two counts from 0, not both 0", value)


def _step_labels(value: JsonValue, steps: int) -> tuple[bool | None, ...]:
    if not isinstance(value, list) or len(value) != steps:
        found = f"{len(value)} labels" if isinstance(value, list) else type_name(value)
        raise Fault("not_label", "labels", f"must be one label for each of {steps} steps, is {found}", value)
    for position, label in enumerate(value):
        if label is not None and (not isinstance(label, bool | int) or label not in (0, 1)):
            raise Fault(
                "not_label", f"labels[{position}]", "must be true, false, 1, 0, or null for not judged", label
            )
    if all(label is None for label in value):
        raise Fault("not_label", "labels", "no step is judged; give at least one label that is not null")
    return tuple(None if label is None else bool(label) for label in value)


def _flag(value: JsonValue) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Fault("bad_value", "disputed", f"must be true or false, is {type_name(value)}", value)
    return value
