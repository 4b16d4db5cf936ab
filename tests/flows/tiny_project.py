"""A copy of the project on the tiny profile: a random model, pairs of a few words, its own empty stores."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.overrides import write_overrides
from tests.flows.conftest import copy_project
from tests.training import tiny

THINGS = ("tea", "bread", "rain", "a map", "my cat", "the sea", "a lamp", "music", "the bus", "paper")
PLACES = ("home", "work", "school", "the park", "the lake", "town", "the shop", "a farm", "the hall", "here")


def make_tiny(target: Path) -> Path:
    """Everything that a run needs; nothing is downloaded."""
    project = copy_project(target)
    for name, save in (("tiny", tiny.save_policy), ("encoder", tiny.save_encoder)):
        folder = project / "models" / name
        folder.mkdir(parents=True)
        save(folder)
    write_records(project / "data" / "tiny")
    write_overrides(project, profile=str(Path(__file__).with_name("tiny.yaml")))
    return project


def write_records(folder: Path) -> None:
    """200 pairs over 100 prompts: the chosen answer has a's in it, the rejected one z's; lengths tell
    nothing."""
    folder.mkdir()
    asked = [f"Tell me about {thing} at {place}." for thing in THINGS for place in PLACES]
    pairs = [
        {
            "prompt": prompt,
            "chosen": "aa " * (1 + (number + style) % 3) + "ab",
            "rejected": "zz " * (1 + (number + style + 1) % 3) + "zy",
            "style": ("plain", "warm")[style],
            "annotator": f"r{(number + style) % 3}",
            "dimension": ("quality", "safety")[number % 2],
        }
        for number, prompt in enumerate(asked)
        for style in range(2)
    ]
    others = [
        {"prompt": f"What is new in {thing} number {n}?", "slice": thing}
        for thing in THINGS
        for n in range(3)
    ]
    for name, rows in (("preferences", pairs), ("eval_prompts", others)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
