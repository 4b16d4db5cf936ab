"""The update of a policy on a rollout: how it is cut does not show, and what belongs into its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.tiny import gpt2
from training import kl
from training.batches import Tree, collate
from training.config_optimize import OptimizeParams
from training.engine import Engine
from training.learner import Learner, Rolled, Signals
from training.logprobs import AnswerLogprobs, answer_logprobs
from training.losses import AGGREGATION_OF, POLICY_LOSSES
from training.models import reference
from training.value import ActorCritic

GROUP, WIDTH = 3, 6
TREES = [
    Tree(
        str(n),
        list(range(10 + n, 14 + 2 * n)),
        [[40 + (n * 7 + g * 5 + at) % 90 for at in range(2 + (n + 2 * g) % 5)] for g in range(GROUP)],
    )
    for n in range(5)
]
ROWS = len(TREES) * GROUP
TOKENWISE = ("ppo", "reinforce_pp")


def learner(algorithm: str, budget: int = 10_000, shared: bool = True, **changes: Any) -> Learner:
    """A policy in float64 with its engine."""
    torch.manual_seed(3)
    model = gpt2().double()
    params = OptimizeParams.model_validate(
        {"algorithm": algorithm, "token_budget": budget, "precision": "fp32", "max_new_tokens": WIDTH,
         "engine": {"backend": "torch"}, "lora": None, **changes}
    )  # fmt: skip
    module = ActorCritic(model) if algorithm == "ppo" else AnswerLogprobs(model)
    if isinstance(module, ActorCritic):
        # The value head's zeros would hide what comes through it.
        torch.nn.init.normal_(module.value_head.weight, std=0.1)
    engine = Engine(
        module, params.engine, lr=1e-2, total_steps=4, warmup=0.0, min_lr_share=1.0, weight_decay=0.0,
        clip_norm=1e9,
    )  # fmt: skip
    return Learner(engine, model, reference(model), params, 1, shared)


def signals(own: Learner, several: bool = True) -> Signals:
    """Of an earlier policy, another reference and another engine: random, the same every time."""
    rolled = Rolled(TREES)
    torch.manual_seed(5)
    logp, mask = own.ref_logp(rolled, WIDTH), torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    for row, answer in enumerate(answer for tree in TREES for answer in tree.answers):
        mask[row, : len(answer)] = True
    mask[4] = False  # its score failed

    def near(scale: float) -> Tensor:
        return torch.where(mask, logp + scale * torch.randn(ROWS, WIDTH, dtype=torch.float64), 0.0)

    algorithm = own.params.algorithm
    advantage = torch.randn(ROWS, WIDTH if algorithm in TOKENWISE else 1, dtype=torch.float64)
    made = Signals(mask, advantage, near(0.3), near(0.1), near(0.2) if several else None)
    if algorithm == "ppo":
        made.old_value, made.returns = (torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    return made


def gradient(own: Learner, made: Signals, beta: float, policy: float = 1.0) -> dict[str, Tensor]:
    """What the engine's step would be made from."""
    found: dict[str, Tensor] = {}
    step = own.engine.step

    def look(decay: bool = True) -> Any:
        found.update(
            (name, weight.grad.clone())
            for name, weight in own.engine.module.named_parameters()
            if weight.grad is not None
        )
        return step(decay)

    own.engine.step = look  # type: ignore[method-assign]
    own.update(Rolled(TREES), made, range(len(TREES)), beta, policy)
    return found


@pytest.mark.parametrize("algorithm", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_how_a_step_is_cut_does_not_show(algorithm: str, where: str) -> None:
    changes: dict[str, Any] = {
        "kl": {"where": where}, "beta": 0.1, "ppo": {"entropy": 0.01}, "clip": {"importance": 1.05},
    }  # fmt: skip
    whole = learner(algorithm, **changes)
    expected = gradient(whole, signals(whole), 0.1)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-4
    for budget, shared in ((1, True), (45, True), (45, False), (10_000, False)):
        cut = learner(algorithm, budget, shared, **changes)
        found = gradient(cut, signals(cut), 0.1)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-9), (name, budget, shared)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("estimator", [None, "k3"])
def test_kl_in_the_loss_is_its_own_gradient(algorithm: str, estimator: str | None) -> None:
    """The part that beta adds, against plain autograd over the answers one by one."""
    parts = []
    for beta in (0.0, 0.5):
        own = learner(algorithm, kl={"estimator": estimator})
        made = signals(own)
        parts.append(gradient(own, made, beta))
    own = learner(algorithm)
    total = torch.zeros((), dtype=torch.float64)
    known = [row for row in range(ROWS) if row != 4]
    for row in known:
        tree = TREES[row // GROUP]
        batch = collate([Tree("", tree.prompt, [tree.answers[row % GROUP]])], 1, shared=False)
        logp = answer_logprobs(own.model, batch)[0][0]
        ratio = logp - made.ref_logp[row, : len(logp)]
        each = (torch.exp(-ratio) - 1 + ratio) if estimator == "k3" else ratio.square() / 2
        total = total + each.sum() / (WIDTH if algorithm == "dr_grpo" else len(logp))
    (0.5 * total / len(known)).backward()
    for name, weight in own.engine.module.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(parts[1][name] - parts[0][name], weight.grad, atol=1e-9), name
    assert kl.KL_ESTIMATORS.keys() == {"k1", "k2", "k3"}


def test_a_kl_that_a_guard_has_switched_on_reaches_groups_without_any_difference() -> None:
    own = learner("dapo")
    assert own.params.beta == 0.0
    made = signals(own)
    made.advantage = torch.zeros_like(made.advantage)
    assert gradient(own, made, 0.0) == {}
    again = learner("dapo")
    assert any(bool(value.any()) for value in gradient(again, made, 0.2).values())


def test_ppo_has_an_entropy_bonus_and_the_others_have_none() -> None:
    found = {name: OptimizeParams.model_validate({"algorithm": name}).entropy for name in POLICY_LOSSES}
    assert found.pop("ppo") == 0.01 and set(found.values()) == {0.0}
    for algorithm in ("ppo", "rloo"):
        off = OptimizeParams.model_validate({"algorithm": algorithm, "ppo": {"entropy": 0.0}})
        assert off.entropy == 0.0


@pytest.mark.parametrize("algorithm", sorted(POLICY_LOSSES))
def test_the_entropy_bonus_is_its_own_gradient_in_every_algorithm(algorithm: str) -> None:
    """The part that the bonus adds, against the entropies of whole rows of logits, by plain autograd."""
    parts = []
    for weight in (0.0, 0.3):
        own = learner(algorithm, ppo={"entropy": weight})
        parts.append(gradient(own, signals(own), 0.0))
    own = learner(algorithm)
    answers = [(tree.prompt, answer) for tree in TREES for answer in tree.answers]
    known = [row for row in range(ROWS) if row != 4]
    tokens = sum(len(answers[row][1]) for row in known)
    total = torch.zeros((), dtype=torch.float64)
    for row in known:
        prompt, answer = answers[row]
        logits = own.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
        share = {
            "token_mean": tokens, "sequence_mean": len(known) * len(answer), "sequence_sum": len(known),
            "fixed_length": len(known) * WIDTH,
        }[AGGREGATION_OF[algorithm]]  # fmt: skip
        total = total - 0.3 * entropy / share
    total.backward()
    for name, value in own.engine.module.named_parameters():
        if value.grad is not None:
            assert torch.allclose(parts[1][name] - parts[0][name], value.grad, atol=1e-9), name
