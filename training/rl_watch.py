"""What watches an on-policy run (training/rl.py): the guards and the answers to them, the reference's canary,
scorers that fail. The rules are in training/guards.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from training import guards
from training.batches import Tree
from training.chat import encode_prompt
from training.learner import Rolled
from training.rl_setting import Setting
from training.scorers import ScorerFailed

CANARY = 24
"""Tokens on which the reference is watched."""


@contextmanager
def scorers_told(setting: Setting, step: int) -> Iterator[None]:
    """Scorers that fail in it end the run, and the journal says so."""
    try:
        yield
    except ScorerFailed as error:
        setting.run.journal(
            "guard", step=step, guard="scorer_errors", asked="stop", action="stop", value=error.share,
            bound=setting.params.rewards.error_limit, message=str(error).splitlines()[0],
        )  # fmt: skip
        raise


def reference_logp(setting: Setting) -> Tensor:
    """Log-probabilities [1, R] of a fixed text under the reference, which may not move while a run lasts."""
    ids = min((encode_prompt(setting.tok, row.prompt) for row in setting.prompts[:8]), key=len)[:CANARY]
    return setting.learner.ref_logp(Rolled([Tree("canary", ids, [ids])]), len(ids))


def reference_gap(setting: Setting, canary: Tensor) -> float:
    """Mean |difference| a token of `reference_logp` to what it was at the start, nats."""
    gap = float((reference_logp(setting) - canary).abs().mean())
    return setting.engine.sum([gap])[0] / setting.engine.world


def answer_guards(setting: Setting, state: dict[str, Any], step: int) -> tuple[bool, str | None]:
    """Reviews the history and acts; returns whether the step was healthy and why the run ends, if it does."""
    params, run = setting.params, setting.run
    watch = guards.Watch(params.guards, params.kl.target, params.rewards.error_limit)
    findings = guards.review(state["history"], watch, state["answered"])
    action = guards.decide(findings, state["rollbacks"], params.guards.max_rollbacks)
    for finding in findings:
        extra = {"first_error": setting.scoring.first_error} if finding.guard == "scorer_errors" else {}
        run.journal(
            "guard", step=step, guard=finding.guard, asked=finding.action, action=action,
            value=_json_number(finding.value), bound=finding.bound, message=finding.message, **extra,
        )  # fmt: skip
        state["answered"][finding.guard] = len(state["history"])
        state["seen"].append(
            {"step": step, "guard": finding.guard, "action": action, "message": finding.message}
        )
    if action in ("lower_lr", "rollback"):
        if action == "rollback":
            lowered = setting.engine.lr_scale
            loaded = setting.checkpoints.rollback()
            # What earlier answers took off stays off: the checkpoint may be older than they are.
            setting.engine.scale_lr(lowered / setting.engine.lr_scale)
            state["rollbacks"] += 1
            run.journal("rollback", step=step, to=loaded[0] if loaded else None)
        setting.engine.scale_lr(params.guards.lr_factor)
    if action in ("raise_beta", "rollback"):
        state["beta"] = max(state["beta"], 1e-3) * params.guards.beta_factor
    if action is not None:
        run.journal("settings", step=step, lr_scale=setting.engine.lr_scale, beta=state["beta"])
    reason = next((f"{f.guard}: {f.message}" for f in findings if f.action in ("stop", "rollback")), None)
    return action in (None, "warn"), reason if action == "stop" else None


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
