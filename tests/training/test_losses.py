"""Losses: literals with their derivation, a second witness over random inputs, and what autograd must say."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import witness
from training import kl, losses

SEEDS = st.integers(0, 10**6)
PROPERTY = settings(max_examples=20, deadline=None, derandomize=True, database=None)
POISON = (math.nan, math.inf, -math.inf, 1e30)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(*values: float) -> Tensor:
    return f64(*values)[None]


def whole(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def answers(*pairs: tuple[float, int]) -> tuple[Tensor, Tensor]:
    """logp and mask of answers, given as (sum, tokens): the sum spread evenly, rows padded with 99."""
    longest = max(tokens for _, tokens in pairs)
    logp = torch.full((len(pairs), longest), 99.0, dtype=torch.float64)
    mask = torch.zeros((len(pairs), longest), dtype=torch.bool)
    for n, (total, tokens) in enumerate(pairs):
        logp[n, :tokens] = total / tokens
        mask[n, :tokens] = True
    return logp, mask


# -- supervised and reward models ----------------------------------------------------------------------------


def test_cross_entropy_by_hand() -> None:
    # counted: -1, -2, -4; 7 / 3 tokens
    logp = torch.tensor([[-1.0, -2.0, math.nan], [-4.0, -9.0, -9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = losses.cross_entropy(logp, mask, count=3)
    assert found.loss.item() == pytest.approx(7 / 3)
    assert found.terms.tolist() == [[1, 2, 0], [4, 0, 0]] and not found.terms.requires_grad
    found.loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [[-1 / 3, -1 / 3, 0], [-1 / 3, 0, 0]]


@PROPERTY
@given(seed=SEEDS)
def test_cross_entropy_against_the_witness(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logp, mask = -rng.exponential(2, (4, 6)), rng.random((4, 6)) < 0.6
    found = losses.cross_entropy(torch.tensor(logp), torch.tensor(mask), count=7.0).loss.item()
    assert found == pytest.approx(witness.cross_entropy(logp, mask, 7.0), abs=1e-10)


def ranked(chosen: float, rejected: float, margin: float = 0.0, **setting: float) -> losses.RewardLoss:
    return losses.bradley_terry(f64(chosen), f64(rejected), f64(margin), f64(1.0), count=1, **setting)


def test_bradley_terry_by_hand() -> None:
    # ln(1 + e^-.8) = .37110067; margin .5: ln(1 + e^-.3) = .55435524; centring .01 * 1.2^2 = .0144
    assert ranked(1.0, 0.2).loss.item() == pytest.approx(0.37110067, abs=1e-8)
    assert ranked(1.0, 0.2, 0.5).loss.item() == pytest.approx(0.55435524, abs=1e-8)
    centred = ranked(1.0, 0.2, centring=0.01).loss.item()
    assert centred - ranked(1.0, 0.2).loss.item() == pytest.approx(0.0144, abs=1e-12)
    # smoothing .1 adds .1 * gap, since -log sigma(-g) = g - log sigma(g): .37110067 + .08
    assert ranked(1.0, 0.2, smoothing=0.1).loss.item() == pytest.approx(0.45110067, abs=1e-8)


def test_bradley_terry_does_not_see_a_shift_of_both() -> None:
    assert ranked(101.0, 100.2, 0.5).loss.item() == pytest.approx(
        ranked(1.0, 0.2, 0.5).loss.item(), abs=1e-12
    )


def test_a_tie_counts_half_and_the_margin_does_not_move_the_gap() -> None:
    chosen, rejected = f64(1.0, 0.3, 0.0).requires_grad_(), f64(0.4, 0.3, 2.0)
    found = losses.bradley_terry(chosen, rejected, f64(5.0, 5.0, 5.0), f64(1, 1, 1), count=3)
    assert found.correct.tolist() == [1.0, 0.5, 0.0]
    assert found.gap.tolist() == pytest.approx([0.6, 0.0, -2.0])
    assert not found.correct.requires_grad and not found.gap.requires_grad


@PROPERTY
@given(seed=SEEDS)
def test_bradley_terry_against_the_witness(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (4, 3) if seed % 2 else (5,)  # heads, or one score
    chosen, rejected = rng.normal(size=shape), rng.normal(size=shape)
    margin, weight = rng.random(shape), rng.random(shape) * (rng.random(shape) < 0.7)
    found = losses.bradley_terry(
        *(torch.tensor(x) for x in (chosen, rejected, margin, weight)),
        centring=0.03,
        smoothing=0.2,
        count=3.5,
    )
    expected = witness.bradley_terry(chosen, rejected, margin, weight, 0.03, 0.2, 3.5)
    assert found.loss.item() == pytest.approx(expected, abs=1e-10)


def test_process_reward_by_hand() -> None:
    # step scores 1 (right), -2 (half right), 0 (wrong): ln(1 + e^-1) + (.5 ln(1 + e^2) + .5 ln(1 + e^-2)) +
    # ln 2
    score = row(1.0, math.nan, -2.0, 0.0).requires_grad_()
    mask = torch.tensor([[True, False, True, True]])
    found = losses.process_reward(score, row(1.0, math.nan, 0.5, 0.0), mask, count=3)
    expected = (
        math.log1p(math.exp(-1)) + 0.5 * (math.log1p(math.exp(2)) + math.log1p(math.exp(-2))) + math.log(2)
    )
    assert found.loss.item() == pytest.approx(expected / 3, abs=1e-12)
    assert not found.terms.requires_grad
    found.loss.backward()
    # d/ds of the cross-entropy is sigma(s) - y
    assert score.grad is not None
    sigma = [1 / (1 + math.exp(-s)) for s in (1.0, -2.0, 0.0)]
    assert score.grad.tolist()[0] == pytest.approx(
        [(sigma[0] - 1) / 3, 0.0, (sigma[1] - 0.5) / 3, sigma[2] / 3], abs=1e-12
    )


@PROPERTY
@given(seed=SEEDS)
def test_process_reward_against_the_witness(seed: int) -> None:
    rng = np.random.default_rng(seed)
    score, label, mask = rng.normal(size=(3, 4)), rng.random((3, 4)), rng.random((3, 4)) < 0.6
    found = losses.process_reward(torch.tensor(score), torch.tensor(label), torch.tensor(mask), count=4.0)
    assert found.loss.item() == pytest.approx(witness.process_reward(score, label, mask, 4.0), abs=1e-10)


# -- preferences ---------------------------------------------------------------------------------------------

# logp -10 over 5 tokens and -12 over 6, reference -11 and -11.5: log ratios 1 and -.5, h = 1.5, beta .1
LOGP, MASK = answers((-10.0, 5), (-12.0, 6))
REF_LOGP, _ = answers((-11.0, 5), (-11.5, 6))
ONE = f64(1.0)
SETTINGS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.1},
    "online_dpo": {"beta": 0.1},
    "cdpo": {"beta": 0.1, "smoothing": 0.1},
    "robust_dpo": {"beta": 0.1, "smoothing": 0.1},
    "ipo": {"beta": 0.1},
    "ipo_average": {"beta": 0.1},
    "hinge": {"beta": 0.1},
    "kto": {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0},
    "orpo": {"lam": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0},
}
BY_HAND = {
    "dpo": 0.62095705,  # ln(1 + e^-.15)
    "online_dpo": 0.62095705,
    "cdpo": 0.63595705,  # .62095705 + .1 * .15
    "robust_dpo": 0.60220705,  # (.9 * .62095705 - .1 * .77095705) / .8
    "ipo": 12.25,  # (1.5 - 5)^2
    "ipo_average": 22.24694444,  # (1/5 + .5/6 - 5)^2
    "hinge": 0.85,  # 1 - .15
    "kto": (0.48001066 + 0.48250714) / 2,  # 1 - sigma(.1 (1 - .2)) and 1 - sigma(.1 (.2 + .5))
    "orpo": 2.06931472,  # averages -2 and -2: equal odds, 2 + .1 ln 2
    "simpo": 1.31326169,  # averages -2 and -2: ln(1 + e^1)
}


def preference(
    name: str, logp: Tensor, ref_logp: Tensor, mask: Tensor, **setting: object
) -> losses.PreferenceLoss:
    function = losses.PREFERENCE_LOSSES[name]
    given_arguments: dict[str, object] = {
        "logp": logp,
        "ref_logp": ref_logp,
        "mask": mask,
        "weight": torch.ones(len(logp) // 2, dtype=torch.float64),
        "kl": torch.tensor(0.2, dtype=torch.float64),
        "count": len(logp) / 2,
        **SETTINGS[name],
        **setting,
    }
    wanted = losses.needs(function)
    return function(**{key: value for key, value in given_arguments.items() if key in wanted})


def test_every_loss_has_a_literal() -> None:
    assert set(losses.PREFERENCE_LOSSES) == set(BY_HAND) == set(SETTINGS)


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_preference_losses_by_hand(name: str) -> None:
    assert preference(name, LOGP, REF_LOGP, MASK).loss.item() == pytest.approx(BY_HAND[name], abs=1e-8)


def test_the_reference_belongs_into_dpo() -> None:
    # The snippet without a reference gives ln(1 + e^-(.1 * 2)) = .59813887
    found = preference("dpo", LOGP, REF_LOGP, MASK).loss.item()
    assert math.log1p(math.exp(-0.2)) == pytest.approx(0.59813887, abs=1e-8)
    assert abs(found - 0.59813887) > 0.02


@pytest.mark.parametrize("name", ["dpo", "cdpo", "robust_dpo", "online_dpo"])
def test_dpo_starts_at_ln_2(name: str) -> None:
    assert preference(name, LOGP, LOGP, MASK).loss.item() == pytest.approx(0.69314718, abs=1e-8)


def test_simpo_by_hand() -> None:
    # averages -2 and -1.5: ln(1 + e^(1 + 1)) = 2.12692801
    logp, mask = answers((-10.0, 5), (-12.0, 8))
    assert preference("simpo", logp, logp, mask).loss.item() == pytest.approx(2.12692801, abs=1e-8)
    found = preference("simpo", logp, logp, mask)
    assert (found.chosen_reward.item(), found.rejected_reward.item()) == (-4.0, -3.0)


def test_orpo_by_hand() -> None:
    # averages -2 and -1.5: odds e^-2/(1-e^-2) = .15651764, e^-1.5/(1-e^-1.5) = .28721692, log ratio
    # -.60707...; 2 + .1 ln(1 + .28721692/.15651764) = 2 + .1 ln 2.83504499
    logp, mask = answers((-10.0, 5), (-12.0, 8))
    found = preference("orpo", logp, logp, mask)
    odds = [math.exp(a) / (1 - math.exp(a)) for a in (-2.0, -1.5)]
    assert odds == pytest.approx([0.15651764, 0.28721692], abs=1e-8)
    assert found.loss.item() == pytest.approx(2 + 0.1 * math.log(2.83504499), abs=1e-8)
    assert (found.chosen_reward.item(), found.rejected_reward.item()) == (-2.0, -1.5)


def test_orpo_survives_a_certain_answer() -> None:
    # An average of 0 counts as -1e-6 in the odds: log odds = -1e-6 - ln(1 - e^-1e-6) = 13.81551...
    logp = torch.tensor([[0.0], [-1.0]], dtype=torch.float64, requires_grad=True)
    found = preference("orpo", logp, logp, whole(logp))
    found.loss.backward()
    assert logp.grad is not None and logp.grad.isfinite().all()
    log_odds = 13.815510 - (-1 - math.log(1 - math.exp(-1)))
    assert found.loss.item() == pytest.approx(0.1 * math.log1p(math.exp(-log_odds)), abs=1e-9)


def test_hinge_is_flat_beyond_its_margin() -> None:
    assert preference("hinge", LOGP, REF_LOGP, MASK, beta=0.8).loss.item() == 0.0


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_weights_and_count_by_hand(name: str) -> None:
    # The same pair twice, with weights 1 and 3, over 8
    twice = [torch.cat([x, x]) for x in (LOGP, REF_LOGP, MASK)]
    found = preference(name, *twice, weight=f64(1, 3), count=8)
    assert found.loss.item() == pytest.approx(BY_HAND[name] / 2, abs=1e-8)


def test_implicit_rewards_by_hand() -> None:
    for name in ("dpo", "cdpo", "robust_dpo", "ipo", "hinge", "kto"):
        found = preference(name, LOGP.clone().requires_grad_(), REF_LOGP, MASK)
        assert (found.chosen_reward.item(), found.rejected_reward.item()) == pytest.approx((0.1, -0.05))
    found = preference("ipo_average", LOGP, REF_LOGP, MASK)
    assert (found.chosen_reward.item(), found.rejected_reward.item()) == pytest.approx((0.02, -0.05 / 6))


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_implicit_rewards_are_given_pair_by_pair(name: str) -> None:
    sums = ((-10.0, 5), (-12.0, 6), (-3.0, 1), (-4.0, 2), (-7.0, 3), (-2.0, 4))
    logp, mask = answers(*sums)
    ref_logp = logp + 1.0
    together = preference(name, logp, ref_logp, mask)
    for pair in range(3):
        rows = slice(2 * pair, 2 * pair + 2)
        alone = preference(name, logp[rows], ref_logp[rows], mask[rows])
        assert together.chosen_reward[pair] == alone.chosen_reward[0]
        assert together.rejected_reward[pair] == alone.rejected_reward[0]
    assert len(together.chosen_reward) == len(together.rejected_reward) == 3


@pytest.mark.parametrize("name", sorted(BY_HAND))
@PROPERTY
@given(seed=SEEDS)
def test_preference_losses_against_the_witness(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logp, ref_logp = -rng.exponential(1, (6, 5)), -rng.exponential(1, (6, 5))
    mask, weight = rng.random((6, 5)) < 0.7, rng.random(3)
    setting: dict[str, float] = {
        "beta": float(rng.uniform(0.05, 2)),
        "smoothing": float(rng.uniform(0, 0.4)),
        "gamma": float(rng.uniform(0, 2)),
        "lam": float(rng.uniform(0, 2)),
        "desirable": float(rng.uniform(0.5, 2)),
        "undesirable": float(rng.uniform(0.5, 2)),
    }
    z = float(rng.normal())
    found = preference(
        name,
        *(torch.tensor(x) for x in (logp, ref_logp, mask)),
        weight=torch.tensor(weight),
        kl=torch.tensor(z, dtype=torch.float64),
        count=2.5,
        **setting,
    )
    expected = witness.preference(name, logp, ref_logp, mask, weight, 2.5, kl=z, **setting)
    assert found.loss.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_preference_losses_do_not_see_padding_or_splits(name: str) -> None:
    rng = np.random.default_rng(3)
    mask = torch.tensor(rng.random((6, 5)) < 0.7)
    clean = torch.tensor(-rng.exponential(1, (6, 5))).requires_grad_()
    ref_logp = torch.tensor(-rng.exponential(1, (6, 5)))
    at_once = preference(name, clean, ref_logp, mask)
    (expected,) = torch.autograd.grad(at_once.loss, clean)
    assert not at_once.chosen_reward.requires_grad and not at_once.rejected_reward.requires_grad
    for poison in POISON:
        logp = torch.where(mask, clean.detach(), poison).requires_grad_()
        other = torch.where(mask, ref_logp, poison)
        parts = [preference(name, logp[r], other[r], mask[r], count=3) for r in (slice(0, 2), slice(2, 6))]
        loss = torch.stack([part.loss for part in parts]).sum()
        assert loss.item() == pytest.approx(at_once.loss.item(), rel=1e-12)
        (found,) = torch.autograd.grad(loss, logp)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_preference_gradients_against_finite_differences(name: str) -> None:
    rng = np.random.default_rng(5)
    logp = torch.tensor(-rng.exponential(1, (4, 3)), requires_grad=True)
    ref_logp, mask = torch.tensor(-rng.exponential(1, (4, 3))), torch.tensor(rng.random((4, 3)) < 0.8)
    assert torch.autograd.gradcheck(lambda x: preference(name, x, ref_logp, mask).loss, (logp,))


def test_kto_without_pairs_by_hand() -> None:
    # log ratios 1 (wanted), -.5 (unwanted), z .2: .48001066 and .48250714, weighed 2 * 1.5 and 1 * .5, over 4
    found = losses.kto(
        LOGP, REF_LOGP, MASK, f64(2.0, 1.0), torch.tensor([True, False]), f64(0.2)[0],
        beta=0.1, desirable=1.5, undesirable=0.5, count=4,
    )  # fmt: skip
    assert found.terms.tolist() == pytest.approx([0.48001066, 0.48250714], abs=1e-8)
    assert found.loss.item() == pytest.approx((3 * 0.48001066 + 0.5 * 0.48250714) / 4, abs=1e-8)
    plain = losses.kto(
        LOGP, REF_LOGP, MASK, f64(1, 1), torch.tensor([True, True]), f64(0.0)[0], beta=0.1, count=1
    )
    assert plain.loss.item() == pytest.approx(
        2 - 1 / (1 + math.exp(-0.1)) - 1 / (1 + math.exp(0.05)), abs=1e-9
    )


def test_kto_weighs_both_kinds_once_by_default() -> None:
    rows = torch.tensor([True, False])
    default = losses.kto(LOGP, REF_LOGP, MASK, f64(1, 1), rows, f64(0.2)[0], beta=0.1, count=2)
    assert default.loss.item() == pytest.approx(BY_HAND["kto"], abs=1e-8)


def test_kto_pair_weighs_both_sides_once_by_default() -> None:
    default = losses.kto_pair(LOGP, REF_LOGP, MASK, ONE, f64(0.2)[0], beta=0.1, count=1)
    assert default.loss.item() == pytest.approx(BY_HAND["kto"], abs=1e-8)


def test_the_reference_point_of_kto_is_not_negative_and_carries_no_gradient() -> None:
    z = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    logp = LOGP.clone().requires_grad_()
    for wanted in (True, False):
        rows = torch.tensor([wanted, wanted])
        below = losses.kto(logp, REF_LOGP, MASK, f64(1, 1), rows, z, beta=0.1, count=1)
        zero = losses.kto(logp, REF_LOGP, MASK, f64(1, 1), rows, f64(0.0)[0], beta=0.1, count=1)
        assert below.loss.item() == zero.loss.item()
        assert not below.terms.requires_grad
    above = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    found = losses.kto(logp, REF_LOGP, MASK, f64(1, 1), torch.tensor([True, False]), above, beta=0.1, count=1)
    assert torch.autograd.grad(found.loss, above, allow_unused=True)[0] is None


# -- aggregation ---------------------------------------------------------------------------------------------


def added(name: str, token_losses: Tensor, mask: Tensor, length: int = 10) -> float:
    function = losses.AGGREGATIONS[name]
    setting = {"length": length} if "length" in losses.needs(function) else {}
    weight, units = function(mask, dtype=torch.float64, **setting)
    return float((token_losses * weight).sum() / units)


@pytest.mark.parametrize(
    ("name", "expected"),
    # losses 1 1 1 1 10 (sum 14, mean 2.8) and 1 x 9, 10 (sum 19, mean 1.9)
    [("sequence_mean", 2.35), ("token_mean", 33 / 15), ("fixed_length", 1.65), ("sequence_sum", 16.5)],
)
def test_aggregation_by_hand(name: str, expected: float) -> None:
    token_losses = torch.tensor([[1.0] * 4 + [10.0] + [77.0] * 5, [1.0] * 9 + [10.0]], dtype=torch.float64)
    mask = token_losses != 77.0
    assert added(name, token_losses, mask) == pytest.approx(expected, abs=1e-12)
    # An answer without counted tokens (its scorer failed, its group was dropped) is not an answer.
    empty = torch.zeros((1, 10), dtype=torch.bool)
    wider = torch.cat([token_losses, token_losses[:1]])
    assert added(name, wider, torch.cat([mask, empty])) == pytest.approx(expected, abs=1e-12)


def test_an_answer_of_one_token_is_its_own_mean() -> None:
    # 5 and the mean of 1 and 2
    token_losses = torch.tensor([[5.0, 77.0], [1.0, 2.0]], dtype=torch.float64)
    assert added("sequence_mean", token_losses, token_losses != 77.0) == pytest.approx(3.25, abs=1e-12)


@pytest.mark.parametrize("name", sorted(losses.AGGREGATIONS))
@PROPERTY
@given(seed=SEEDS)
def test_aggregation_against_the_witness(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    token_losses, mask = rng.normal(size=(4, 6)), rng.random((4, 6)) < 0.6
    mask[0, 0] = True
    found = added(name, torch.tensor(token_losses), torch.tensor(mask), 8)
    assert found == pytest.approx(witness.aggregate(name, token_losses, mask, 8), abs=1e-10)


def test_a_mean_of_means_is_not_the_token_mean() -> None:
    # Micro batches of losses [1, 1] and [3] x 8: means 1 and 3, mean of means 2; with the global count 26/10
    count, parts = 0.0, []
    for token_losses in (row(1, 1), row(*[3] * 8)):
        weight, units = losses.token_mean(whole(token_losses), dtype=torch.float64)
        count += float(units)
        parts.append((token_losses, weight))
    assert sum(float((x * w).sum()) for x, w in parts) / count == pytest.approx(2.6, abs=1e-12)


@pytest.mark.parametrize("name", sorted(losses.AGGREGATIONS))
def test_token_weights_are_float32_unless_told(name: str) -> None:
    setting = {"length": 4} if name == "fixed_length" else {}
    assert losses.AGGREGATIONS[name](whole(row(1.0, 2.0)), **setting).token_weight.dtype == torch.float32


def test_names_cover_each_other() -> None:
    assert set(losses.POLICY_LOSSES) == set(losses.AGGREGATION_OF)
    assert set(losses.AGGREGATION_OF.values()) == set(losses.AGGREGATIONS)
    assert {
        "rloo": "sequence_sum",
        "dr_grpo": "fixed_length",
        "dapo": "token_mean",
        "grpo": "sequence_mean",
    }.items() <= (losses.AGGREGATION_OF.items())


# -- policy --------------------------------------------------------------------------------------------------


def clipped(
    ratios: Tensor, advantage: Tensor, dual: float = math.inf, low: float = 0.2, high: float = 0.2
) -> Tensor:
    """Token losses of the clipped loss at given ratios, each alone."""
    out = [
        losses.clipped_policy(
            row(math.log(r)), row(0.0), row(a), whole(row(0.0)), row(1.0),
            clip_low=low, clip_high=high, dual_clip=dual, count=1,
        ).loss
        for r, a in zip(ratios.tolist(), advantage.tolist(), strict=True)
    ]  # fmt: skip
    return torch.stack(out)


def test_clipped_policy_by_hand() -> None:
    # By token: -min(1.3, 1.2), -min(.7, .8), -min(-1.3, -1.2), -min(-.7, -.8)
    found = clipped(f64(1.3, 0.7, 1.3, 0.7), f64(1, 1, -1, -1))
    assert found.tolist() == pytest.approx([-1.2, -0.7, 1.3, 0.8], abs=1e-12)


def test_clip_higher_by_hand() -> None:
    # DAPO's .2 / .28: ratio 1.25 is free, 1.3 counts as 1.28, .7 with A < 0 as .8
    found = clipped(f64(1.25, 1.3, 0.7), f64(1, 1, -1), low=0.2, high=0.28)
    assert found.tolist() == pytest.approx([-1.25, -1.28, 0.8], abs=1e-12)


def test_dual_clip_by_hand() -> None:
    # ratio 4, A -1: 4 without, at most 3 with c = 3; no effect on A > 0 or A = 0
    assert clipped(f64(4.0), f64(-1.0)).item() == pytest.approx(4.0, abs=1e-12)
    default = losses.clipped_policy(
        row(math.log(4)), row(0), row(-1), whole(row(0)), row(1), clip_low=0.2, clip_high=0.2, count=1
    )
    assert default.loss.item() == pytest.approx(4.0, abs=1e-12)
    assert clipped(f64(4.0, 2.0, 0.5, 4.0), f64(-1, -1, 2, 0), dual=3.0).tolist() == pytest.approx(
        [3.0, 2.0, -1.0, 0.0], abs=1e-12
    )


def test_gspo_by_hand() -> None:
    # log ratios .02, -.01, .05: exp(.06/3) = 1.02020134; the product would be e^.06 = 1.06183655
    old_logp = row(-1.0, -2.0, -3.0, -9.0)
    logp = old_logp + row(0.02, -0.01, 0.05, 4.0)
    mask = torch.tensor([[True, True, True, False]])
    weight, units = losses.sequence_mean(mask, dtype=torch.float64)
    found = losses.gspo(logp, old_logp, row(2.0), mask, weight, clip_low=0.2, clip_high=0.2, count=units)
    assert found.ratio[0, 0].item() == pytest.approx(1.02020134, abs=1e-8)
    assert found.loss.item() == pytest.approx(-2 * 1.02020134, abs=1e-7)
    # beyond the clip range: 1 + 3e-4
    narrow = losses.gspo(logp, old_logp, row(2.0), mask, weight, clip_low=3e-4, clip_high=4e-4, count=units)
    assert narrow.loss.item() == pytest.approx(-2 * 1.0004, abs=1e-12)
    assert narrow.clipped.tolist() == [[True, True, True, False]]


def test_cispo_by_hand() -> None:
    # weight clip(1.6, ., 1.28) = 1.28, A 1, log pi -.5: -1.28 * -.5 = .64; gradient -1.28 although it is
    # clipped
    logp = row(-0.5, -0.5).requires_grad_()
    old_logp = row(-0.5 - math.log(1.6), -0.5 - math.log(0.1))
    mask = whole(logp)
    found = losses.cispo(logp, old_logp, row(1.0, 1.0), mask, row(1.0, 0.0), clip_high=0.28, count=1)
    assert found.loss.item() == pytest.approx(0.64, abs=1e-12)
    assert torch.autograd.grad(found.loss, logp)[0].tolist() == [pytest.approx([-1.28, 0.0], abs=1e-12)]
    assert found.clipped.tolist() == [[True, False]]
    assert found.ratio.tolist() == [pytest.approx([1.6, 0.1])] and not found.ratio.requires_grad
    # the lower side is open unless it is set: ratio .1 stays .1, or becomes .8
    low = losses.cispo(logp, old_logp, row(1.0, 1.0), mask, row(0.0, 1.0), clip_high=0.28, count=1)
    assert low.loss.item() == pytest.approx(0.05, abs=1e-12)
    low = losses.cispo(logp, old_logp, row(1, 1), mask, row(0, 1), clip_low=0.2, clip_high=0.28, count=1)
    assert low.loss.item() == pytest.approx(0.4, abs=1e-12)


POLICY_SETTING: dict[str, float] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}


def policy(
    name: str, logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, count: float = 7.0
) -> losses.PolicyLoss:
    function = losses.POLICY_LOSSES[name]
    setting = {key: value for key, value in POLICY_SETTING.items() if key in losses.needs(function)}
    weight = losses.token_mean(mask, dtype=torch.float64).token_weight
    return function(logp, old_logp, advantage, mask, weight, count=count, **setting)


FORMULAS = ("ppo", "gspo", "cispo")


@pytest.mark.parametrize("name", FORMULAS)
@PROPERTY
@given(seed=SEEDS)
def test_policy_losses_against_the_witness(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old_logp = -rng.exponential(1, (4, 5))
    logp, mask = old_logp + rng.normal(0, 0.4, (4, 5)), rng.random((4, 5)) < 0.7
    advantage = rng.normal(size=(4, 1) if name == "gspo" or seed % 2 else (4, 5))
    found = policy(name, *(torch.tensor(x) for x in (logp, old_logp, advantage, mask)))
    low, high, dual = POLICY_SETTING.values()
    tokens = witness.policy_tokens(name, logp, old_logp, advantage, mask, low, high, dual)
    assert found.loss.item() == pytest.approx(tokens.sum() / 7.0, abs=1e-10)


@pytest.mark.parametrize("name", FORMULAS)
def test_before_the_first_update_every_policy_loss_is_the_policy_gradient(name: str) -> None:
    logp = row(-1.0, -0.3, -2.0).requires_grad_()
    advantage = row(0.7) if name == "gspo" else row(0.7, -0.2, 1.5)
    found = policy(name, logp, logp, advantage, whole(logp), count=1.0)
    assert found.ratio.tolist() == [[1.0, 1.0, 1.0]] and not found.clipped.any()
    (gradient,) = torch.autograd.grad(found.loss, logp)
    torch.testing.assert_close(gradient, -advantage.expand(1, 3))


@pytest.mark.parametrize("name", FORMULAS)
def test_old_logp_and_advantage_carry_no_gradient(name: str) -> None:
    logp, old_logp = row(-1.0, -0.3).requires_grad_(), row(-1.1, -0.4).requires_grad_()
    advantage = row(0.7).requires_grad_()
    found = policy(name, logp, old_logp, advantage, whole(logp))
    for constant in (old_logp, advantage):
        assert torch.autograd.grad(found.loss, constant, allow_unused=True, retain_graph=True)[0] is None
    assert not found.ratio.requires_grad and not found.clipped.requires_grad


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("poison", POISON)
def test_policy_losses_do_not_see_padding_or_splits(name: str, poison: float) -> None:
    rng = np.random.default_rng(11)
    old_logp, mask = torch.tensor(-rng.exponential(1, (4, 5))), torch.tensor(rng.random((4, 5)) < 0.6)
    mask[2] = False
    clean = (old_logp + torch.tensor(rng.normal(0, 0.4, (4, 5)))).requires_grad_()
    advantage = torch.tensor(rng.normal(size=(4, 1) if name == "gspo" else (4, 5)))
    at_once = policy(name, clean, old_logp, advantage, mask)
    (expected,) = torch.autograd.grad(at_once.loss, clean)
    logp = torch.where(mask, clean.detach(), poison).requires_grad_()
    old = torch.where(mask, old_logp, 0.0)
    bad = advantage if name == "gspo" else torch.where(mask, advantage, poison)
    parts = [policy(name, logp[r], old[r], bad[r], mask[r]) for r in (slice(0, 1), slice(1, 4))]
    loss = parts[0].loss + parts[1].loss
    assert loss.item() == pytest.approx(at_once.loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], expected, rtol=1e-12, atol=1e-14)
    assert not (at_once.clipped & ~mask).any()


def test_clipped_tokens_are_those_without_gradient() -> None:
    logp = row(*(math.log(r) for r in (1.3, 0.7, 1.3, 0.7, 1.1, 4.0, 1.3))).requires_grad_()
    advantage = row(1, 1, -1, -1, 1, -1, 1)
    mask = torch.tensor([[True] * 6 + [False]])
    found = losses.clipped_policy(
        logp, torch.zeros_like(logp), advantage, mask, torch.ones_like(logp),
        clip_low=0.2, clip_high=0.2, dual_clip=3.0, count=1,
    )  # fmt: skip
    assert found.clipped.tolist() == [[True, False, False, True, False, True, False]]
    (gradient,) = torch.autograd.grad(found.loss, logp)
    assert (gradient == 0).tolist() == [[True, False, False, True, False, True, True]]


def test_an_exploding_ratio_leaves_no_nan() -> None:
    logp = torch.tensor([[800.0, -800.0]], requires_grad=True)
    for advantage in (1.0, -1.0):
        found = losses.clipped_policy(
            logp, torch.zeros_like(logp), torch.full((1, 1), advantage), whole(logp), torch.ones_like(logp),
            clip_low=0.2, clip_high=0.2, count=2,
        )  # fmt: skip
        assert found.loss.isfinite() and torch.autograd.grad(found.loss, logp)[0].isfinite().all()


# -- value and entropy ---------------------------------------------------------------------------------------


def valued(value: Tensor, old: Tensor, returns: Tensor, mask: Tensor, count: float = 1.0) -> losses.Loss:
    weight = losses.token_mean(mask, dtype=torch.float64).token_weight
    return losses.value_loss(value, old, returns, mask, weight, clip=0.2, count=count)


def test_value_loss_by_hand() -> None:
    # prediction 1, old .5, return .2: clipped .7; max(.8^2, .5^2) / 2 = .32
    assert valued(row(1.0), row(0.5), row(0.2), whole(row(0))).loss.item() == pytest.approx(0.32, abs=1e-12)
    # falling: prediction 0, old .5, return .4: clipped .3; max(.16, .01) / 2; and return -.1: .3 is worse,
    # .16 / 2
    assert valued(row(0.0), row(0.5), row(0.4), whole(row(0))).loss.item() == pytest.approx(0.08, abs=1e-12)
    assert valued(row(0.0), row(0.5), row(-0.1), whole(row(0))).loss.item() == pytest.approx(0.08, abs=1e-12)


def test_value_loss_weighs_tokens() -> None:
    # .32 with weight .5 and .08 with weight 2, over 4
    found = losses.value_loss(
        row(1, 0), row(0.5, 0.5), row(0.2, 0.4), whole(row(0, 0)), row(0.5, 2.0), clip=0.2, count=4
    )
    assert found.loss.item() == pytest.approx(0.08, abs=1e-12)


@PROPERTY
@given(seed=SEEDS)
def test_value_loss_against_the_witness(seed: int) -> None:
    rng = np.random.default_rng(seed)
    value, old, returns = (rng.normal(0, 0.4, (3, 5)) for _ in range(3))
    mask, weight = rng.random((3, 5)) < 0.7, rng.random((3, 5))
    found = losses.value_loss(
        *(torch.tensor(x) for x in (value, old, returns, mask, weight)), clip=0.15, count=3.0
    )
    expected = witness.value_loss(value, old, returns, mask, weight, 0.15, 3.0)
    assert found.loss.item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("poison", POISON)
def test_value_loss_does_not_see_padding(poison: float) -> None:
    mask = torch.tensor([[True, False]])
    value = row(1.0, poison).requires_grad_()
    old, returns = row(0.5, poison).requires_grad_(), row(0.2, poison).requires_grad_()
    found = valued(value, old, returns, mask)
    assert found.loss.item() == pytest.approx(0.32, abs=1e-12)
    assert found.terms.tolist() == pytest.approx([0.32]) and not found.terms.requires_grad
    assert torch.autograd.grad(found.loss, value, retain_graph=True)[0].tolist() == [
        pytest.approx([0.8, 0.0])
    ]
    for constant in (old, returns):
        assert torch.autograd.grad(found.loss, constant, allow_unused=True, retain_graph=True)[0] is None


def test_entropy_loss_by_hand() -> None:
    # Weighted entropies .5 * 1 + 2 * .5, times -.01, over 3
    entropy = row(0.5, 2.0, math.nan).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    found = losses.entropy_loss(entropy, mask, row(1.0, 0.5, 0.0), coefficient=0.01, count=3)
    assert found.loss.item() == pytest.approx(-0.005, abs=1e-12)
    assert found.terms.tolist() == [[0.5, 2.0, 0.0]] and not found.terms.requires_grad
    assert torch.autograd.grad(found.loss, entropy)[0][0, 2].item() == 0.0


def test_importance_weights_multiply_into_the_token_weights() -> None:
    # pi_old/pi_rollout 3 capped at 2: the token's loss counts twice
    logp, old_logp, rollout = row(-1.0), row(-1.0), row(-1.0 - math.log(3))
    weight = kl.truncated_importance(old_logp, rollout, whole(logp), cap=2.0)
    found = losses.clipped_policy(
        logp, old_logp, row(1.0), whole(logp), weight, clip_low=0.2, clip_high=0.2, count=1
    )
    assert found.loss.item() == pytest.approx(-2.0, abs=1e-12)


LOSSES: list[Callable[..., object]] = [*losses.PREFERENCE_LOSSES.values(), *losses.POLICY_LOSSES.values()]


def test_needs_names_tensors_and_settings() -> None:
    assert losses.needs(losses.simpo) == {"logp", "mask", "weight", "beta", "gamma", "count"}
    assert all({"logp", "mask", "count"} <= losses.needs(function) for function in LOSSES)
