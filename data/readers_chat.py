"""Rows that hold one record: preference pairs, demonstrations, feedback and prompts, by their keys.

Each shape is two functions: does a row look like it, and what does it say. They are tried in the order of
SHAPES (data.readers); the first that fits decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import JsonValue

from data.checks import Draft, Fault, Kind, type_name
from data.readers_fields import META, Fields, Turns, answer_of, as_text, turns_of

_MARKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_PROMPT_KEYS = (
    "prompt",
    "question",
    "instruction",
    "query",
    "Question",
    "Behavior",
    "forbidden_prompt",
)
_SLICE_KEYS = ("slice", "category", "type", "FunctionalCategory")
_SCORE_KEYS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("rating_chosen", "rating_rejected"),
)
_ANSWER_KEYS = ("answer", "completion", "response", "output")


# Transcripts, where "Human:" and "Assistant:" begin the turns


def is_transcript(text: JsonValue) -> bool:
    return isinstance(text, str) and _MARKER.match(text.lstrip(" ")) is not None


def transcript_turns(text: str, name: str) -> Turns:
    """Turns of a transcript. White space around a turn belongs to the markers."""
    pieces = _MARKER.split(text.lstrip(" "))
    if pieces[0].strip():
        raise Fault("role_order", name, 'the transcript must begin with "Human:"', pieces[0])
    roles = {"Human": "user", "Assistant": "assistant"}
    return [(roles[pieces[at]], pieces[at + 1].strip()) for at in range(1, len(pieces), 2)]


def looks_hh(fields: Fields) -> bool:
    sides = is_transcript(fields.row.get("chosen")) and is_transcript(fields.row.get("rejected"))
    return sides and not fields.has("prompt")


def read_hh(fields: Fields) -> Iterator[Draft]:
    """Two transcripts that part only in the last assistant turn."""
    chosen = answer_of(transcript_turns(fields.text("chosen"), "chosen"), "chosen")
    rejected = answer_of(transcript_turns(fields.text("rejected"), "rejected"), "rejected")
    yield _pair(fields, chosen, rejected)


# Preference pairs, as TRL and most data sets write them


def looks_preference(fields: Fields) -> bool:
    if fields.first("conversations", "messages") is not None and fields.first(*_PROMPT_KEYS) is None:
        return False  # The prompt is the conversation.
    return fields.has("chosen", "rejected") or fields.has("chosen_messages", "rejected_messages")


def read_preference(fields: Fields) -> Iterator[Draft]:
    """prompt (text or messages, or implied by the sides), chosen and rejected (text or messages)."""
    fields.refuse_media_and_tools()
    suffix = "_messages" if fields.has("chosen_messages", "rejected_messages") else ""
    names = f"chosen{suffix}", f"rejected{suffix}"
    values = fields.take(names[0]), fields.take(names[1])
    prompt = _prompt_turns(fields)
    implied = not prompt and all(isinstance(value, str) for value in values)
    if implied:
        prompt, values = _implied_prompt(*map(str, values))
    sides: list[tuple[Turns, str]] = []
    for name, value in zip(names, values, strict=True):
        if isinstance(value, list | dict) and _is_messages(value):
            before, answer = answer_of(turns_of(value, name, fields.coerce), name)
            # A side may repeat the prompt (UltraFeedback does) or only continue it.
            repeated = bool(prompt) and before[: len(prompt)] == prompt
            sides.append((before if repeated else prompt + before, answer))
        else:
            sides.append((prompt, as_text(value, name, fields.coerce)))
    yield replace(_pair(fields, *sides), implied=implied)


def _pair(fields: Fields, chosen: tuple[Turns, str], rejected: tuple[Turns, str]) -> Draft:
    if chosen[0] != rejected[0]:
        turns = f"{len(chosen[0])} and {len(rejected[0])} turns"
        raise Fault(
            "prompt_mismatch", "rejected", f"the two sides have different prompts ({turns} before the answer)"
        )
    _refuse_tie(fields)
    meta = fields.meta(*META)
    return Draft("preference", chosen[0], (chosen[1], rejected[1]), meta=meta, extra=fields.rest())


def scores_of(row: Mapping[str, JsonValue]) -> tuple[str, float, float] | None:
    """(name, of the chosen answer, of the rejected one) where the row gives both a number."""
    for name, other in _SCORE_KEYS:
        chosen, rejected = row.get(name), row.get(other)
        if _is_number(chosen) and _is_number(rejected):
            return name, float(str(chosen)), float(str(rejected))
    return None


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_tie(fields: Fields) -> None:
    """Which of two answers with equal scores is called chosen was left to chance."""
    scores = scores_of(fields.row)
    if scores is not None and scores[1] == scores[2]:
        raise Fault("tie", scores[0], f"both answers have the score {scores[1]:g}")


def _implied_prompt(chosen: str, rejected: str) -> tuple[Turns, tuple[str, str]]:
    """The common beginning of the two sides, cut at a space, is the prompt."""
    length = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        length += 1
    length = chosen.rfind(" ", 0, length + 1)
    if length <= 0:
        raise Fault("missing", "prompt", "no prompt, and the sides have no common beginning to take for one")
    return [("user", chosen[:length])], (chosen[length + 1 :], rejected[length + 1 :])


def _is_messages(value: JsonValue) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, dict) and ("role" in item or "from" in item) for item in items)


def _prompt_turns(fields: Fields) -> Turns:
    """`system`, `history` and the prompt of a row, in whichever way it is written; [] when there is none."""
    turns: Turns = []
    system = fields.optional_text("system")
    if system.strip():
        turns.append(("system", system))
    history = fields.take("history")
    if isinstance(history, list):
        for position, item in enumerate(history):
            where = f"history[{position}]"
            if not isinstance(item, list) or len(item) != 2:
                raise Fault("not_text", where, "must be [instruction, answer]", item)
            asked, answered = item
            turns.append(("user", as_text(asked, where, fields.coerce)))
            turns.append(("assistant", as_text(answered, where, fields.coerce)))
    key = fields.first(*_PROMPT_KEYS)
    if key is None:
        return turns
    value = fields.take(key)
    if isinstance(value, list | dict) and _is_messages(value):
        return turns + turns_of(value, key, fields.coerce)
    text = as_text(value, key, fields.coerce)
    if is_transcript(text) and "Assistant:" in text:
        spoken = transcript_turns(text, key)
        if spoken[-1] == ("assistant", ""):
            spoken.pop()
        return turns + spoken
    extra_input = fields.optional_text("input") if key == "instruction" else ""
    return [*turns, ("user", f"{text}\n{extra_input}" if extra_input.strip() else text)]


# ShareGPT: conversations of {from, value}, with chosen and rejected objects for DPO


def looks_sharegpt(fields: Fields) -> bool:
    return fields.has("conversations")


def looks_messages(fields: Fields) -> bool:
    return fields.has("messages") or "messages" in fields.row


def read_conversation(fields: Fields) -> Iterator[Draft]:
    """`conversations` or `messages`: a demonstration, feedback (`label`) or a pair (chosen, rejected)."""
    fields.refuse_media_and_tools()
    key = "conversations" if fields.has("conversations") else "messages"
    value = fields.take(key)
    if value is None:
        raise Fault("missing", key, "the field is null; it must be a list of messages")
    turns = turns_of(value, key, fields.coerce)
    system = fields.optional_text("system")
    if system.strip():
        turns.insert(0, ("system", system))
    if fields.has("chosen", "rejected"):
        answers: list[str] = []
        for side in ("chosen", "rejected"):
            before, answer = answer_of(turns_of(fields.take(side), side, fields.coerce), side)
            if before:
                raise Fault("unsupported", side, f"must be one assistant turn, has {len(before) + 1} turns")
            answers.append(answer)
        yield Draft("preference", turns, tuple(answers), meta=fields.meta(*META), extra=fields.rest())
        return
    before, answer = answer_of(turns, key)
    yield _single(fields, before, answer)


# Alpaca, question and answer, prompt and completion


def looks_alpaca(fields: Fields) -> bool:
    return fields.has("instruction") and (fields.first("output", "response", "instances") is not None)


def read_alpaca(fields: Fields) -> Iterator[Draft]:
    """instruction, optional input, system and history, output; or `instances` of {input, output}."""
    fields.refuse_media_and_tools()
    instances = fields.take("instances")
    if instances is None:
        yield from read_answered(fields)
        return
    if not isinstance(instances, list) or not instances:
        raise Fault("missing", "instances", "must be a list of {input, output} with at least one")
    instruction = fields.text("instruction")
    for position, instance in enumerate(instances):
        where = f"instances[{position}]"
        if not isinstance(instance, dict):
            raise Fault("not_text", where, f"must be an object, is {type_name(instance)}", instance)
        given = as_text(instance.get("input", ""), f"{where}.input", fields.coerce)
        answer = as_text(instance.get("output"), f"{where}.output", fields.coerce)
        text = f"{instruction}\n{given}" if given.strip() else instruction
        yield Draft("demonstration", [("user", text)], (answer,), extra=fields.rest())


def looks_question_answer(fields: Fields) -> bool:
    return fields.has("question", "answer")


def looks_unpaired(fields: Fields) -> bool:
    return fields.first(*_PROMPT_KEYS) is not None and fields.first(*_ANSWER_KEYS) is not None


def read_answered(fields: Fields) -> Iterator[Draft]:
    """A prompt and one answer under any of the usual names; feedback when there is a `label`."""
    fields.refuse_media_and_tools()
    prompt = _prompt_turns(fields)
    key = fields.first(*_ANSWER_KEYS)
    if key is None:
        raise Fault("missing", "answer", "no answer, completion, response or output")
    value = fields.take(key)
    if isinstance(value, list | dict) and _is_messages(value):
        before, answer = answer_of(turns_of(value, key, fields.coerce), key)
        prompt = prompt + before
    else:
        answer = as_text(value, key, fields.coerce)
    yield _single(fields, prompt, answer)


def _single(fields: Fields, prompt: Turns, answer: str) -> Draft:
    kind: Kind = "demonstration"
    label: bool | None = None
    if "label" in fields.row:
        kind = "feedback"
        label = _label(fields.take("label"))
    named = "annotator" if kind == "feedback" else "reference"
    meta = fields.meta(named) if isinstance(fields.row.get(named), str | int) else {}
    if kind == "demonstration" and "reference" not in meta and "\n#### " in answer:
        meta["reference"] = answer.rsplit("\n#### ", 1)[1].strip()  # How GSM8K marks the final answer.
    return Draft(kind, prompt, (answer,), label=label, meta=meta, extra=fields.rest())


def _label(value: JsonValue) -> bool:
    words = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in words:  # A table has no other way to say it.
        return words[value.strip().lower()]
    if isinstance(value, int | float) and value in (0, 1):  # A column with gaps makes floats of integers.
        return bool(value)
    raise Fault("not_label", "label", f"must be true or false, is {type_name(value)}", value)


# Prompts alone


def looks_prompts(fields: Fields) -> bool:
    return fields.first(*_PROMPT_KEYS, "turns") is not None


def read_prompt(fields: Fields) -> Iterator[Draft]:
    """A prompt without an answer, with the slice and the reference that the row may name.

    Of `turns` (user turns whose answers the model is to give) the first is the prompt; all stay in `extra`.
    """
    fields.refuse_media_and_tools()
    if fields.has("turns") and fields.first(*_PROMPT_KEYS) is None:
        turns = fields.row["turns"]
        if not isinstance(turns, list) or not turns:
            raise Fault("missing", "turns", "must be a list of user turns with at least one")
        prompt = [("user", as_text(turns[0], "turns[0]", fields.coerce))]
        if len(turns) == 1:
            fields.take("turns")
    else:
        prompt = _prompt_turns(fields)
    meta = fields.meta("reference") if isinstance(fields.row.get("reference"), str) else {}
    key = fields.first(*_SLICE_KEYS)
    if key is not None:
        meta["slice"] = as_text(fields.take(key), key, fields.coerce)
    yield Draft("prompt", prompt, meta=meta, extra=fields.rest())


# Answers in steps, each with a label of its own


def looks_stepwise(fields: Fields) -> bool:
    steps = isinstance(fields.row.get("steps"), list) and fields.has("labels")
    return fields.first(*_PROMPT_KEYS) is not None and (steps or fields.has("completions"))


def read_stepwise(fields: Fields) -> Iterator[Draft]:
    """A prompt, `steps` (TRL: `completions`) and `labels`: true, false, or null where nobody judged."""
    fields.refuse_media_and_tools()
    prompt = _prompt_turns(fields)
    key = "steps" if fields.has("steps") else "completions"
    value = fields.take(key)
    if not isinstance(value, list) or not value:
        raise Fault("missing", key, f"must be a list with at least one step, is {type_name(value)}", value)
    if not fields.has("labels"):
        raise Fault("missing", "labels", f"{key} need a list of labels: true, false or null for each")
    steps = tuple(as_text(step, f"{key}[{at}]", fields.coerce) for at, step in enumerate(value))
    yield Draft("steplabels", prompt, steps, meta=fields.meta("labels", "annotator"), extra=fields.rest())
