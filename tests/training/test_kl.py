"""KL: literals with derivation, a second witness, and what autograd says of estimators as loss or reward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import witness
from training import kl, losses

SEEDS = st.integers(0, 10**6)
PROPERTY = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def whole(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def test_estimators_by_hand() -> None:
    # log pi -1, log pi_ref -1.5: log r = -.5. k1 = .5; k2 = .25/2; k3 = e^-.5 - 1 + .5 = .60653066 - .5
    log_ratios = kl.log_ratio(row(-1.0), row(-1.5), whole(row(0.0)))
    assert kl.k1(log_ratios).item() == pytest.approx(0.5, abs=1e-12)
    assert kl.k2(log_ratios).item() == pytest.approx(0.125, abs=1e-12)
    assert kl.k3(log_ratios).item() == pytest.approx(0.10653066, abs=1e-8)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@PROPERTY
@given(seed=SEEDS)
def test_estimators_against_the_witness(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logp, ref_logp = -rng.exponential(2, (3, 5)), -rng.exponential(2, (3, 5))
    mask = rng.random((3, 5)) < 0.7
    found = kl.KL_ESTIMATORS[name](
        kl.log_ratio(torch.tensor(logp), torch.tensor(ref_logp), torch.tensor(mask))
    )
    for place in np.ndindex(3, 5):
        expected = witness.kl(name, logp[place], ref_logp[place]) if mask[place] else 0.0
        assert found[place].item() == pytest.approx(expected, abs=1e-10)


def test_k3_is_never_negative_in_float32() -> None:
    # Close to r = 1 the plain formula rounds to either side of 0; e^-x - 1 >= -x survives the rounding of
    # expm1.
    log_ratios = torch.linspace(-1e-3, 1e-3, 4001)[None]
    assert (torch.exp(-log_ratios) - 1 + log_ratios).min().item() < 0
    assert kl.k3(log_ratios).min().item() == 0.0


def test_k3_pulls_a_policy_back_however_far_it_has_left() -> None:
    # e^-x - 1 + x, derivative 1 - e^-x; at x = -80 e^80 would be infinite in float32: bounded, no gradient
    log_ratios = torch.tensor([[80.0, 25.0, -80.0]], requires_grad=True)
    found = kl.k3(log_ratios)
    assert found[0, :2].tolist() == [79.0, 24.0] and bool(found.isfinite().all())
    found.sum().backward()
    assert log_ratios.grad is not None and log_ratios.grad.tolist() == [[1.0, 1.0, 0.0]]


def test_masked_positions_have_no_say() -> None:
    logp = torch.tensor([[-1.0, math.inf, math.nan, 900.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, False, False]])
    log_ratios = kl.log_ratio(logp, row(-1.5, 0.0, 0.0, 0.0), mask)
    assert log_ratios.tolist() == [[0.5, 0.0, 0.0, 0.0]]
    (kl.ratio(log_ratios).sum() + kl.k3(log_ratios).sum()).backward()
    # d e^x + d (e^-x - 1 + x) at x = .5: e^.5 - e^-.5 + 1
    assert logp.grad is not None
    assert logp.grad.tolist() == [[pytest.approx(math.exp(0.5) - math.exp(-0.5) + 1), 0.0, 0.0, 0.0]]


def test_sequences_add_their_counted_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    logp = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]], dtype=torch.float64)
    ref_logp = torch.tensor([[-1.5, -2.25, 0.0], [-3.0, 0.0, 0.0]], dtype=torch.float64)
    assert kl.sequence_log_ratio(logp, ref_logp, mask).tolist() == [0.75, -1.0]


def test_ratios_are_bounded_far_outside_any_clip_range() -> None:
    log_ratios = torch.tensor([[-200.0, -19.0, 0.0, 19.0, 200.0]], dtype=torch.float64, requires_grad=True)
    found = kl.ratio(log_ratios)
    expected = [[math.exp(x) for x in (-20, -19, 0, 19, 20)]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(
        kl.k3(log_ratios).detach(),
        torch.tensor([[math.exp(-x) - 1 + x for x in (-20, -19, 0, 19, 200)]], dtype=torch.float64),
    )
    (gradient,) = torch.autograd.grad(found.sum(), log_ratios)
    assert gradient[0, 0].item() == 0.0 and gradient[0, 4].item() == 0.0 and gradient[0, 2].item() == 1.0


def test_kl_in_the_loss_by_hand() -> None:
    # 2 * (.1 * 1 + .2 * .5 + .4 * 0) / 4 = .1
    found = kl.kl_loss(row(0.1, 0.2, 0.4), row(1.0, 0.5, 0.0), beta=2.0, count=4.0)
    assert found.item() == pytest.approx(0.1, abs=1e-12)


def test_kl_in_the_score_by_hand() -> None:
    kls = row(0.1, -0.3, 0.5).requires_grad_()
    found = kl.kl_in_score(torch.tensor([2.0], dtype=torch.float64), kls, beta=0.5)
    assert found.item() == pytest.approx(2 - 0.5 * 0.3, abs=1e-12)
    assert not found.requires_grad


def test_the_score_falls_on_the_last_counted_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert kl.last_token(mask).tolist() == [
        [False, True, False, False],
        [False, False, False, True],
        [False, False, False, True],
        [False, False, False, False],
    ]


def test_token_rewards_by_hand() -> None:
    # PPO's r_t = -beta kl_t + [t = last] score with beta .1: a padded and a full row
    kls = torch.tensor([[0.1, -0.2, 7.0], [0.3, 0.0, -0.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    found = kl.kl_in_token_reward(torch.tensor([1.0, -2.0], dtype=torch.float64), kls, mask, beta=0.1)
    torch.testing.assert_close(
        found, torch.tensor([[-0.01, 1.02, 0.0], [-0.03, 0.0, -1.99]], dtype=torch.float64)
    )
    assert not found.requires_grad


def test_a_score_that_is_no_number_stays_at_its_own_last_token() -> None:
    score, mask = torch.tensor([math.nan, 1.0]), torch.tensor([[False, False], [False, True]])
    assert kl.kl_in_token_reward(score, torch.zeros(2, 2), mask, beta=0.1).tolist() == [
        [0.0, 0.0],
        [0.0, 1.0],
    ]


@PROPERTY
@given(seed=SEEDS)
def test_token_rewards_against_the_witness(seed: int) -> None:
    rng = np.random.default_rng(seed)
    score, kls, mask = rng.normal(size=4), rng.normal(size=(4, 6)), rng.random((4, 6)) < 0.6
    found = kl.kl_in_token_reward(
        torch.tensor(score), torch.tensor(kls), torch.tensor(mask), beta=0.3
    ).tolist()
    for n in range(4):
        expected = witness.token_reward(float(score[n]), kls[n].tolist(), mask[n].tolist(), 0.3)
        assert found[n] == pytest.approx(expected, abs=1e-12)


def test_adaptive_beta_by_hand() -> None:
    # beta .2, target 6, n 256: kl 12 -> error clipped at .2: .2 (1 + .2 * 256/10000) = .201024; 3 -> -.2:
    # .198976
    assert kl.adaptive_beta(0.2, 12.0, target=6.0, count=256) == pytest.approx(0.201024, abs=1e-12)
    assert kl.adaptive_beta(0.2, 6.0, target=6.0, count=256) == pytest.approx(0.2, abs=1e-12)
    assert kl.adaptive_beta(0.2, 3.0, target=6.0, count=256) == pytest.approx(0.198976, abs=1e-12)
    # inside the bound: kl 6.6 -> error .1; horizon 512: .2 (1 + .1 * 256/512) = .21
    assert kl.adaptive_beta(0.2, 6.6, target=6.0, count=256, horizon=512.0) == pytest.approx(0.21, abs=1e-12)
    assert kl.adaptive_beta(0.2, 12.0, target=6.0, count=256, horizon=512.0, bound=0.5) == pytest.approx(0.25)


def test_truncated_importance_by_hand() -> None:
    # min(pi_old/pi_rollout, 2) of ratios .5, 1, 3; a position off the mask counts as 1
    old_logp = row(math.log(0.5), 0.0, math.log(3.0), 5.0).requires_grad_()
    mask = torch.tensor([[True, True, True, False]])
    found = kl.truncated_importance(old_logp, torch.zeros_like(old_logp), mask, cap=2.0)
    assert found.tolist() == [pytest.approx([0.5, 1.0, 2.0, 1.0], abs=1e-12)]
    assert not found.requires_grad


def test_best_of_n_by_hand() -> None:
    # ln n - (n-1)/n: ln 2 - 1/2 = .19314718
    for n, expected in ((1, 0.0), (2, 0.19314718), (4, 0.63629436), (16, 1.83508872), (64, 3.17450808)):
        assert kl.best_of_n_kl(n) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("n", [2, 4])
def test_best_of_n_is_an_upper_bound(n: int) -> None:
    # Three outcomes with chances p, ranked: the best of n is outcome i with chance F_i^n - F_{i-1}^n.
    p = np.array([0.5, 0.3, 0.2])
    best = np.diff(np.concatenate([[0.0], np.cumsum(p)]) ** n)
    assert float((best * np.log(best / p)).sum()) <= kl.best_of_n_kl(n)


def test_over_optimisation_by_hand() -> None:
    # alpha 1, beta .3: the peak is at e^(1/.3 - 1) = e^2.3333 = 10.3122585; there d (1 - .3 (1/.3 - 1)) = .3
    # d
    peak = kl.gold_peak(alpha=1.0, beta=0.3)
    assert peak == pytest.approx(10.31225850, abs=1e-7)
    d = torch.tensor([0.0, 1.0, peak - 0.1, peak, peak + 0.1], dtype=torch.float64)
    gold = kl.gold_reward(d, alpha=1.0, beta=0.3)
    assert gold[0].item() == 0.0 and gold[1].item() == 1.0
    assert gold[3].item() == pytest.approx(0.3 * peak, abs=1e-9)
    assert gold[3] > gold[2] and gold[3] > gold[4]


# -- estimators as loss and as reward, by exact enumeration of a three-token softmax -------------------------

LOGITS = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.5, -0.2], dtype=torch.float64).log_softmax(0)


def gradients(name: str) -> dict[str, Tensor]:
    """Expected gradient over the three tokens, with the estimator in the reward, in the loss, and of the true
    KL.
    """
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)[:, None]  # three answers of one token, weighed by their chance
    chance = logp.detach().exp()
    mask = whole(logp)
    estimate = kl.KL_ESTIMATORS[name](kl.log_ratio(logp, REFERENCE[:, None], mask))
    reward = kl.kl_in_score(torch.zeros(3, dtype=torch.float64), estimate, beta=1.0)
    in_reward = losses.clipped_policy(
        logp, logp.detach(), reward[:, None], mask, chance, clip_low=0.2, clip_high=0.2, count=1.0
    ).loss
    in_loss = kl.kl_loss(estimate, chance, beta=1.0, count=1.0)
    true = (logp.exp() * (logp - REFERENCE[:, None])).sum()
    return {
        key: torch.autograd.grad(value, logits, retain_graph=True)[0]
        for key, value in (("reward", in_reward), ("loss", in_loss), ("true", true))
    }


def test_k1_in_the_reward_is_k2_in_the_loss_is_the_gradient_of_kl() -> None:
    torch.testing.assert_close(gradients("k1")["reward"], gradients("k2")["loss"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients("k1")["reward"], gradients("k1")["true"], rtol=1e-10, atol=1e-12)


def test_k1_in_the_loss_has_no_gradient_in_the_mean() -> None:
    torch.testing.assert_close(gradients("k1")["loss"], torch.zeros(3, dtype=torch.float64))


def test_k3_in_the_loss_is_biased() -> None:
    found = gradients("k3")
    assert (found["loss"] - found["true"]).abs().max().item() > 0.05


def test_adaptive_beta_keeps_its_sign_and_survives_a_nan() -> None:
    assert kl.adaptive_beta(0.05, 0.0, target=6.0, count=16, horizon=3.0) == pytest.approx(0.04)
    assert kl.adaptive_beta(0.05, math.nan, target=6.0, count=16) == 0.05
