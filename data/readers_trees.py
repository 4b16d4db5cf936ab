"""Rows that hold many comparisons: ranked message trees, and annotation tasks exported by Label Studio."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from pydantic import JsonValue

from data.checks import Draft, Fault, type_name
from data.readers_fields import ROLES, Fields, Turns, as_text, turns_of

Object = dict[str, JsonValue]

_SIDES = (
    ("answer1", "answer2"),
    ("text1", "text2"),
    ("response1", "response2"),
    ("response_a", "response_b"),
    ("answer_a", "answer_b"),
    ("left", "right"),
)
_NO_PREFERENCE = frozenset({"tie", "equal", "both", "none", "neither", "same"})


# Open-Assistant trees: replies with ranks among siblings, 0 the best


def looks_tree(fields: Fields) -> bool:
    prompt = fields.row.get("prompt")
    return (isinstance(prompt, dict) and "replies" in prompt) or fields.has("text", "role", "replies")


def read_tree(fields: Fields) -> Iterator[Draft | Fault]:
    """Every two answers of one message that have different ranks make a pair; the better rank is chosen."""
    prompt = fields.take("prompt")
    root = prompt if isinstance(prompt, dict) else dict(fields.row)
    found = 0
    waiting: list[tuple[Object, Turns]] = [(root, [])]
    while waiting:
        node, before = waiting.pop()
        turns = [*before, _tree_turn(node, fields.coerce)]
        replies = node.get("replies")
        children = (
            [reply for reply in replies if isinstance(reply, dict)] if isinstance(replies, list) else []
        )
        waiting.extend((child, turns) for child in reversed(children))
        if turns[-1][0] == "user" and len(children) > 1:
            for item in _ranked_pairs(children, turns, fields.coerce):
                found += 1
                yield item
    if not found:
        raise Fault("no_ranking", "replies", "no message of the tree has two answers to compare")


def _tree_turn(node: Object, coerce: bool) -> tuple[str, str]:
    role = as_text(node.get("role"), "role", False)
    return ROLES.get(role, role), as_text(node.get("text"), "text", coerce)


def _ranked_pairs(children: list[Object], prompt: Turns, coerce: bool) -> Iterator[Draft | Fault]:
    ranked: list[tuple[int, Object]] = []
    for child in children:
        rank = child.get("rank")
        if child.get("deleted") is True or child.get("review_result") is False:
            yield Fault("no_ranking", "replies", "the answer was deleted or failed its review")
        elif isinstance(rank, bool) or not isinstance(rank, int):
            yield Fault("no_ranking", "rank", f"one of several answers has no rank, but {type_name(rank)}")
        else:
            ranked.append((rank, child))
    ranked.sort(key=lambda item: item[0])
    for (better, chosen), (worse, rejected) in combinations(ranked, 2):
        if better == worse:
            yield Fault("tie", "rank", f"two answers share rank {better}")
            continue
        answers = _tree_turn(chosen, coerce)[1], _tree_turn(rejected, coerce)[1]
        yield Draft("preference", prompt, answers, extra={"ranks": [better, worse]})


# Label Studio: one task, several annotations of type pairwise


def looks_label_studio(fields: Fields) -> bool:
    return isinstance(fields.row.get("data"), dict) and isinstance(fields.row.get("annotations"), list)


def read_label_studio(fields: Fields) -> Iterator[Draft | Fault]:
    """One pair for each completed pairwise result of each annotator; what is not used says why."""
    task = fields.take("data")
    annotations = fields.take("annotations")
    assert isinstance(task, dict) and isinstance(annotations, list)
    if not annotations:
        raise Fault("no_annotation", "annotations", "nobody has annotated the task")
    for position, annotation in enumerate(annotations):
        name = f"annotations[{position}]"
        if not isinstance(annotation, dict):
            yield Fault("not_text", name, f"must be an object, is {type_name(annotation)}", annotation)
        elif annotation.get("was_cancelled") is True:
            yield Fault("cancelled", name, "the annotator skipped or cancelled the task")
        elif not annotation.get("result"):
            yield Fault("empty_annotation", name, "the annotation has no result")
        else:
            yield from _annotation(annotation, task, name, fields.coerce)


def _annotation(annotation: Object, task: Object, name: str, coerce: bool) -> Iterator[Draft | Fault]:
    results = annotation.get("result")
    items = results if isinstance(results, list) else []
    pairwise = [item for item in items if isinstance(item, dict) and item.get("type") == "pairwise"]
    if not pairwise:
        kinds = ", ".join(sorted({str(item.get("type")) for item in items if isinstance(item, dict)}))
        yield Fault("unsupported", f"{name}.result", f"no pairwise result, only: {kinds}")
    for result in pairwise:
        try:
            yield _comparison(result, annotation, task, name, coerce)
        except Fault as fault:
            yield fault


def _comparison(result: Object, annotation: Object, task: Object, name: str, coerce: bool) -> Draft:
    value = result.get("value")
    selected = value.get("selected") if isinstance(value, dict) else None
    if isinstance(selected, str) and selected.lower() in _NO_PREFERENCE:
        raise Fault("tie", f"{name}.result.value.selected", "the annotator had no preference", selected)
    if selected not in ("left", "right"):
        where = f"{name}.result.value.selected"
        raise Fault("bad_value", where, f"must be left or right, is {type_name(selected)}", selected)
    left_key, right_key = _sides(result, task)
    left = as_text(task[left_key], f"data.{left_key}", coerce)
    right = as_text(task[right_key], f"data.{right_key}", coerce)
    prompt_key = next(
        (key for key in ("prompt", "question", "instruction", "dialogue") if task.get(key)), None
    )
    if prompt_key is None:
        raise Fault("missing", "data.prompt", "the task has no prompt, question, instruction or dialogue")
    asked = task[prompt_key]
    prompt = [("user", asked)] if isinstance(asked, str) else turns_of(asked, f"data.{prompt_key}", coerce)
    used = {left_key, right_key, prompt_key}
    meta: Object = {"annotator": _annotator(annotation)}
    if result.get("from_name") in ("quality", "factuality", "safety"):
        meta["dimension"] = result["from_name"]
    extra: Object = {key: item for key, item in task.items() if key not in used and item is not None}
    answers = (left, right) if selected == "left" else (right, left)
    return Draft("preference", prompt, answers, meta=meta, extra=extra)


def _sides(result: Object, task: Object) -> tuple[str, str]:
    """Keys of the two answers: those that the control names when the task has them, or the usual ones."""
    names = result.get("to_name")
    listed = names.split(",") if isinstance(names, str) else names if isinstance(names, list) else []
    named = [str(item).strip() for item in listed]
    for left, right in ((named[0], named[1]), *_SIDES) if len(named) == 2 else _SIDES:
        if task.get(left) is not None and task.get(right) is not None:
            return left, right
    usual = ", ".join(f"{left}/{right}" for left, right in _SIDES)
    raise Fault("missing", "data", f"the task has none of the usual pairs of answers: {usual}")


def _annotator(annotation: Object) -> str | None:
    """The number of the annotator; names and e-mail addresses are left where they are."""
    by = annotation.get("completed_by")
    number = by.get("id") if isinstance(by, dict) else by
    return None if number is None else str(number)
