"""What watches a run on given data (SFT, reward models, pairs), where there are no answers to look at.

Each step's loss and gradient norm are compared with the run's own past by the detectors of guards.py, and
what is found is written into the journal as the on-policy program writes it. A step whose numbers are not
finite moves nothing; how many of them a run bears is the engine's to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from data.errors import DivergenceError
from training import guards
from training.config import SpikeParams
from training.engine import Engine, StepInfo
from training.rundir import RunDir

LR_FACTOR = 0.5
"""What lower_lr multiplies the learning rate with; the default of optimize.guards.lr_factor."""


def new_state() -> dict[str, Any]:
    """The part of a program's state that is kept here: `losses` of all steps, `history` for the detectors,
    up to where each guard has been answered, and what the result tells of them."""
    return {"losses": [], "history": [], "answered": {}, "seen": []}


def after_step(
    run: RunDir, engine: Engine, bounds: SpikeParams, state: dict[str, Any], step: int, loss: float,
    info: StepInfo,
) -> None:  # fmt: skip
    """Keeps a step's loss and answers what the guards see; DivergenceError where one is told to stop."""
    state["losses"].append(loss)
    if not (info.finite and math.isfinite(loss)):
        run.journal("non-finite gradient", step=step, action="nothing moved", total=engine.nonfinite_total)
        return
    state["history"].append({"loss": loss, "grad_norm": info.grad_norm})
    for finding in guards.review_given(state["history"], bounds, state["answered"]):
        run.journal(
            "guard", step=step, guard=finding.guard, asked=finding.action, action=finding.action,
            value=finding.value, bound=finding.bound, message=finding.message,
        )  # fmt: skip
        state["answered"][finding.guard] = len(state["history"])
        state["seen"].append(
            {"step": step, "guard": finding.guard, "action": finding.action, "message": finding.message}
        )
        if finding.action == "lower_lr":
            engine.scale_lr(LR_FACTOR)
            run.journal("settings", step=step, lr_scale=engine.lr_scale)
        if finding.action == "stop":
            raise DivergenceError(
                f"step {step}: guard {finding.guard}: {finding.message} (bound {finding.bound}); guards."
                "action is stop: lower lr, or look for broken rows; the last checkpoint is unharmed"
            )


def ends(losses: Sequence[float]) -> dict[str, float]:
    """`loss_first` and `loss_last` of a result: of the steps that had one. DivergenceError when no step of
    the run had a finite loss: nothing was trained, whatever the weights are."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        raise DivergenceError(
            f"none of {len(losses)} steps had a finite loss: nothing was learned; look for rows whose weights"
            " are all 0, or lower lr"
        )
    return {"loss_first": finite[0], "loss_last": finite[-1]}
