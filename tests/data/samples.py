"""Small inputs that several tests of the data package share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.checks import Record, Refusal
from data.config import DataParams
from data.readers import Notice, Purpose, read_source

Row = dict[str, Any]

_SUBJECTS = (
    "rain",
    "bread",
    "maps",
    "owls",
    "tides",
    "glass",
    "chess",
    "salt",
    "moss",
    "bells",
    "kites",
    "ink",
)


def pair(prompt: str = "Why is the sky blue?", **changes: Any) -> Row:
    return {
        "prompt": prompt,
        "chosen": "Air scatters blue light most.",
        "rejected": "It mirrors the sea.",
        **changes,
    }


def pairs(prompts: int, each: int = 1) -> list[Row]:
    """`each` pairs for every one of `prompts` prompts, all different."""
    rows = []
    for number in range(prompts):
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        for turn in range(each):
            rows.append(
                {
                    "prompt": f"Question {number}: what about {subject}?",
                    "chosen": f"A sound answer on {subject}, number {number}." + " Indeed." * (number % 2),
                    "rejected": f"A poor answer on {subject}, number {number}, variant {turn}.",
                }
            )
    return rows


def write_jsonl(path: Path, rows: Iterable[Row]) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def read(path: Path | str, purpose: Purpose = "files", **params: Any) -> list[Record | Refusal | Notice]:
    return [item for _, item in read_source(str(path), DataParams(**params), purpose)]


def refusals(items: Iterable[Record | Refusal | Notice]) -> list[tuple[int, str]]:
    """(line, reason) of what was refused."""
    return [(item.line, item.reason) for item in items if isinstance(item, Refusal)]


def records(items: Iterable[Record | Refusal | Notice]) -> list[Any]:
    return [item for item in items if not isinstance(item, Refusal | Notice)]
