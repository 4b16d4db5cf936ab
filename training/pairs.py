"""Preference data as ids: pairs and feedback become items, with the reasons of those that were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.records import Feedback, Preference, read_records
from training.batches import Tree
from training.chat import encode_answer, encode_prompt, preflight
from training.config_optimize import OptimizeParams
from training.rundir import RunDir


@dataclass(frozen=True)
class Item:
    """A row as ids: two answers, chosen first, or one with its label."""

    tree: Tree
    wanted: tuple[bool, ...]
    weight: float


def encode(
    tok: PreTrainedTokenizerBase, rows: Sequence[Preference | Feedback], params: OptimizeParams
) -> tuple[list[Item], Counter[str]]:
    """Rows as ids; those over a limit are left out and counted, never cut."""
    items, dropped = [], Counter[str]()
    for row in rows:
        pair = isinstance(row, Preference)
        texts = (row.chosen, row.rejected) if isinstance(row, Preference) else (row.answer,)
        answers = [encode_answer(tok, text) for text in texts]
        tree = Tree(row.id, encode_prompt(tok, row.prompt), answers)
        if len(tree.prompt) > params.max_prompt:
            dropped["prompt over max_prompt"] += 1
        elif len(tree.prompt) + max(map(len, answers)) > params.preference.max_length:
            dropped["prompt and answer over preference.max_length"] += 1
        elif min(map(len, answers)) < 2:
            dropped["empty answer"] += 1
        elif pair and answers[0] == answers[1]:
            dropped["equal answers"] += 1
        else:
            wanted = (True, False) if isinstance(row, Preference) else (row.label,)
            items.append(Item(tree, wanted, row.weight if isinstance(row, Preference) else 1.0))
    return items, dropped


def read(
    run: RunDir, tok: PreTrainedTokenizerBase, params: OptimizeParams
) -> tuple[list[Item], list[Item], dict[str, dict[str, int]]]:
    """Rows to learn from and held-out pairs, both encoded, and what was dropped of each."""
    rows: list[Preference | Feedback] = list(read_records(run.input("pairs"), Preference))
    if params.algorithm == "kto" and "feedback" in run.config["inputs"]:
        rows += read_records(run.input("feedback"), Feedback)
    test: list[Preference | Feedback] = list(read_records(run.input("test"), Preference))
    for row in (*rows[:16], *test[:16]):
        preflight(tok, row.prompt, row.chosen if isinstance(row, Preference) else row.answer)
    encoded, counts = [], {}
    for name, given in (("pairs", rows), ("test", test)):
        items, dropped = encode(tok, given, params)
        if not items:
            raise DataError(
                f"{run.input(name)}: none of {len(given)} rows can be used ({dict(dropped)}); raise "
                "optimize.preference.max_length and optimize.max_prompt, or give other data"
            )
        encoded.append(items)
        counts[name] = dict(sorted(dropped.items()))
    return encoded[0], encoded[1], counts


def mismatched(items: Sequence[Item]) -> list[Tree]:
    """Each prompt with the first answer of the next row that has another prompt: KTO's reference point."""
    prompts = [item.tree.prompt for item in items]
    if all(prompt == prompts[0] for prompt in prompts):
        raise DataError("kto compares answers of different prompts, all rows have the same one; add others")
    nexts = [0] * len(items)
    following = next(index for index, prompt in enumerate(prompts) if prompt != prompts[-1])
    for index in range(len(items) - 1, -1, -1):
        nexts[index] = following
        if prompts[index] != prompts[index - 1]:
            following = index
    return [
        Tree(item.tree.key, item.tree.prompt, [items[other].tree.answers[0]])
        for item, other in zip(items, nexts, strict=True)
    ]
