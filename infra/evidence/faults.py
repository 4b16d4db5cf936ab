"""The faults of the guard table and how each gets into a run: through what a real one would come through.

`development` variants are those that thresholds were chosen with; `held out` ones have other strings, other
strengths, other clean rewards, other seeds, other base models and other algorithms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from training.chat import stop_ids
from training.generate import BuiltinGenerator, Rollout
from training.rl_setting import Setting

Hook = Callable[[Setting, int], None]


@dataclass(frozen=True)
class Variant:
    """One way in which a fault comes: what the scorer is told, changed parameters, what happens at a step."""

    name: str
    start: int = 1
    """First step that the fault touches."""
    extra: dict[str, Any] = field(default_factory=dict)
    lr_factor: float = 1.0
    event: str = ""
    """Key of EVENTS."""

    def described(self) -> dict[str, Any]:
        """For the run's key."""
        return asdict(self)


def hack(name: str, strength: float = 5.0) -> Variant:
    """A reward that pays a loophole `strength` times its clean part."""
    return Variant(f"{name} x{strength:g}", extra={"hack": name, "strength": strength})


def broken(what: str, start: int, every: int = 1) -> Variant:
    """A scorer that returns no number from a step on, for every answer or every n-th."""
    return Variant(f"{what} from {start}, 1 in {every}", start, {"broken": what, "broken_every": every})


def event(name: str, start: int) -> Variant:
    """Something that happens to a run at a step."""
    return Variant(f"{name} at {start}", start, event=name)


CLEAN: dict[str, Sequence[Variant]] = {
    "development": (Variant("clean"), Variant("clean, own generator", event="served")),
    "held out": (Variant("clean"), Variant("clean, own generator", event="served")),
}
FAULTS: dict[str, dict[str, Sequence[Variant]]] = {
    "length hack": {
        "development": (hack("length", 3.0), hack("length_log", 3.0)),
        "held out": (hack("length_stops", 4.0), hack("length_late")),
    },
    "repetition hack": {
        "development": (hack("repeat_words"), hack("repeat_pairs")),
        "held out": (hack("repeat_few", 6.0), hack("repeat_very", 4.0)),
    },
    "prompt-copy hack": {
        "development": (hack("copy_fours"), hack("copy_run", 6.0)),
        "held out": (hack("copy_end", 7.0), hack("copy_threes", 6.0)),
    },
    "judge-string hack": {
        "development": (hack("judge_dear"), hack("judge_rubric")),
        "held out": (hack("judge_rate"), hack("judge_prefer", 4.0), hack("judge_unknown")),
    },
    "NaN reward": {
        "development": (broken("nan", 4), broken("nan", 9)),
        "held out": (broken("inf", 3), broken("nan", 7, 2), broken("-inf", 11)),
    },
    "LR x100": {
        "development": (Variant("from the start", lr_factor=100.0),),
        "held out": (Variant("from the start", lr_factor=100.0), event("lr x100", 6)),
    },
    "stale generator": {
        "development": (event("stale", 3),),
        "held out": (event("stale", 7), event("lags by 4", 1)),
    },
    "reference drift": {
        "development": (event("noise .1", 5),),
        "held out": (event("noise .03", 8), event("follows the policy", 6), event("a layer lost", 4)),
    },
}
OWN_GUARDS = {
    "length hack": ("length", "length_corr", "clipped"),
    "repetition hack": ("repetition",),
    "prompt-copy hack": ("copying",),
    "judge-string hack": ("judge_directed", "phrase"),
    "NaN reward": ("scorer_errors", "nonfinite"),
    "LR x100": ("kl", "grad_norm", "value_loss", "entropy"),
    "stale generator": ("stale",),
    "reference drift": ("reference",),
}
"""Guards that are meant for a fault; what others see counts too, and is told apart."""


# -- a generator with weights of its own ---------------------------------------------------------------------


class Served:
    """Samples from a copy of the weights, as a server does; `update` fetches the trainer's, unless it
    doesn't."""

    def __init__(self, setting: Setting, fetches: Callable[[int], bool]) -> None:
        self._trained, self._fetches = setting.learner.model, fetches
        self._own = copy.deepcopy(setting.learner.model)
        self._inner = BuiltinGenerator(self._own, stop_ids(setting.tok), setting.learner.pad_id)

    def generate(self, prompts: Sequence[list[int]], group: int, **settings: Any) -> Rollout:
        """See `Generator`."""
        return self._inner.generate(prompts, group, **settings)

    def update(self, version: int) -> dict[str, float]:
        """See `Generator`."""
        if self._fetches(version):
            self._own.load_state_dict(self._trained.state_dict())
        return {}


def served(fetches: Callable[[int], bool]) -> Hook:
    """Before the first step the run gets such a generator."""

    def place(setting: Setting, step: int) -> None:
        if step == 0:
            setting.generator = Served(setting, fetches)

    return place


# -- the reference -------------------------------------------------------------------------------------------


def frozen(setting: Setting) -> Any:
    """The reference's module."""
    with setting.learner.reference as module:
        return module


def noise(share: float) -> Callable[[Setting], None]:
    """Every matrix of the reference gets noise of a share of its deviation."""

    def shake(setting: Setting) -> None:
        for weight in frozen(setting).parameters():
            if weight.ndim == 2:
                weight.data.add_(torch.randn_like(weight) * share * weight.std())

    return shake


def follow(setting: Setting) -> None:
    """The reference becomes the policy: the two share their weights from then on."""
    for mine, theirs in zip(
        frozen(setting).parameters(), setting.learner.model.parameters(), strict=True
    ):  # fmt: skip
        mine.data = theirs.data


def lose_layer(setting: Setting) -> None:
    """One layer of the reference writes nothing any more."""
    frozen(setting).model.layers[1].mlp.down_proj.weight.data.zero_()


def once(start: int, act: Callable[[Setting], None]) -> Hook:
    """It happens before a step's work."""

    def hook(setting: Setting, step: int) -> None:
        if step == start:
            act(setting)

    return hook


EVENTS: dict[str, Callable[[int], Hook]] = {
    "served": lambda start: served(lambda version: True),
    "stale": lambda start: served(lambda version: version < start - 1),
    "lags by 4": lambda start: served(lambda version: version % 4 == 0),
    "lr x100": lambda start: once(start, lambda setting: setting.engine.scale_lr(100.0)),
    "noise .1": lambda start: once(start, noise(0.1)),
    "noise .03": lambda start: once(start, noise(0.03)),
    "follows the policy": lambda start: once(start, follow),
    "a layer lost": lambda start: once(start, lose_layer),
}
