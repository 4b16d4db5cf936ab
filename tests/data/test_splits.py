"""Splits by prompt group: whole groups, stable places, guaranteed minimum."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import PARTS, DataParams
from data.errors import DataError
from data.splits import assign, intervals, minimum_pairs, position

EVEN = {"train": 0.25, "judge": 0.25, "validation": 0.25, "test": 0.25}


def _held(sizes: dict[str, int], parts: dict[str, str]) -> Counter[str]:
    held: Counter[str] = Counter()
    for group, part in parts.items():
        held[part] += sizes[group]
    return held


def test_positions_are_uniform_and_of_seed_and_group() -> None:
    found = [position(f"g{n}", 0) for n in range(4000)]
    assert all(0 <= u < 1 for u in found)
    assert abs(sum(found) / 4000 - 0.5) < 4 * (1 / 12 / 4000) ** 0.5
    assert position("g1", 0) == position("g1", 0) != position("g1", 1)
    assert position("g1", 0) == int(hashlib.sha256(b"0:g1").hexdigest()[:13], 16) / 16**13


def test_large_data_gets_its_shares() -> None:
    sizes = {f"g{n}": 1 for n in range(20_000)}
    held = _held(sizes, assign(sizes, DataParams(), 0))
    for part, share in (("train", 0.45), ("judge", 0.30), ("validation", 0.12), ("test", 0.13)):
        assert abs(held[part] - 20_000 * share) < 5 * (20_000 * share * (1 - share)) ** 0.5


def test_old_groups_stay_when_data_grows_and_order_is_no_matter() -> None:
    small = {f"g{n}": 1 for n in range(3000)}
    large = {f"g{n}": 1 for n in reversed(range(6000))}
    before, after = assign(small, DataParams(), 7), assign(large, DataParams(), 7)
    assert all(after[group] == part for group, part in before.items())


def test_the_seed_moves_groups() -> None:
    sizes = {f"g{n}": 1 for n in range(1000)}
    assert assign(sizes, DataParams(), 0) != assign(sizes, DataParams(), 1)


def test_minimum_by_hand() -> None:
    assert minimum_pairs(800, 4, 100) == 100
    assert minimum_pairs(799, 4, 100) == 99
    assert minimum_pairs(3, 4, 100) == 1


@pytest.mark.parametrize("seed", range(20))
def test_eight_hundred_pairs_give_a_hundred_to_each_held_out_part(seed: int) -> None:
    sizes = {f"g{n}": 2 for n in range(400)}
    held = _held(sizes, assign(sizes, DataParams(), seed))
    assert all(held[part] >= 100 for part in PARTS)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=8, max_size=40), st.integers(0, 5))
def test_small_data_fills_every_part(counts: list[int], seed: int) -> None:
    sizes = {f"g{n}": count for n, count in enumerate(counts)}
    parts = assign(sizes, DataParams(splits=EVEN), seed)  # type: ignore[arg-type]
    assert set(parts) == set(sizes)
    held = _held(sizes, parts)
    assert min(held[part] for part in PARTS) >= min(1, minimum_pairs(sum(counts), 4, 100))


def test_four_groups_fill_four_parts() -> None:
    for seed in range(30):
        assert sorted(assign(dict.fromkeys("abcd", 1), DataParams(), seed).values()) == sorted(PARTS)


def test_a_part_without_share_stays_empty() -> None:
    shares = {"train": 0.8, "judge": 0.0, "validation": 0.2, "test": 0.0}
    params = DataParams(splits=shares)  # type: ignore[arg-type]
    assert set(assign({f"g{n}": 1 for n in range(50)}, params, 0).values()) == {"train", "validation"}
    assert list(intervals(params.splits).values())[-1][1] == 1.0


def test_too_few_or_too_large_groups_are_an_error_that_names_the_remedy() -> None:
    with pytest.raises(DataError, match=r"3 prompt groups .* data.group_by: prompt"):
        assign(dict.fromkeys("abc", 5), DataParams(), 0)
    assert assign({}, DataParams(), 0) == {}
