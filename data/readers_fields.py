"""The fields of one row: typed access that remembers which keys were used, and messages of any dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import JsonValue

from data.checks import Fault, type_name

Turns = list[tuple[str, str]]

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
TOOL_ROLES = frozenset({"tool", "tools", "function", "function_call", "observation", "ipython"})
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
MEDIA_TYPES = frozenset({"image", "image_url", "input_image", "video", "video_url", "audio", "input_audio"})

META = ("annotator", "style", "dimension", "error_type", "topic", "weight", "votes", "disputed")
"""Fields of a Preference that a row may name as we do."""


class Fields:
    """The keys of a row. What is never asked for is left over, and becomes `extra`."""

    def __init__(self, row: Mapping[str, JsonValue], coerce: bool) -> None:
        self.row = row
        self.coerce = coerce
        self._used: set[str] = set()

    def has(self, *keys: str) -> bool:
        """All keys are there and not null."""
        return all(self.row.get(key) is not None for key in keys)

    def first(self, *keys: str) -> str | None:
        """The first of the keys that is there and not null."""
        return next((key for key in keys if self.has(key)), None)

    def take(self, key: str) -> JsonValue:
        """The value, or None; the key counts as used."""
        self._used.add(key)
        return self.row.get(key)

    def text(self, key: str) -> str:
        """The value as text; raises Fault when there is none."""
        value = self.take(key)
        if value is None:
            raise Fault("missing", key, "the field is absent or null; it must be a string")
        return as_text(value, key, self.coerce)

    def optional_text(self, key: str) -> str:
        """The value as text; empty when absent or null."""
        return self.text(key) if self.has(key) else ""

    def meta(self, *keys: str) -> dict[str, JsonValue]:
        """The values of those keys that the row has."""
        return {key: self.take(key) for key in keys if self.has(key)}

    def rest(self) -> dict[str, JsonValue]:
        """What was not used, without nulls and empty lists, which say nothing."""
        left = {key: value for key, value in self.row.items() if key not in self._used}
        return {key: value for key, value in left.items() if value is not None and value != []}

    def refuse_media_and_tools(self) -> None:
        """Raise Fault when the row carries images, sound, video or tool definitions."""
        for key in MEDIA_KEYS:
            if self.take(key):
                raise Fault(
                    "multimodal", key, f"the row carries {key}; only text is supported, remove the row"
                )
        tools = self.take("tools")
        if tools and not (isinstance(tools, str) and tools.strip() in ("", "[]", "null")):
            raise Fault("tool_call", "tools", "the row defines tools; only plain turns are supported", tools)


def as_text(value: JsonValue, name: str, coerce: bool) -> str:
    """`value` when it is a string; its JSON when coercion is on; else Fault."""
    if isinstance(value, str):
        return value
    if coerce and value is not None:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    raise Fault(
        "not_text",
        name,
        f"must be a string, is {type_name(value)}; repair the row or set data.coerce: true",
        value,
    )


def content_text(value: JsonValue, name: str, coerce: bool) -> str:
    """Content of a turn: a string, or a list of text parts ({type: text, text|value: ...}), joined."""
    if not isinstance(value, list):
        return as_text(value, name, coerce)
    parts: list[str] = []
    for position, part in enumerate(value):
        where = f"{name}[{position}]"
        if not isinstance(part, dict):
            parts.append(as_text(part, where, coerce))
            continue
        kind = part.get("type", "text")
        if kind in MEDIA_TYPES:
            raise Fault("multimodal", where, f"a part of type {kind}; only text is supported, remove the row")
        if kind != "text":
            raise Fault("unsupported", where, f"a part of type {kind!r}; only text parts are supported")
        parts.append(as_text(part.get("text", part.get("value")), where, coerce))
    return "".join(parts)


def turns_of(value: JsonValue, name: str, coerce: bool) -> Turns:
    """Messages in the dialects {role, content} and {from, value}; one object counts as one message."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise Fault("not_text", name, f"must be a list of messages, is {type_name(value)}", value)
    if not value:
        raise Fault("missing", name, "the list of messages is empty")
    turns: Turns = []
    for position, message in enumerate(value):
        where = f"{name}[{position}]"
        if not isinstance(message, dict):
            raise Fault("not_text", where, f"must be a message object, is {type_name(message)}", message)
        role_key = "role" if "role" in message else "from"
        content_key = "content" if "content" in message else "value"
        role = message.get(role_key)
        if not isinstance(role, str):
            raise Fault(
                "unknown_role", f"{where}.{role_key}", f"must be a string, is {type_name(role)}", role
            )
        if role.lower() in TOOL_ROLES or message.get("tool_calls"):
            raise Fault(
                "tool_call", where, f"a turn of a tool (role {role}); only plain turns are supported", role
            )
        content = content_text(message.get(content_key), f"{where}.{content_key}", coerce)
        turns.append((ROLES.get(role.lower(), role), content))
    return turns


def answer_of(turns: Turns, name: str) -> tuple[Turns, str]:
    """A conversation parted at its last turn, which must be the assistant's."""
    role, content = turns[-1]
    if role != "assistant":
        roles = ", ".join(role for role, _ in turns)
        raise Fault("last_turn", name, f"must end with an assistant turn, the roles are: {roles}")
    return turns[:-1], content
