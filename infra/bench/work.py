"""The work that both sides are given: its sizes, its rows as ids, and the reward of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASKS = ("sft", "reward", "dpo", "grpo", "rloo")
BATCH = {"sft": 8, "reward": 8, "dpo": 4, "grpo": 1, "rloo": 1}
"""Rows, pairs or prompts a step; samples a prompt are `GROUP`."""
GROUP, NEW_TOKENS, MAX_LENGTH, MAX_PROMPT = 8, 64, 512, 384
LR, BETA, CENTRING = 1e-5, {"dpo": 0.1, "grpo": 0.05, "rloo": 0.05}, 0.01
COMPARABLE = ("sft", "reward", "dpo")
"""Where both sides see the same tokens; on-policy samples are each side's own."""

decoding: list[float] = []
"""Seconds of each sampling pass in this process; empty where nothing is sampled."""


def vowels(prompt: Any, answer: str, reference: str | None, extra: dict[str, Any]) -> float:
    """The reward of both sides: share of vowels. Cheap, and it differs within a group."""
    return sum(letter in "aeiou" for letter in answer.lower()) / max(1, len(answer))


def tokens_of(tree: Any) -> int:
    """Tokens of a prompt, once, and of its answers."""
    return len(tree.prompt) + sum(map(len, tree.answers))


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def dialogue(text: str) -> list[dict[str, str]]:
    """hh_rlhf's text as messages."""
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[role], "content": said.strip()}
        for role, said in zip(parts[0::2], parts[1::2], strict=True)
    ]


def pair_rows(spec: dict[str, Any]) -> list[Any]:
    """Preference records of hh_rlhf, or of the shipped sample."""
    from data.records import Message, Preference

    found = []
    for number, row in enumerate(lines(Path(spec["pairs"]))):
        if "prompt" in row:
            given, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
            turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
        else:
            first, second = dialogue(row["chosen"]), dialogue(row["rejected"])
            turns, chosen, rejected = first[:-1], first[-1]["content"], second[-1]["content"]
            if turns != second[:-1]:
                continue
        wanted = ["user", "assistant"] * len(turns)
        if [turn["role"] for turn in turns] != wanted[: len(turns)] or len(turns) % 2 == 0:
            continue
        if chosen and rejected and chosen != rejected:
            prompt = tuple(Message.model_validate(turn) for turn in turns)
            found.append(
                Preference(prompt=prompt, id=f"{number:016x}", group="", chosen=chosen, rejected=rejected)
            )
    return found


def fitting(tok: Any, spec: dict[str, Any]) -> list[Any]:
    """The first pairs that no limit would cut, as many as the run takes, as ids."""
    from training.config_optimize import OptimizeParams, PreferenceParams
    from training.pairs import encode

    params = OptimizeParams(
        algorithm="dpo", max_prompt=MAX_PROMPT, preference=PreferenceParams(max_length=MAX_LENGTH)
    )
    items, _ = encode(tok, pair_rows(spec), params)
    need = spec["steps"] * spec["batch"]
    if len(items) < need:
        raise SystemExit(f"{spec['pairs']}: {len(items)} pairs within {MAX_LENGTH} tokens, {need} needed")
    return items[:need]


def prompt_rows(spec: dict[str, Any]) -> list[Any]:
    """Prompts of gsm8k, or of the shipped sample's pairs, in the order in which training.rl draws them."""
    from data.records import Message, Prompt
    from training.rl import draw

    texts = [str(row.get("question", "")) for row in lines(Path(spec["prompts"]))]
    if not any(texts):
        texts = [row.prompt[-1].content for row in pair_rows({**spec, "pairs": spec["prompts"]})]
    need = spec["steps"] * spec["batch"]
    short = [text for text in texts if len(text) < MAX_PROMPT - 64][:need]
    if len(short) < need:
        raise SystemExit(f"{spec['prompts']}: {len(short)} short prompts, {need} needed")
    rows = [
        Prompt(prompt=(Message(role="user", content=text),), id=f"{number:016x}", group="")
        for number, text in enumerate(short)
    ]
    order = [at for step in range(spec["steps"]) for at in draw(need, spec["batch"], 0, step * spec["batch"])]
    return [rows[at] for at in order]
