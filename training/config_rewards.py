"""The group `optimize.rewards`: where scores come from, and how they become one reward an answer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.config import Section, is_service


class ScorerParams(Section):
    """One source of reward."""

    kind: Literal["learned", "function", "http"] = Field(
        description="reward model, Python callable or service"
    )
    name: str = Field(min_length=1, description="how metrics and journal call it")
    path: str = Field(
        "", description="folder, dotted path module:callable, or URL; empty: the reward stage's model"
    )
    dimension: str = Field(
        "quality",
        min_length=1,
        description="which weight it falls under; a model with several heads has theirs, and this names the "
        "head that the floor is for",
    )
    floor: float | None = Field(
        None,
        description="an answer below it in this dimension gets at most rewards.cap; null: no floor; for "
        "floors on two heads name the model twice",
    )

    @model_validator(mode="after")
    def _found(self) -> Self:
        # An address may hold a credential, so no message repeats it.
        if self.kind == "http" and not is_service(self.path):
            raise ValueError(
                f"scorer {self.name}: path must be an http:// or https:// address without a user name"
            )
        module, colon, name = self.path.partition(":")
        if self.kind == "function" and not (module and colon and name):
            raise ValueError(
                f"scorer {self.name}: path: {self.path!r} names no function; give module:callable, such as "
                "training.verify:gsm8k"
            )
        return self


class RewardsParams(Section):
    """How scores become one reward an answer."""

    scorers: Annotated[tuple[ScorerParams, ...], Field(strict=False)] = Field(
        (ScorerParams(kind="learned", name="reward"),), min_length=1
    )
    weights: dict[str, float] = Field(
        default_factory=lambda: {"quality": 0.25, "factuality": 0.35, "safety": 0.40},
        description="weight of each dimension; divided by the sum over the dimensions in use",
    )
    normalise: Literal["none", "batch", "group"] = Field(
        "none", description="each dimension over batch or group before it is summed (GDPO [2601.05242])"
    )
    cap: float = Field(0.0, description="most that an answer below the floor of a dimension can get")
    penalty: float = Field(
        0.5,
        ge=0,
        description="reward taken for full evidence of cheating: repetition, length, copying the prompt, "
        "judge-directed text",
    )
    length_factor: float | None = Field(
        None,
        ge=0,
        description="an answer of more than this many times the first step's mean tokens counts as padded, "
        "fully at twice that; 0: off; null: 3, off where all scorers are functions",
    )
    missing_eos: float = Field(0.0, ge=0, description="reward taken from an answer cut at max_new_tokens")
    overlong_buffer: int = Field(
        0, ge=0, description="last tokens over which DAPO's length penalty rises to 1; 0: off"
    )
    ensemble: Literal["mean", "worst", "uncertainty"] = Field(
        "mean", description="over a reward model's members"
    )
    ensemble_lam: float = Field(0.5, ge=0, description="lambda of mean - lambda * variance")
    timeout: float = Field(10.0, gt=0, description="seconds a call may take")
    error_limit: float = Field(0.1, ge=0, le=1, description="share of failed scores that ends the run")

    @property
    def padded_from(self) -> float:
        """Times the typical length from which an answer counts as padded, 0: never. A function that checks an
        answer is not won by padding, and reasoning may grow there."""
        if self.length_factor is not None:
            return self.length_factor
        return 0.0 if all(scorer.kind == "function" for scorer in self.scorers) else 3.0

    @model_validator(mode="after")
    def _padding(self) -> Self:
        if self.length_factor is not None and 0 < self.length_factor < 1:
            raise ValueError(
                f"length_factor ({self.length_factor}) would punish answers shorter than the first ones; set "
                "at least 1, or 0 to switch it off"
            )
        return self

    @model_validator(mode="after")
    def _floors(self) -> Self:
        floored = [scorer.name for scorer in self.scorers if scorer.floor is not None]
        if floored and self.normalise != "none":
            raise ValueError(
                f"normalise: {self.normalise} changes the scale that the floors of {floored} are meant in; "
                "set normalise: none, or take the floors out"
            )
        return self

    @model_validator(mode="after")
    def _weighed(self) -> Self:
        wrong = {name: value for name, value in self.weights.items() if value < 0}
        if wrong:
            raise ValueError(
                f"weights: {wrong} must be >= 0 (a scorer that wants less of something gives the negative "
                "score); raise it, or set 0"
            )
        named = {scorer.dimension for scorer in self.scorers if scorer.kind != "learned"}
        missing = sorted(named - set(self.weights))
        if missing:
            raise ValueError(
                f"weights has no weight for {missing}; it has {sorted(self.weights)}: add one, or name the "
                "scorer's dimension otherwise"
            )
        if not any(self.weights.values()):
            raise ValueError(
                f"weights: {self.weights} leaves no reward at all; give one dimension a weight above 0"
            )
        names = [scorer.name for scorer in self.scorers]
        if len(set(names)) < len(names):
            raise ValueError(
                f"scorers: a name stands twice in {names}; give each its own, metrics tell by it"
            )
        return self
