"""Agreement and the length baseline, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.agreement import Judgements, LengthBaseline
from data.records import Message, Preference


def _pair(prompt: str, chosen: str, rejected: str, votes: tuple[int, int] | None = None) -> Preference:
    message = Message(role="user", content=prompt)
    return Preference(prompt=(message,), id="0", group="0", chosen=chosen, rejected=rejected, votes=votes)


def _gathered(*pairs: Preference) -> Judgements:
    judgements = Judgements()
    for pair in pairs:
        judgements.add(pair)
    return judgements


def test_both_orders_are_one_pair() -> None:
    first, second = _pair("q", "a", "b"), _pair("q", "b", "a")
    judgements = _gathered(first, first, second)
    assert judgements.of(first) == (2, 1)
    assert judgements.of(second) == (1, 2)


def test_votes_count_as_judgements() -> None:
    pair = _pair("q", "a", "b", (3, 2))
    judgements = _gathered(pair)
    assert judgements.of(pair) == (3, 2)
    # Of the 10 couples among 5 judgements, 3 + 1 agree.
    assert judgements.summary()["mean"] == pytest.approx(0.4)


def test_a_single_judgement_says_nothing_of_agreement() -> None:
    assert _gathered(_pair("q", "a", "b")).summary() == {
        "pairs_judged_more_than_once": 0,
        "contradicted_pairs": 0,
        "mean": None,
        "alpha": None,
    }


def test_other_prompts_are_other_pairs() -> None:
    assert _gathered(_pair("q", "a", "b"), _pair("r", "b", "a")).summary()["contradicted_pairs"] == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_alpha_against_the_coincidence_matrix(units: list[tuple[int, int]]) -> None:
    """Krippendorff's own route: coincidences o[c, k] over couples of judgements in a unit."""
    judgements = Judgements({str(n): [a, b] for n, (a, b) in enumerate(units)})
    coincidence = np.zeros((2, 2))
    for a, b in units:
        values = [0] * a + [1] * b
        for i, left in enumerate(values):
            for j, right in enumerate(values):
                if i != j:
                    coincidence[left, right] += 1 / (len(values) - 1)
    n, totals = coincidence.sum(), coincidence.sum(axis=1)
    found = judgements.summary()["alpha"]
    if n == 0 or totals[0] * totals[1] == 0:
        assert found is None
    else:
        expected = 1 - (n - 1) * coincidence[0, 1] / (totals[0] * totals[1])
        assert found == pytest.approx(expected, abs=1e-6)


def test_length_baseline_takes_the_better_rule_and_halves_ties() -> None:
    baseline = LengthBaseline()
    for chosen, rejected in ((1, 2), (1, 3), (5, 2), (4, 4)):
        baseline.add(chosen, rejected)
    assert baseline.summary() == {"n": 4, "rule": "shorter", "accuracy": 0.625, "longer_chosen": 0.25}
    assert LengthBaseline().summary()["accuracy"] is None
