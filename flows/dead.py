"""Settings that the rest of the parameters leaves without effect, each rule with its reason.

What a loss reads is taken from its signature, so a rule can not differ from the code. A setting counts when
it is not its default: a default that nobody reads misleads nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tasks.base import is_hub_id
from tasks.params import Params, flat
from training.config_optimize import ON_PAIRS, OptimizeParams
from training.config_rewards import RewardsParams
from training.losses import POLICY_LOSSES, PREFERENCE_LOSSES, needs


@dataclass(frozen=True)
class Rule:
    """Keys (whole, or all below a dot) that nobody reads when `dead` holds."""

    keys: tuple[str, ...]
    dead: Callable[[Params], bool]
    why: str


def _on_pairs(p: Params) -> bool:
    return p.optimize.algorithm in ON_PAIRS


def _no_ratio(p: Params) -> bool:
    return p.optimize.algorithm not in POLICY_LOSSES


def _one_update(p: Params) -> bool:
    return p.optimize.ppo.updates * p.optimize.ppo.minibatches == 1


def _not(*algorithms: str) -> Callable[[Params], bool]:
    return lambda p: p.optimize.algorithm not in algorithms


def _loss_ignores(argument: str) -> Callable[[Params], bool]:
    """Whether the algorithm's loss has no such argument."""

    def ignores(p: Params) -> bool:
        name = p.optimize.algorithm
        loss = POLICY_LOSSES.get(name) or PREFERENCE_LOSSES[name]
        return argument not in needs(loss)

    return ignores


def _kinds(optimize: OptimizeParams) -> set[str]:
    return {scorer.kind for scorer in optimize.rewards.scorers}


def _one_member(p: Params) -> bool:
    own = any(scorer.kind == "learned" and scorer.path for scorer in p.optimize.rewards.scorers)
    return "learned" not in _kinds(p.optimize) or (p.reward.members == 1 and not own)


def _one_rank(section: str) -> Callable[[Params], bool]:
    def alone(p: Params) -> bool:
        own = getattr(p, section)
        return own.processes == 1 and not own.engine.offload and p.pipeline.hostfile is None

    return alone


def _causal(section: str) -> Callable[[Params], bool]:
    return lambda p: getattr(p, section).model == "policy"


def _adapted(section: str) -> Callable[[Params], bool]:
    return lambda p: getattr(p, section).lora is not None


def _alone(p: Params) -> bool:
    used = p.dimensions()
    return used is not None and len(used) == 1


def _ppo(*names: str) -> tuple[str, ...]:
    return tuple(f"optimize.ppo.{name}" for name in names)


def _preference(*names: str) -> tuple[str, ...]:
    return tuple(f"optimize.preference.{name}" for name in names)


_SAMPLING = (
    "rewards", "guards", "group", "max_new_tokens", "held_out", "held_out_every", "rounds", "generator",
    "ppo", "clip",
)  # fmt: skip
_KL = ("where", "estimator", "adaptive", "horizon")
RULES: tuple[Rule, ...] = (
    Rule(tuple(f"optimize.{name}" for name in _SAMPLING), _on_pairs, "the algorithm trains on pairs"),
    Rule(tuple(f"optimize.kl.{name}" for name in _KL), _on_pairs, "the algorithm trains on pairs"),
    Rule(("optimize.preference",), lambda p: not _on_pairs(p), "the algorithm trains on its own samples"),
    Rule(_preference("smoothing"), _loss_ignores("smoothing"), "the algorithm's loss has no smoothing"),
    Rule(_preference("gamma"), _loss_ignores("gamma"), "only simpo has a target margin"),
    Rule(_preference("lam"), _loss_ignores("lam"), "only orpo weighs an odds ratio"),
    Rule(_preference("desirable", "undesirable"), _not("kto"), "only kto weighs answers by wish"),
    Rule(("optimize.held_out_every",), lambda p: p.optimize.held_out == 0, "no prompt is set apart"),
    Rule(
        ("optimize.beta",),
        lambda p: _on_pairs(p) and _loss_ignores("beta")(p),
        "the algorithm's loss has no reference",
    ),
    Rule(("optimize.guards.value_loss",), _not("ppo"), "only ppo has a critic"),
    Rule(
        ("optimize.kl.target",),
        lambda p: not _on_pairs(p) and p.optimize.guards.kl is None and not p.optimize.kl.adaptive,
        "guards.kl is null and kl.adaptive false",
    ),
    Rule(("optimize.rounds",), _not("dapo"), "only dapo samples again"),
    Rule(_ppo("lam", "value_coef", "value_warmup"), _not("ppo"), "only ppo has a critic"),
    Rule(("optimize.clip.value",), _not("ppo"), "only ppo has a critic"),
    Rule(_ppo("gamma"), _not("ppo", "reinforce_pp"), "only ppo and reinforce_pp reward tokens"),
    Rule(_ppo("updates", "minibatches", "entropy", "stop_kl"), _no_ratio, "online_dpo makes one update"),
    Rule(
        ("optimize.clip", "optimize.kl.where", "optimize.kl.estimator"), _no_ratio, "online_dpo has no ratio"
    ),
    Rule(("optimize.clip.low",), _not(*POLICY_LOSSES.keys() - {"cispo"}), "cispo is open below"),
    Rule(("optimize.clip.dual",), _loss_ignores("dual_clip"), "the algorithm's loss has no dual clip"),
    Rule(
        tuple(f"optimize.clip.{name}" for name in ("low", "high", "dual", "value")) + _ppo("stop_kl"),
        _one_update,
        "one update a batch: the ratio is 1 (ppo.updates, ppo.minibatches)",
    ),
    Rule(("optimize.kl.horizon",), lambda p: not p.optimize.kl.adaptive, "kl.adaptive is false"),
    Rule(
        ("optimize.rewards.cap",),
        lambda p: all(scorer.floor is None for scorer in p.optimize.rewards.scorers),
        "no scorer has a floor",
    ),
    Rule(
        ("optimize.rewards.weights",),
        _alone,
        "there is one dimension, its weight is 1",
    ),
    Rule(("optimize.rewards.ensemble", "optimize.rewards.ensemble_lam"), _one_member, "reward.members is 1"),
    Rule(
        ("optimize.rewards.ensemble_lam",),
        lambda p: p.optimize.rewards.ensemble != "uncertainty",
        "rewards.ensemble is not uncertainty",
    ),
    Rule(
        ("optimize.rewards.timeout",),
        lambda p: _kinds(p.optimize) == {"learned"},
        "no scorer is a function or a service",
    ),
    Rule(("optimize.guards.gap_every",), lambda p: p.optimize.guards.gap is None, "guards.gap is null"),
    Rule(
        tuple(f"optimize.generator.{name}" for name in ("memory_share", "sleep")),
        lambda p: (p.optimize.generator.kind, p.optimize.generator.mode) != ("vllm", "colocated"),
        "generator is not a colocated vllm",
    ),
    Rule(
        tuple(f"optimize.generator.{name}" for name in ("timeout", "requests")),
        lambda p: (p.optimize.generator.kind, p.optimize.generator.mode) != ("vllm", "server"),
        "generator is not a vllm server",
    ),
    Rule(
        tuple(f"optimize.generator.{name}" for name in ("mode", "canaries", "gap")),
        lambda p: p.optimize.generator.kind != "vllm",
        "generator.kind is builtin",
    ),
    Rule(
        ("reward.centring",),
        lambda p: p.reward.process is not None,
        "reward.process scores steps: there is no pair to centre",
    ),
    *(
        rule
        for name in ("reward", "judge")
        for rule in (
            Rule((f"{name}.pooling",), _causal(name), "a causal LM is read at its last token"),
            Rule((f"{name}.frozen_layers",), _adapted(name), f"{name}.lora trains adapters only"),
        )
    ),
    Rule(
        ("sft.stop_check",),
        lambda p: p.sft.engine.zero == 3 or p.sft.engine.tensor_parallel > 1,
        "weights in parts do not answer here",
    ),
    Rule(
        ("model.revision",),
        lambda p: p.model.source.startswith("gguf:") or not is_hub_id(p.model.source),
        "model.source is no hub id",
    ),
    *(
        Rule((f"{name}.engine.zero",), _one_rank(name), "one rank: there is nobody to share with")
        for name in ("sft", "reward", "judge", "optimize")
    ),
)


def dead(params: Params) -> Iterator[str]:
    """Each dead setting as `key (why)`, in the order of the file."""
    default = flat(Params(optimize=OptimizeParams(algorithm=params.optimize.algorithm)).model_dump())
    for key, value in flat(params.model_dump()).items():
        if key in default and default[key] == value:
            continue
        why = next((rule.why for rule in RULES if _below(key, rule.keys) and rule.dead(params)), None)
        if why is not None:
            yield f"{key} ({why})"
    yield from _defaults(params)
    if not _on_pairs(params):
        yield from _guards(params)
        yield from _weights(params)


def _defaults(params: Params) -> Iterator[str]:
    """What a default elsewhere makes other than its name says."""
    algorithm = params.optimize.algorithm
    if algorithm in ("cdpo", "robust_dpo") and not params.optimize.preference.smoothing:
        yield f"optimize.algorithm (preference.smoothing is 0: {algorithm} is then plain dpo)"


def _guards(params: Params) -> Iterator[str]:
    """A window that no run fills, and actions of guards that are off."""
    guards, steps = params.optimize.guards, params.optimize.steps
    if guards.window > steps:
        yield (
            f"optimize.guards.window ({guards.window} steps, the run has {steps}: guards that want a whole "
            "window never act)"
        )
    for name in guards.actions:
        if getattr(guards, name, 0.0) is None:
            yield f"optimize.guards.actions.{name} (guards.{name} is null)"


def _weights(params: Params) -> Iterator[str]:
    """Dimensions of scorers whose model has its own, and weights of those that no scorer gives."""
    used = params.dimensions()
    known = RewardsParams().weights
    for scorer in params.optimize.rewards.scorers:
        headed = scorer.kind == "learned" and not scorer.path and params.reward.heads
        if headed and scorer.floor is None and scorer.dimension != "quality":
            yield f"optimize.rewards.scorers, {scorer.name}: dimension (reward.heads name the dimensions)"
    if used is None or len(used) == 1:
        return
    for name, value in params.optimize.rewards.weights.items():
        if name not in used and known.get(name) != value:
            yield f"optimize.rewards.weights.{name} (no scorer gives this dimension)"


def _below(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)
