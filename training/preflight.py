"""Checks that stop a run on policy before its first update, each for a fault that otherwise shows as nothing
but a worse model: positions, tokenisation, the generator's log-probabilities, the reference, the shared
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.errors import ConfigurationError
from data.records import Prompt
from training import chat, positions
from training.batches import Tree
from training.config_optimize import OptimizeParams
from training.device import resolve
from training.generate import Generator
from training.kl import ratio
from training.learner import Learner, Rolled

RATIO_BOUND = {"fp32": 1e-5, "bf16": 1e-5}
"""|ratio - 1| of the trainer against itself: the same batch twice, so nothing but zero is right."""
GENERATOR_BOUND = {"fp32": 1e-3, "bf16": 0.1}
"""Largest |logp difference| of a token, generator against trainer; bfloat16 keeps 3 digits. Mean in bf16."""
SHARED_BOUND = {"fp32": 1e-3, "bf16": 0.1}
"""The same, for shared against unshared prompts, and for the kept hidden states against computing them."""


def lengths(source: Path, params: OptimizeParams) -> None:
    """Prompt and answer within the model's positions, before its weights are read."""
    positions.require_at(source, params, "optimize")


def tokens(tok: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
    """BOS, true prefix, end of turn."""
    for prompt in prompts[:3]:
        chat.preflight(tok, prompt.prompt, "An answer.")


def policy(
    learner: Learner, generator: Generator, trees: Sequence[Tree], seed: int, fresh: bool
) -> dict[str, float]:
    """Measures, and raises where a bound is broken; `fresh`: no update has been made yet."""
    params, precision = learner.params, resolve(learner.params.precision)
    prompts = [tree.prompt for tree in trees]
    rollout = generator.generate(
        prompts, 2, max_new_tokens=min(12, params.max_new_tokens), temperature=params.temperature,
        keys=[tree.key for tree in trees], seed=seed, step=-2,
    )  # fmt: skip
    made_trees = [
        Tree(tree.key, tree.prompt, answers) for tree, answers in zip(trees, rollout.answers, strict=True)
    ]
    plain = Rolled(made_trees)
    logps = [row for samples in rollout.logp for row in samples]
    width = max(map(len, logps))
    made = torch.tensor([row + [0.0] * (width - len(row)) for row in logps])
    mask = torch.arange(width) < torch.tensor([len(row) for row in logps])[:, None]
    trained, again = learner.old(plain, width)[0], learner.old(plain, width)[0]
    measured = {
        "ratio": float((ratio(torch.where(mask, again - trained, 0.0)) - 1).abs().max()),
        "generator": _difference(made, trained, mask, precision),
    }
    _require("ratio", measured["ratio"], RATIO_BOUND[precision],
             "the policy does not repeat its own log-probabilities: dropout is on, or the machine is not "
             "deterministic; set lora.dropout: 0")  # fmt: skip
    _require("generator", measured["generator"], GENERATOR_BOUND[precision],
             "the generator's log-probabilities are not the trainer's: another temperature, sampling "
             "transform, weights or precision")  # fmt: skip
    if learner.shared:
        alone = replace(learner, shared=False, trunk=None).old(plain, width)[0]
        measured["shared"] = _difference(alone, trained, mask, precision)
    if learner.trunk is not None:
        entered = learner.old(Rolled(made_trees, rollout.states), width)[0]
        measured["trunk"] = _difference(entered, trained, mask, precision)
    if fresh:
        frozen = learner.ref_logp(plain, width)
        measured["reference"] = float(torch.where(mask, trained - frozen, 0.0).abs().max())
        _require("reference", measured["reference"], RATIO_BOUND[precision],
                 "before the first update the policy is not its reference: adapters were loaded that do not "
                 "start at zero, or the reference is another model")  # fmt: skip
    return measured


def _difference(
    first: Float[Tensor, "N R"], second: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"], precision: str
) -> float:
    gaps = (first - second).abs()[mask]
    return float(gaps.mean() if precision == "bf16" else gaps.max())


def _require(name: str, value: float, bound: float, remedy: str) -> None:
    if not value <= bound:
        raise ConfigurationError(f"preflight: {name} differs by {value:.3g} (bound {bound:g}); {remedy}")
