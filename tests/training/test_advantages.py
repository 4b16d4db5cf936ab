"""Advantages: literals with derivation, a second witness over random groups and masks, and their laws."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import witness
from training import advantages

SEEDS = st.integers(0, 10**6)
FORMULAS = ("rloo", "grpo", "dr_grpo")  # the other names share GRPO's
PROPERTY = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def group(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def whole(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def of(name: str, score: Tensor, **setting: float) -> list[float]:
    found: list[float] = advantages.ADVANTAGES[name](score, whole(score), **setting).advantage[0].tolist()
    return found


def test_rloo_by_hand() -> None:
    # 1 against the mean 0 of the others; 0 against 1/3. Equals 4/3 of Dr. GRPO's score - .25
    assert of("rloo", group(1, 0, 0, 0)) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], abs=1e-12)
    assert of("dr_grpo", group(1, 0, 0, 0)) == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-12)


def test_grpo_by_hand() -> None:
    # mean .25, variance (.75^2 + 3 * .25^2)/3 = .25, std .5: .75/.5001 = 1.49970006, -.25/.5001 = -.49990002
    for name in ("grpo", "dapo", "gspo", "cispo"):
        assert of(name, group(1, 0, 0, 0)) == pytest.approx([1.49970006, *[-0.49990002] * 3], abs=1e-8)


def test_grpo_of_nearly_equal_scores() -> None:
    # mean .39375, deviations .00625 and -.04375, std .01767767: .35355339 and -2.47487373 before epsilon
    found = of("grpo", group(*[0.4] * 7, 0.35), epsilon=0.0)
    assert found == pytest.approx([*[0.35355339] * 7, -2.47487373], abs=1e-8)
    # The deviation holds the sample itself, so no score can be further off than (G-1)/sqrt(G).
    assert abs(found[-1]) <= 7 / math.sqrt(8) + 1e-12
    single = torch.tensor([[0.4] * 7 + [0.35]])
    assert advantages.grpo(single, whole(single)).advantage.abs().max().item() < 2.475


@pytest.mark.parametrize("name", sorted(advantages.ADVANTAGES))
@pytest.mark.parametrize("scores", [[0.1] * 8, [0.3] * 7, [1e8] * 3, [0.7]])
def test_a_constant_group_gives_exact_zeros(name: str, scores: list[float]) -> None:
    score = torch.tensor([scores], dtype=torch.float32)
    found = advantages.ADVANTAGES[name](score, whole(score))
    assert found.advantage.tolist() == [[0.0] * len(scores)]
    assert found.constant.tolist() == [True]


@pytest.mark.parametrize("name", FORMULAS)
@PROPERTY
@given(seed=SEEDS)
def test_groups_against_the_witness(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 6))
    score = np.round(rng.normal(size=(4, size)), int(rng.integers(0, 3)))
    valid = rng.random((4, size)) < 0.75
    poisoned = torch.tensor(np.where(valid, score, rng.choice([np.nan, np.inf, 1e30])))
    found = advantages.ADVANTAGES[name](poisoned, torch.tensor(valid))
    for p in range(4):
        expected = witness.group_advantage(name, score[p].tolist(), valid[p].tolist(), 1e-4)
        assert found.advantage[p].tolist() == pytest.approx(expected, abs=1e-9)
        assert found.constant[p].item() == (len(set(score[p][valid[p]])) < 2)
        assert sum(expected) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", sorted(advantages.ADVANTAGES))
def test_a_group_is_a_constant_to_the_optimizer(name: str) -> None:
    score = group(1, 0, 2).requires_grad_()
    assert not advantages.ADVANTAGES[name](score, whole(score)).advantage.requires_grad


def test_only_valid_scores_decide_whether_a_group_is_constant() -> None:
    score = torch.tensor([[2.0, 2.0, 0.0], [-2.0, -2.0, 0.0], [9.0, 9.0, 8.0], [1.0, 2.0, 3.0]])
    valid = torch.tensor([[True, True, False]] * 3 + [[False] * 3])
    assert advantages.constant_groups(score, valid).tolist() == [True] * 4


def test_a_nan_score_that_counts_is_not_hidden() -> None:
    score = group(math.nan, 1.0, 0.0)
    for name in advantages.ADVANTAGES:
        found = advantages.ADVANTAGES[name](score, whole(score))
        assert found.advantage.isnan().all() and not found.constant.any()


def test_gae_by_hand() -> None:
    # From the right, gamma 1, lam .95: .3; -.03 + .7 - .6 + .95 * .3 = .355; .02 + .6 - .4 + .95 * .355 =
    # .55725; -.01 + .4 - .5 + .95 * .55725 = .4193875. Returns add the values.
    reward, value = group(-0.01, 0.02, -0.03, 1.0), group(0.5, 0.4, 0.6, 0.7)
    found = advantages.gae(reward, value, whole(reward))
    assert found.advantage[0].tolist() == pytest.approx([0.4193875, 0.55725, 0.355, 0.3], abs=1e-12)
    assert found.returns[0].tolist() == pytest.approx([0.9193875, 0.95725, 0.955, 1.0], abs=1e-12)


def test_gae_does_not_see_padding() -> None:
    reward, value = group(9, -0.01, 0.02, 9, -0.03, 1.0, 9), group(9, 0.5, 0.4, 9, 0.6, 0.7, 9)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0]], dtype=torch.bool)
    reward[~mask], value[~mask] = math.nan, math.inf
    found = advantages.gae(reward, value, mask)
    assert found.advantage[0].tolist() == pytest.approx([0, 0.4193875, 0.55725, 0, 0.355, 0.3, 0], abs=1e-12)
    assert found.returns[0].tolist() == pytest.approx([0, 0.9193875, 0.95725, 0, 0.955, 1.0, 0], abs=1e-12)


@PROPERTY
@given(seed=SEEDS)
def test_gae_against_the_witness(seed: int) -> None:
    rng = np.random.default_rng(seed)
    reward, value, mask = rng.normal(size=(3, 6)), rng.normal(size=(3, 6)), rng.random((3, 6)) < 0.7
    gamma, lam = float(rng.uniform(0.8, 1)), float(rng.uniform(0, 1))
    found = advantages.gae(
        torch.tensor(reward), torch.tensor(value), torch.tensor(mask), gamma=gamma, lam=lam
    )
    advantage, returns = witness.gae(reward, value, mask, gamma, lam)
    np.testing.assert_allclose(found.advantage.numpy(), advantage, atol=1e-10)
    np.testing.assert_allclose(found.returns.numpy(), returns, atol=1e-10)


def test_gae_is_a_constant_to_the_optimizer() -> None:
    reward, value = group(1.0, 2.0).requires_grad_(), group(0.5, 0.5).requires_grad_()
    found = advantages.gae(reward, value, whole(reward))
    assert not found.advantage.requires_grad and not found.returns.requires_grad


def test_discounted_returns_by_hand() -> None:
    # gamma .5: 4; 2 + .5 * 4 = 4; 1 + .5 * 4 = 3. REINFORCE++ sums without a discount: 7, 6, 4
    reward = group(1, 2, 4, 8)
    mask = torch.tensor([[True, True, True, False]])
    assert advantages.discounted_returns(reward, mask, gamma=0.5).advantage.tolist() == [[3, 4, 4, 0]]
    assert advantages.TOKEN_ADVANTAGES["reinforce_pp"](reward, mask).advantage.tolist() == [[7, 6, 4, 0]]
    assert advantages.TOKEN_ADVANTAGES["ppo"] is advantages.gae


WHITENED = {
    0: [0.11954077, 1.55533188, -0.55103317, -1.12383949],
    1: [0.10352535, 1.34695692, -0.47720872, -0.97327354],
}


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_by_hand(ddof: int) -> None:
    # mean .407909375; the squared deviations add up to .02761..: divided by 4 (ddof 0) or 3 (ddof 1)
    value = group(0.4193875, 0.55725, 0.355, 0.3, 77.0)
    mask = torch.tensor([[True, True, True, True, False]])
    mean, std = advantages.mean_std(advantages.moments(value, mask), ddof=ddof)
    found = advantages.whiten(value, mask, mean=mean, std=std, epsilon=0.0)
    assert found[0].tolist() == pytest.approx([*WHITENED[ddof], 0.0], abs=1e-8)
    default = advantages.whiten(value, mask, mean=mean, std=std)[0].tolist()
    assert default == pytest.approx([*WHITENED[ddof], 0.0], abs=1e-6)


def test_the_declared_divisor_is_n_minus_1() -> None:
    mean, std = advantages.mean_std(advantages.Moments(2.0, 4.0, 10.0))
    assert (mean, std) == (2.0, pytest.approx(math.sqrt(2.0)))  # values 1 and 3
    assert advantages.mean_std(advantages.Moments(3.0, 6.0, 14.0)) == (2.0, 1.0)  # values 1, 2 and 3


def test_moments_of_little_or_nothing() -> None:
    assert advantages.mean_std(advantages.Moments(0.0, 0.0, 0.0)) == (0.0, 0.0)
    assert advantages.mean_std(advantages.Moments(1.0, 3.0, 9.0)) == (3.0, 0.0)
    # Rounding can leave a variance of -1e-17.
    assert advantages.mean_std(advantages.Moments(3.0, 0.3, 0.03 - 1e-12))[1] == 0.0
    alone = advantages.whiten(group(3.0), whole(group(3.0)), mean=3.0, std=0.0)
    assert alone.tolist() == [[0.0]]


def test_epsilon_stands_beside_the_deviation() -> None:
    found = advantages.whiten(group(3.0), whole(group(3.0)), mean=1.0, std=0.5, epsilon=0.5)
    assert found.item() == 2.0
    near = advantages.whiten(group(3.0), whole(group(3.0)), mean=2.0, std=1e-6)
    assert near.item() == pytest.approx(1 / (1e-6 + 1e-8))


def test_values_that_differ_by_rounding_alone_give_no_advantage() -> None:
    assert advantages.whiten(group(3.0), whole(group(3.0)), mean=2.0, std=0.99e-6).item() == 0.0
    assert advantages.whiten(group(3.0), whole(group(3.0)), mean=2.0, std=0.0).item() == 0.0


@pytest.mark.parametrize("ddof", [0, 1])
@PROPERTY
@given(seed=SEEDS)
def test_whitening_against_the_witness_however_it_is_split(ddof: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    value, mask = rng.normal(3, 2, (4, 5)), rng.random((4, 5)) < 0.6
    mask[:2, :2] = True
    tensor, keep = torch.tensor(np.where(mask, value, np.nan)), torch.tensor(mask)
    parts = [advantages.moments(tensor[rows], keep[rows]) for rows in (slice(0, 1), slice(1, 4))]
    summed = advantages.Moments(*(a + b for a, b in zip(*parts, strict=True)))
    mean, std = advantages.mean_std(summed, ddof=ddof)
    found = advantages.whiten(tensor, keep, mean=mean, std=std, epsilon=0.0)
    np.testing.assert_allclose(found.numpy(), witness.whiten(value, mask, ddof), atol=1e-9)


def test_moments_are_summed_in_float64() -> None:
    value = torch.full((1, 2), 1.0, dtype=torch.float32) + torch.tensor([[0.0, 1e-3]])
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a number read from a tensor that carries a gradient
        found = advantages.moments(value.requires_grad_(), whole(value))
    torch.set_warn_always(False)
    assert found.number == 2.0
    assert found.square == math.fsum(float(x) ** 2 for x in value.tolist()[0])


def test_best_and_worst_of_a_group() -> None:
    score = torch.tensor([[-9.2, -8.9, -11.0, 5.0], [1.0, 1.0, 1.0, 0.0], [0.0, 3.0, 2.0, 2.5]])
    valid = torch.tensor([[True, True, True, False], [True, True, True, False], [False, True, True, True]])
    found = advantages.best_and_worst(score, valid)
    assert found.usable.tolist() == [True, False, True]
    assert found.best.tolist()[0::2] == [1, 1] and found.worst.tolist()[0::2] == [2, 2]
