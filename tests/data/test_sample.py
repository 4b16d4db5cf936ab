"""The shipped sample keeps its promises: size, variety, balance, and an evaluation that meets no pair."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import cache
from typing import Any

import pytest

from data.config import DataParams
from data.records import Preference, Prompt
from data.splits import assign
from tests.conftest import ROOT
from tests.data.samples import read, records, refusals

SAMPLE = ROOT / "data" / "sample"
ERROR_TYPES = {
    "factuality": {"wrong_fact", "fabricated", "wrong_reasoning", "outdated_or_overconfident"},
    "quality": {
        "evasive",
        "rambling",
        "off_topic",
        "format_broken",
        "incomplete",
        "repetitive",
        "sycophantic",
        "ignores_instruction",
    },
    "safety": {"unsafe", "over_refusal", "privacy", "poor_advice"},
}
SLICES = {"knowledge", "reasoning", "how_to", "writing", "format", "multi_turn"}
SLICES |= {"safety_harmful", "safety_benign", "sycophancy", "advice"}


@cache
def _pairs() -> tuple[Preference, ...]:
    items = read(SAMPLE / "preferences.jsonl")
    assert refusals(items) == []
    return tuple(records(items))


@cache
def _evaluation() -> tuple[Prompt, ...]:
    items = read(SAMPLE / "eval_prompts.jsonl", "eval_prompts")
    assert refusals(items) == []
    return tuple(records(items))


def _opening(text: str, words: int = 3) -> str:
    return " ".join(text.split()[:words]).casefold()


def test_size_and_unique_ids() -> None:
    assert len(_pairs()) >= 800
    assert len({pair.prompt for pair in _pairs()}) >= 400
    assert len({pair.id for pair in _pairs()}) == len(_pairs())


def test_every_row_is_labelled() -> None:
    for pair in _pairs():
        assert pair.annotator and pair.style and pair.dimension and pair.error_type and pair.topic, (
            pair.source
        )
        assert pair.error_type in ERROR_TYPES[pair.dimension], pair.source
        assert set(pair.extra) <= {"id", "source"}, pair.source


def test_styles_belong_to_annotators() -> None:
    styles: dict[str, set[str]] = defaultdict(set)
    for pair in _pairs():
        styles[str(pair.annotator)].add(str(pair.style))
    assert all(len(found) == 1 for found in styles.values())
    counts = Counter(pair.style for pair in _pairs())
    assert len(counts) >= 3 and min(counts.values()) >= len(_pairs()) / 6


def test_all_classes_of_error_are_covered_and_none_rules() -> None:
    counts = Counter(pair.error_type for pair in _pairs())
    assert set(counts) == set().union(*ERROR_TYPES.values())
    assert max(counts.values()) <= 0.2 * len(_pairs())
    assert min(counts.values()) >= 10


def test_some_prompts_have_several_turns() -> None:
    several = sum(len([turn for turn in pair.prompt if turn.role == "user"]) > 1 for pair in _pairs())
    assert several >= 0.1 * len(_pairs())
    assert any(pair.prompt[0].role == "system" for pair in _pairs())


def test_some_pairs_are_disputed_and_come_in_both_orders() -> None:
    disputed = {(pair.prompt, pair.chosen, pair.rejected) for pair in _pairs() if pair.disputed}
    assert len(disputed) >= 20
    assert all((prompt, rejected, chosen) in disputed for prompt, chosen, rejected in disputed)
    assert sum(pair.votes is not None for pair in _pairs()) >= 50


@pytest.mark.parametrize("measure", [len, lambda text: len(text.split())], ids=["characters", "words"])
def test_length_alone_tells_nothing(measure: Any) -> None:
    longer = [measure(pair.chosen) > measure(pair.rejected) for pair in _pairs()]
    assert 0.45 <= sum(longer) / len(longer) <= 0.55
    means = [
        sum(measure(text) for text in side)
        for side in zip(*((p.chosen, p.rejected) for p in _pairs()), strict=True)
    ]
    assert 0.9 <= means[0] / means[1] <= 1.1


def test_answers_do_not_begin_alike() -> None:
    for side in ("chosen", "rejected"):
        texts = {getattr(pair, side) for pair in _pairs()}
        opening, count = Counter(map(_opening, texts)).most_common(1)[0]
        assert count <= 0.04 * len(texts), (side, opening, count)
    prompts = {pair.prompt[-1].content for pair in _pairs()}
    opening, count = Counter(_opening(text, 5) for text in prompts).most_common(1)[0]
    assert count <= 0.02 * len(prompts), (opening, count)


def test_answers_end_and_are_of_a_size_that_can_be_learned() -> None:
    for pair in _pairs():
        if not pair.disputed:
            assert pair.chosen.rstrip().endswith((".", "!", "?", ")", "`", '"', ":", "'", "|", "}", "]")), (
                pair.source
            )
        assert 1 <= len(pair.chosen.split()) <= 80 and len(pair.rejected.split()) <= 100, pair.source


def test_held_out_parts_are_large_enough_for_any_seed() -> None:
    sizes = Counter(pair.group for pair in _pairs())
    for seed in range(5):
        held = Counter[str]()
        for group, part in assign(sizes, DataParams(), seed).items():
            held[part] += sizes[group]
        assert min(held["judge"], held["validation"], held["test"]) >= 100


def test_evaluation_prompts_have_slices_and_meet_no_pair() -> None:
    assert len(_evaluation()) >= 120
    slices = Counter(prompt.slice for prompt in _evaluation())
    assert set(slices) == SLICES and min(slices.values()) >= 10
    taken = {pair.group for pair in _pairs()}
    assert [prompt.source for prompt in _evaluation() if prompt.group in taken] == []
    assert len({prompt.group for prompt in _evaluation()}) == len(_evaluation())


def test_the_files_are_plain_lines_of_json() -> None:
    for name in ("preferences.jsonl", "eval_prompts.jsonl"):
        data = (SAMPLE / name).read_bytes()
        assert data.endswith(b"\n") and b"\r" not in data and not data.startswith(b"\xef\xbb\xbf")
        assert all(isinstance(json.loads(line), dict) for line in data.decode().splitlines())
