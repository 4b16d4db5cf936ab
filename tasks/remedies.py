"""What to try after a cause was found: words, and settings that `plumbline run --set` takes.

Learning rates go down in the steps that full fine-tuning uses, from 5e-6; adapters bear more and move by a
factor of three.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.evidence import Facts, Missing
from tasks.outcomes import NEVER, wanted_prompts
from training.config_optimize import OptimizeParams

LADDER = (5e-6, 2e-6, 1e-6, 5e-7, 2e-7, 1e-7)
"""Learning rates of full fine-tuning against a reward, tried from the left."""
ADAPTER_FACTOR = 3.0


@dataclass(frozen=True)
class Try:
    """The next thing to try."""

    what: str
    settings: tuple[str, ...] = ()
    instead: str = ""
    """A command, where settings alone do not help."""

    @property
    def command(self) -> str:
        """What to type."""
        return self.instead or " ".join(["plumbline run", *(f"--set {setting}" for setting in self.settings)])


def _set(**values: float | str | bool) -> tuple[str, ...]:
    """Settings as `key.sub=value`; two underscores stand for the dot."""
    found = []
    for name, value in values.items():
        plain = not isinstance(value, float) or isinstance(value, bool)
        text = str(value).lower() if isinstance(value, bool) else str(value) if plain else f"{value:.3g}"
        found.append(f"{name.replace('__', '.')}={text}")
    return tuple(found)


def lower_lr(optimize: OptimizeParams) -> float:
    """The next lower learning rate."""
    if optimize.lora is not None:
        return optimize.lr / ADAPTER_FACTOR
    return next((lr for lr in LADDER if lr < 0.99 * optimize.lr), optimize.lr / 2)


def raise_lr(optimize: OptimizeParams) -> float | None:
    """The next higher learning rate; None where full fine-tuning has come to the top of its ladder."""
    if optimize.lora is not None:
        return optimize.lr * ADAPTER_FACTOR
    return next((lr for lr in reversed(LADDER) if lr > 1.01 * optimize.lr), None)


def _beta(optimize: OptimizeParams) -> float:
    return max(optimize.beta * 2, 0.01)


# -- run and data ------------------------------------------------------------------------------------------


def after_failure(facts: Facts) -> Try:
    stage, said = next(iter(facts.failed.items()))
    kind = said.get("kind")
    if kind == "data":
        return Try("correct the records that the message names", instead="plumbline validate")
    if kind == "configuration":
        return Try("change the keys that the message names", instead="plumbline doctor")
    if kind == "divergence" and stage == "optimize":
        return lower_lr_try(facts)
    if kind == "divergence" and stage in ("sft", "reward", "judge"):
        lr = getattr(facts.params, stage).lr
        return Try("a lower learning rate", (f"{stage}.lr={lr / ADAPTER_FACTOR:.3g}",))
    return Try("run again; it goes on from the last complete checkpoint", instead="plumbline run")


def look_at_data(what: str) -> Try:
    """A remedy that only other records are."""
    return Try(what, instead="plumbline validate")


def refused_rows(facts: Facts) -> Try:
    return look_at_data("read data/stages/validate/quarantine.jsonl and correct the rows or name the format")


def more_pairs(facts: Facts) -> Try:
    train = facts.params.data.splits.train
    return Try(
        f"more preference pairs; {train:.0%} of them are trained on",
        instead="plumbline run --data MORE.jsonl",
    )


def annotate_again(facts: Facts) -> Try:
    return Try(
        "have the disputed pairs judged again, sharpen the instruction; a model can not agree more than its "
        "teachers, until then smooth the labels",
        _set(reward__smoothing=0.1, judge__smoothing=0.1),
    )


def balance_length(facts: Facts) -> Try:
    return look_at_data("add pairs in which the length rule is wrong, or drop some in which it is right")


# -- reward model ------------------------------------------------------------------------------------------


def more_held_out(facts: Facts) -> Try:
    return Try(
        "more pairs in the part that tests the reward model",
        _set(data__min_part=2 * facts.params.data.min_part),
    )


def train_reward(facts: Facts, stage: str = "reward") -> Try:
    """Longer where it has not learned its own pairs, milder where it has learned them by heart."""
    own = facts.params.reward if stage == "reward" else facts.params.judge
    fitted = facts.results.get(stage, {}).get("train_accuracy")
    if isinstance(fitted, float) and fitted > 0.9:
        return Try(
            "it knows its training pairs by heart: milder and smoothed, or more pairs",
            (f"{stage}.lr={own.lr / 2:.3g}", f"{stage}.smoothing=0.1", f"{stage}.weight_decay=0.1"),
        )
    return Try(
        "it has not learned its training pairs: train longer, or start from a larger model",
        (f"{stage}.epochs={own.epochs + 2}", f"{stage}.max_steps=null"),
    )


def train_judge(facts: Facts) -> Try:
    return train_reward(facts, "judge")


def beyond_length(facts: Facts) -> Try:
    return Try(
        "it has learned little but length: pairs where the length rule is wrong, or a model that reads "
        "(the policy as reward model)",
        _set(reward__model="policy", reward__lr=3e-5),
    )


def calibrate(facts: Facts) -> Try:
    return Try(
        "scores are too sure: smooth the labels, fewer passes", _set(reward__smoothing=0.1, reward__epochs=1)
    )


def spread_scores(facts: Facts) -> Try:
    return Try(
        "the reward hardly tells the policy's answers apart: retrain it without smoothing and with looser "
        "scores, or put the policy's own samples among its pairs",
        _set(reward__smoothing=0.0, reward__centring=0.001, reward__epochs=facts.params.reward.epochs + 1),
    )


def vary_groups(facts: Facts) -> Try:
    optimize = facts.params.optimize
    return Try(
        "answers of a group get the same reward: more and more varied samples, or a finer reward",
        _set(optimize__group=2 * optimize.group, optimize__temperature=max(1.0, optimize.temperature)),
    )


# -- SFT ---------------------------------------------------------------------------------------------------


def longer_rows(facts: Facts) -> Try:
    sft = facts.params.sft
    return Try("leave room for the answers", _set(sft__max_length=2 * sft.max_length))


def sft_rate(facts: Facts) -> Try:
    """Down where the loss went up, else up and longer."""
    sft, values = facts.params.sft, facts.series("sft", "loss")
    if values[-1] > values[0]:
        return Try("the loss rises: a lower learning rate", _set(sft__lr=sft.lr / 3))
    return Try(
        "the loss stands still: a higher learning rate and more passes",
        (f"sft.lr={sft.lr * 2:.3g}", f"sft.epochs={sft.epochs + 1}", "sft.max_steps=null"),
    )


def teach_stopping(facts: Facts) -> Try:
    return Try(
        "the end of turn was not learned: more passes; the template must end a turn with the tokenizer's EOS",
        (
            f"sft.epochs={facts.params.sft.epochs + 1}",
            "sft.max_steps=null",
        ),
    )


def longer_answers(facts: Facts) -> Try:
    cap = 2 * facts.params.optimize.max_new_tokens
    return Try(
        "no answer fits: a higher cap for training and comparison",
        _set(
            optimize__max_new_tokens=cap,
            evaluate__max_new_tokens=max(cap, facts.params.evaluate.max_new_tokens),
        ),
    )


# -- hyper-parameters --------------------------------------------------------------------------------------


def lower_lr_try(facts: Facts) -> Try:
    return Try("a lower learning rate", _set(optimize__lr=lower_lr(facts.params.optimize)))


def exact_and_lower(facts: Facts) -> Try:
    return Try(
        "full precision and a lower learning rate",
        _set(optimize__precision="fp32", optimize__lr=lower_lr(facts.params.optimize)),
    )


def move_more(facts: Facts) -> Try:
    """A higher learning rate, else more steps."""
    optimize = facts.params.optimize
    higher = raise_lr(optimize)
    if higher is None:
        return Try("the policy has not moved: more steps", _set(optimize__steps=2 * optimize.steps))
    return Try("the policy has not moved: a higher learning rate", _set(optimize__lr=higher))


def larger_batch(facts: Facts) -> Try:
    optimize = facts.params.optimize
    return Try(
        "the change drowns in the noise of a batch: more prompts a step and more steps",
        _set(optimize__prompts=2 * optimize.prompts, optimize__steps=2 * optimize.steps),
    )


def find_gradient(facts: Facts) -> Try:
    return Try(
        "no gradient: equal rewards within each group; more samples, more varied",
        vary_groups(facts).settings,
    )


def fewer_updates(facts: Facts) -> Try:
    lr = lower_lr(facts.params.optimize)
    return Try("smaller steps away from the sampler", _set(optimize__lr=lr, optimize__ppo__updates=1))


def keep_open(facts: Facts) -> Try:
    optimize = facts.params.optimize
    return Try(
        "the policy has closed: a tighter leash and a lower learning rate",
        _set(optimize__beta=_beta(optimize), optimize__lr=lower_lr(optimize)),
    )


# -- over-optimisation and evaluation ----------------------------------------------------------------------


def tighter_leash(facts: Facts) -> Try:
    return Try("a higher weight of the KL", _set(optimize__beta=_beta(facts.params.optimize)))


def end_at_peak(facts: Facts) -> Try:
    """More KL weight, an ensemble that doubts, and an end where the judge was happiest."""
    optimize, reward = facts.params.optimize, facts.params.reward
    rows = [row for row in facts.metrics.get("optimize", ()) if isinstance(row.get("judge"), float)]
    peak = max(rows, key=lambda row: float(str(row["judge"])), default={})
    step = peak.get("step")
    early = isinstance(step, int) and 1 < step < optimize.steps
    settings = _set(
        optimize__beta=_beta(optimize),
        reward__members=max(3, reward.members),
        optimize__rewards__ensemble="uncertainty",
    )
    if early:
        settings += (f"optimize.steps={step}",)
    until = f"; end at step {step}, where the judge was highest" if early else ""
    return Try(f"the proxy is being gamed: a tighter leash, an ensemble that doubts{until}", settings)


def hold_length(facts: Facts) -> Try:
    optimize = facts.params.optimize
    try:
        values = facts.series("optimize", "length")
    except Missing:
        return tighter_leash(facts)
    if values[-1] >= values[0]:
        return Try(
            "answers grow: DAPO's length penalty over the last quarter, a tighter leash",
            _set(
                optimize__rewards__overlong_buffer=max(1, optimize.max_new_tokens // 4),
                optimize__beta=_beta(optimize),
            ),
        )
    return Try(
        "answers shrink: no penalty for unfinished ones, a tighter leash",
        _set(optimize__rewards__missing_eos=0.0, optimize__beta=_beta(optimize)),
    )


def remove_overlap(facts: Facts) -> Try:
    return Try("take the prompts met in training out of data.eval_prompts", instead="plumbline validate")


def scorable(facts: Facts) -> Try:
    return Try(
        "prompts too long or not scored: a higher limit; evaluate/samples.jsonl says why each failed",
        _set(evaluate__max_prompt=2 * facts.params.evaluate.max_prompt),
    )


def more_prompts(facts: Facts) -> Try:
    """As many as the interval needs, and where they are to come from."""
    needed = wanted_prompts(facts)
    if needed >= NEVER:
        return move_more(facts)
    here = facts.results.get("validate", {}).get("prompts")
    have = here.get("evaluate") if isinstance(here, dict) else None
    lacking = isinstance(have, int) and have < needed
    what = f"compare on {needed} prompts" + (
        f"; only {have} are there, add some to data.eval_prompts" if lacking else ""
    )
    return Try(what, _set(evaluate__prompts=max(needed, facts.params.evaluate.prompts)))


def train_slice(facts: Facts) -> Try:
    return Try("pairs and prompts like those of the worse slices", instead="plumbline run --data MORE.jsonl")


def less_refusal(facts: Facts) -> Try:
    return Try(
        "pairs in which a helpful answer beats a refusal, and a tighter leash",
        _set(optimize__beta=_beta(facts.params.optimize)),
    )


def learn_more(facts: Facts) -> Try:
    """What an otherwise healthy run without a gain can do."""
    optimize = facts.params.optimize
    return Try("healthy, but no better: train longer", _set(optimize__steps=2 * optimize.steps))
