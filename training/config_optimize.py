"""The section `optimize`: the algorithms, the groups that only some of them read, and what goes with what."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from training.config import (
    EngineParams,
    LoraParams,
    Precision,
    Section,
    SpikeParams,
    check_engine,
    is_service,
)
from training.config_guards import GuardParams
from training.config_rewards import RewardsParams


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

    low: float = Field(
        0.2, gt=0, lt=1, description="ratio may fall to 1 - low; left out, gspo has 3e-4 [2507.18071]"
    )
    high: float = Field(
        0.2,
        gt=0,
        description="ratio may rise to 1 + high; left out, dapo has .28 [2503.14476], gspo 4e-4 [2507.18071]",
    )
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
        if serves and not is_service(self.url):
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

BY_PAPER: dict[str, dict[str, Any]] = {
    "dapo": {"beta": 0.0, "clip": {"high": 0.28}},  # [2503.14476]
    # The ratio of an answer is the mean over its tokens, so it moves far less than a token's [2507.18071].
    "gspo": {"clip": {"low": 3e-4, "high": 4e-4}},
}
"""Defaults of an algorithm's paper that are others than the field's, for keys that are left out."""


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
        5e-6,
        gt=0,
        le=1,
        description="peak learning rate; the field starts at 5e-6, LoRA bears 10 to 50 times it",
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
    processes: int = Field(
        1, ge=1, le=65_536, description="ranks; one a GPU; a run goes on with as many only"
    )
    threads: int = Field(
        1, ge=1, le=1024, description="CPU threads a rank; a different number may change the last bits"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_paper(cls, values: Any) -> Any:
        """What is left out and has another default in the algorithm's paper."""
        if not isinstance(values, dict):
            return values
        papers = BY_PAPER.get(str(values.get("algorithm")), {})
        given = values.get("clip", {})
        if isinstance(given, dict) and "clip" in papers:
            values = {**values, "clip": {**papers["clip"], **given}}
        return {**papers, **values}

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
        check_engine(self.lora, self.engine, self.processes)
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
