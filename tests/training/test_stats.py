"""Evidence: published or derived numbers, scipy as a second witness, coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as scipy_stats

from data.errors import DataError
from training import stats

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def test_wilson_by_hand() -> None:
    # .56 over 805, z 1.95996398: middle (.56 + z^2/1610)/(1 + z^2/805) = .55971503, half .03420989
    found = stats.wilson(0.56 * 805, 805)
    assert (found.lower, found.upper) == pytest.approx((0.52550514, 0.59392494), abs=1e-8)
    assert found.estimate == pytest.approx(0.56) and found.n == 805


@PROPERTY
@given(n=st.integers(1, 400), share=st.floats(0, 1), confidence=st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_against_scipy(n: int, share: float, confidence: float) -> None:
    wins = round(share * n)
    found = stats.wilson(wins, n, confidence=confidence)
    expected = scipy_stats.binomtest(wins, n).proportion_ci(confidence, method="wilson")
    assert (found.lower, found.upper) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_a_clustered_share_by_hand() -> None:
    # p 1/2 over 6 rows of 3 prompts, totals 2, 0, 1: v = 3/2 (1 + 1 + 0) / 36 = 1/12, n = .25 * 12 = 3
    found = stats.clustered_share([1, 1, 0, 0, 1, 0], ["a", "a", "b", "b", "c", "c"])
    expected = stats.wilson(1.5, 3)
    assert (found.lower, found.upper) == (expected.lower, expected.upper)
    assert (found.estimate, found.n) == (0.5, 6)
    # rows that differ within their prompts and not between them: no wider than independent rows
    even = stats.clustered_share([1, 0, 1, 0], [1, 1, 2, 2], confidence=0.9)
    assert even.lower == stats.wilson(1.0, 2, confidence=0.9).lower, "no variance is seen: prompts count"
    near = stats.clustered_share(
        [1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1], [1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 5]
    )
    assert near.lower == stats.wilson(7, 13).lower


def test_copies_of_a_row_in_its_cluster_tell_nothing_new() -> None:
    rows = [float(number % 3 == 0) for number in range(21)]
    once = stats.clustered_share(rows, range(21))
    copied = stats.clustered_share(
        [row for row in rows for _ in range(5)], [n for n in range(21) for _ in range(5)]
    )
    assert (copied.lower, copied.upper) == pytest.approx((once.lower, once.upper), abs=1e-12)
    assert (once.lower, once.n, copied.n) == (pytest.approx(stats.wilson(20 / 3, 20).lower), 21, 105)


def test_a_cluster_without_variance_counts_as_one() -> None:
    assert stats.clustered_share([1.0] * 40, [n // 10 for n in range(40)]).lower == stats.wilson(4, 4).lower
    assert stats.clustered_share([1, 0, 1], ["a"] * 3).upper == stats.wilson(2 / 3, 1).upper
    with pytest.raises(DataError):
        stats.clustered_share([], [])


def test_a_clustered_interval_covers() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        chance = rng.beta(2, 2, size=60)
        rows = (rng.random((60, 5)) < chance[:, None]).astype(float)
        found = stats.clustered_share(rows.ravel().tolist(), np.repeat(np.arange(60), 5).tolist())
        hits += found.lower <= 0.5 <= found.upper
    assert 0.92 <= hits / 400 <= 0.985  # .9425; a plain Wilson interval of the 300 rows covers .825


def test_win_rate_counts_ties_half() -> None:
    found = stats.win_rate(400, 101, 304)
    assert found == stats.wilson(450.5, 805)
    assert stats.win_rate(0, 10, 0).estimate == 0.5
    assert stats.win_rate(5, 0, 5, confidence=0.5).upper < stats.win_rate(5, 0, 5).upper


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(DataError, match="at least 1 observation"):
        stats.wilson(0, 0)
    with pytest.raises(DataError, match="between 0 and 3"):
        stats.wilson(4, 3)
    with pytest.raises(DataError, match=r"confidence is 95"):
        stats.wilson(1, 3, confidence=95.0)


def test_mcnemar_by_hand() -> None:
    # 2 * sum_{k<=5} C(20, k) / 2^20 = 2 * 21700 / 1048576
    assert stats.mcnemar_exact(15, 5) == pytest.approx(0.04138947, abs=1e-8)
    assert stats.mcnemar_exact(5, 15) == stats.mcnemar_exact(15, 5)
    assert stats.mcnemar_exact(0, 0) == 1.0 and stats.mcnemar_exact(4, 4) == 1.0


@PROPERTY
@given(first=st.integers(0, 60), second=st.integers(0, 60))
def test_mcnemar_against_scipy(first: int, second: int) -> None:
    if first + second:
        expected = scipy_stats.binomtest(first, first + second).pvalue
        assert stats.mcnemar_exact(first, second) == pytest.approx(expected, rel=1e-9)


# -- length control ------------------------------------------------------------------------------------------


def test_length_control_removes_what_length_explains() -> None:
    # Truth: at equal length the candidate loses a little (log odds -.2), each longer answer wins more.
    rng = np.random.default_rng(0)
    difference = rng.normal(60, 80, 4000)
    x = np.tanh(difference / difference.std())
    outcome = (rng.random(4000) < 1 / (1 + np.exp(0.2 - 1.5 * x))).astype(float)
    raw = float(outcome.mean())
    found = stats.length_controlled_win_rate(outcome.tolist(), difference.tolist())
    assert raw > 0.55
    assert found.lower < 1 / (1 + math.exp(0.2)) < found.upper < 0.5
    assert found.slope == pytest.approx(1.5, abs=0.2) and found.n == 4000


def test_length_control_against_scipy() -> None:
    rng = np.random.default_rng(1)
    difference, outcome = rng.normal(10, 30, 60), rng.choice([0.0, 0.5, 1.0], 60)
    x = np.append(np.tanh(difference / difference.std()), 0.0)
    y = np.append(outcome, 0.5)

    def penalised(theta: np.ndarray) -> float:
        z = theta[0] + theta[1] * x
        return float((np.logaddexp(0, z) - y * z).sum() + 0.08 * theta[1] ** 2)

    search = {"tol": 1e-12, "method": "Nelder-Mead", "options": {"maxiter": 4000}}
    best = optimize.minimize(penalised, np.zeros(2), **search).x
    p = 1 / (1 + np.exp(-(best[0] + best[1] * x)))
    design = np.stack([np.ones_like(x), x], 1)
    information = design.T @ (design * (p * (1 - p))[:, None]) + np.diag([0, 0.16])
    spread = 1.959963985 * math.sqrt(float(np.linalg.inv(information)[0, 0]))
    found = stats.length_controlled_win_rate(outcome.tolist(), difference.tolist())
    expected = [1 / (1 + math.exp(-t)) for t in (best[0], best[0] - spread, best[0] + spread)]
    assert list(found[:3]) == pytest.approx(expected, abs=1e-6)
    assert found.slope == pytest.approx(best[1], abs=1e-5)


def test_length_control_of_equal_lengths_is_the_win_rate() -> None:
    outcome = [1.0] * 70 + [0.0] * 30
    found = stats.length_controlled_win_rate(outcome, [0.0] * 100)
    assert found.estimate == pytest.approx(70.5 / 101, abs=1e-9)
    plain = stats.win_rate(70, 0, 30)
    assert (found.lower, found.upper) == pytest.approx((plain.lower, plain.upper), abs=0.01)


def test_wins_that_are_always_longer_prove_nothing() -> None:
    # Every answer is 5 tokens longer: quality and length cannot be told apart, and the interval says so.
    found = stats.length_controlled_win_rate([1.0] * 70 + [0.0] * 30, [5.0] * 100)
    assert found.lower < 0.5 < found.upper


def test_length_control_of_a_clean_sweep_is_finite() -> None:
    longer = [float(n) for n in range(1, 41)]
    found = stats.length_controlled_win_rate([1.0] * 40, longer)
    assert 0 < found.lower < found.estimate < found.upper <= 1
    # Every longer answer wins, every shorter one loses: length explains it all.
    separated = stats.length_controlled_win_rate([1.0] * 20 + [0.0] * 20, [9.0] * 20 + [-9.0] * 20)
    assert separated.estimate == pytest.approx(0.5, abs=1e-6) and separated.slope > 2
    with pytest.raises(DataError, match="length-controlled"):
        stats.length_controlled_win_rate([], [])


def test_a_regression_that_does_not_settle_is_refused() -> None:
    with pytest.raises(DataError, match="did not settle"):
        stats.length_controlled_win_rate([1.0, 0.0], [math.nan, 1.0])


# -- calibration and bootstrap -------------------------------------------------------------------------------


def test_calibration_error_by_hand() -> None:
    # bin [.6, .7): .62 and .68, outcomes 1 and 0: |1 - 1.3|; last bin holds 1.0, outcome .5: |.5 - 1|; .8/3
    assert stats.expected_calibration_error([0.62, 0.68, 1.0], [1, 0, 0.5]) == pytest.approx(0.8 / 3)
    # one bin: |1.5 - 2.3|/3
    assert stats.expected_calibration_error([0.62, 0.68, 1.0], [1, 0, 0.5], bins=1) == pytest.approx(0.8 / 3)
    assert stats.expected_calibration_error([0.1, 0.9], [1, 0], bins=1) == pytest.approx(0.0)
    assert stats.expected_calibration_error([0.1, 0.9], [1, 0]) == pytest.approx(0.9)
    with pytest.raises(DataError):
        stats.expected_calibration_error([], [])


def test_bootstrap_is_paired_seeded_and_clustered() -> None:
    rng = np.random.default_rng(2)
    second = rng.normal(size=300)
    first = second + 0.1 + rng.normal(0, 0.05, 300)
    prompts = list(range(300))
    found = stats.paired_bootstrap(first.tolist(), second.tolist(), prompts, seed=1)
    assert found.estimate == pytest.approx(float((first - second).mean())) and found.n == 300
    # normal theory for the mean of differences with deviation .05: +-1.96 * .05/sqrt(300) = +-.0057
    assert found.upper - found.estimate == pytest.approx(0.0057, abs=0.0012)
    assert found.estimate - found.lower == pytest.approx(0.0057, abs=0.0012)
    assert found == stats.paired_bootstrap(first.tolist(), second.tolist(), prompts, seed=1)
    assert found != stats.paired_bootstrap(first.tolist(), second.tolist(), prompts, seed=2)
    half = stats.paired_bootstrap(first.tolist(), second.tolist(), prompts, seed=1, confidence=0.5)
    assert half.upper - half.lower < found.upper - found.lower


def test_rows_of_one_prompt_are_no_new_evidence() -> None:
    difference = np.random.default_rng(3).normal(0.1, 1, 50)
    once = stats.paired_bootstrap(difference.tolist(), [0.0] * 50, [f"p{n}" for n in range(50)], seed=0)
    repeated = np.repeat(difference, 9)
    names = [f"p{n // 9}" for n in range(450)]
    again = stats.paired_bootstrap(repeated.tolist(), [0.0] * 450, names, seed=0)
    assert (again.lower, again.upper) == pytest.approx((once.lower, once.upper), abs=1e-9)
    unclustered = stats.paired_bootstrap(repeated.tolist(), [0.0] * 450, list(range(450)), seed=0)
    assert unclustered.upper - unclustered.lower < 0.5 * (once.upper - once.lower)


def test_bootstrap_weighs_prompts_by_their_rows() -> None:
    # Two prompts, 3 rows of 1 and 1 row of 0: draws give means 1, 0, or 3/4
    found = stats.paired_bootstrap([1, 1, 1, 0], [0, 0, 0, 0], ["a", "a", "a", "b"], seed=0, samples=500)
    assert (found.lower, found.estimate, found.upper) == (0.0, 0.75, 1.0)
    middle = stats.paired_bootstrap([1, 1, 1, 0], [0] * 4, ["a", "a", "a", "b"], seed=0, confidence=0.2)
    assert (middle.lower, middle.upper) == (0.75, 0.75)


# -- anytime-valid -------------------------------------------------------------------------------------------


def test_log_evidence_by_hand() -> None:
    # 1 win of 1 against 1/2: B(2, 1)/.5 = 1; 2 of 2: B(3, 1)/.25 = 4/3; 1 of 2: B(2, 2)/.25 = 2/3
    for wins, n, expected in ((1, 1, 1.0), (2, 2, 4 / 3), (1, 2, 2 / 3), (0, 0, 1.0)):
        assert stats.log_evidence(wins, n, 0.5) == pytest.approx(math.log(expected), abs=1e-12)


@pytest.mark.parametrize("rate", [0.5, 0.3])
def test_evidence_is_a_fair_bet(rate: float) -> None:
    # E[M_n] = 1 under the rate that is true, summed over all outcomes of 12 trials
    total = sum(
        math.comb(12, k) * rate**k * (1 - rate) ** (12 - k) * math.exp(stats.log_evidence(k, 12, rate))
        for k in range(13)
    )
    assert total == pytest.approx(1.0, abs=1e-10)


def test_confidence_sequence_ends_where_the_evidence_is() -> None:
    found = stats.confidence_sequence(60.5, 100)
    for end in (found.lower, found.upper):
        assert stats.log_evidence(60.5, 100, end) == pytest.approx(math.log(20), abs=1e-6)
    fixed = stats.wilson(60.5, 100)
    assert found.lower < fixed.lower < 0.605 < fixed.upper < found.upper and found.n == 100
    assert stats.confidence_sequence(60.5, 100, confidence=0.8).lower > found.lower
    assert stats.confidence_sequence(0, 5).lower == 0.0 and stats.confidence_sequence(5, 5).upper == 1.0
    assert stats.confidence_sequence(600, 1000).lower > 0.5 > stats.confidence_sequence(6, 10).lower
    with pytest.raises(DataError):
        stats.confidence_sequence(0, 0)


@pytest.mark.parametrize("ties", [0.0, 0.3])
def test_confidence_sequence_covers_at_all_times_at_once(ties: float) -> None:
    # 1,000 streams of 400 outcomes, looked at after every one: at most 5 % may ever leave the truth out.
    rng = np.random.default_rng(4)
    outcome = np.where(rng.random((1000, 400)) < ties, 0.5, rng.random((1000, 400)) < 0.6)
    truth = 0.5 * ties + 0.6 * (1 - ties)
    wins = outcome.cumsum(1)
    evidence = np.vectorize(stats.log_evidence)(wins, np.arange(1, 401), truth)
    missed = float((evidence >= math.log(20)).any(1).mean())
    assert missed <= 0.05
    fixed = np.abs(wins / np.arange(1, 401) - truth) > 1.96 * math.sqrt(0.24) / np.sqrt(np.arange(1, 401))
    assert ties or float(fixed.any(1).mean()) > 0.3  # what looking early at a fixed-n interval does
