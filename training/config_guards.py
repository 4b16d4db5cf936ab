"""The group `optimize.guards`: the bounds of a healthy run on its own samples, and what happens beyond them.
Those of a run on given data are `training.config.SpikeParams`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from training.config import Section

Action = Literal["warn", "lower_lr", "raise_beta", "rollback", "stop"]


ALWAYS_ON: frozenset[str] = frozenset({"nonfinite", "scorer_errors"})
"""Guards without a bound of their own."""


class GuardParams(Section):
    """Bounds of a healthy run and what happens beyond them. A null bound turns its guard off."""

    kl: float | None = Field(5.0, gt=1, description="KL over kl.target, as a factor")
    gap: float | None = Field(
        1.0, gt=0, description="proxy's gain minus judge's gain, in standard deviations"
    )
    length: float | None = Field(2.0, gt=1, description="mean length over its start, as a factor either way")
    length_corr: float | None = Field(0.6, gt=0, le=1, description="reward against length, |Pearson r|")
    repetition: float | None = Field(
        0.5, gt=0, le=1, description="share of repeated 4-grams in an answer, of words or of tokens"
    )
    copying: float | None = Field(
        0.25, gt=0, le=1, description="rise since the start in the share of tokens in 4-grams of the prompt"
    )
    judge_directed: float | None = Field(
        0.1, gt=0, le=1, description="rise since the start in the share of answers that address a judge"
    )
    phrase: float | None = Field(
        0.5, gt=0, le=1, description="rise since the start in the share of answers with the same 3 tokens"
    )
    entropy: float | None = Field(
        0.1, gt=0, description="floor of the token entropy, as a share of its start"
    )
    clipped: float | None = Field(0.95, gt=0, le=1, description="share of answers cut at max_new_tokens")
    zero_variance: float | None = Field(0.95, gt=0, le=1, description="share of groups with equal rewards")
    empty: float | None = Field(0.3, gt=0, le=1, description="share of empty answers")
    unjudged: float | None = Field(
        0.5, gt=0, le=1, description="share of answers without a reward: scorers say `invalid`, or fail"
    )
    grad_norm: float | None = Field(
        20.0, gt=1, description="gradient norm over its running median, as a factor"
    )
    value_loss: float | None = Field(
        20.0, gt=1, description="value loss over its running median, as a factor"
    )
    stale: float | None = Field(
        3.0, gt=1, description="generator's logp against the trainer's, over its start (or 1e-3), as a factor"
    )
    reference: float | None = Field(
        0.01, gt=0, description="move of the frozen reference's logp on a fixed text, nats a token"
    )
    gap_every: int = Field(5, ge=1, description="steps between two looks of the judge, where there is one")
    window: int = Field(5, ge=1, description="steps in a row (or averaged over) before a guard acts")
    actions: dict[str, Action] = Field(
        default_factory=dict,
        description="guard: warn | lower_lr | raise_beta | rollback | stop; else its own default",
    )
    lr_factor: float = Field(0.5, gt=0, lt=1, description="what lower_lr and rollback multiply lr with")
    beta_factor: float = Field(2.0, gt=1, description="what raise_beta and rollback multiply beta with")
    max_rollbacks: int = Field(2, ge=0, description="rollbacks before the next one is a stop")

    @model_validator(mode="after")
    def _known(self) -> Self:
        settings = {"gap_every", "window", "actions", "lr_factor", "beta_factor", "max_rollbacks"}
        known = (type(self).model_fields.keys() - settings) | ALWAYS_ON
        strange = sorted(self.actions.keys() - known)
        if strange:
            raise ValueError(
                f"guards.actions: there is no guard called {' or '.join(strange)}; there are "
                f"{', '.join(sorted(known))}"
            )
        return self
