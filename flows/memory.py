"""What a stage will need of memory, by formula, before anything is loaded. Bytes a rank.

With P weights, F of them trained, N ranks that share, T tokens of a micro batch, L trained layers:
- weights 4 P (float32, and 2 P of autocast's copies in bfloat16), gradients 4 F, AdamW 8 F; a frozen base
  under adapters b P (1 in int8, 1/2 in nf4); ZeRO 1 divides AdamW by N, 2 gradients too, 3 weights too;
  offload moves AdamW off the device;
- activations b T (7 h + 3 kv + 4 i) a layer that the backward pass crosses, b = 4 or 2; with checkpointing
  b T h a layer and one layer whole;
- logits 3 * 4 * C V: a chunk of C positions (training/logprobs.py), its gradient, and its softmax;
- a sampler's cache 2 b kv a layer and token, prompt and answer long, as many rows as are decoded together;
- a frozen reference of a full fine-tune against a reward, 4 P.
Counted high on purpose: prompts of full length. Not counted: attention scores, allocator slack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tasks.params import Params
from training.config import LoraParams, RewardParams, SftParams
from training.config_optimize import ON_PAIRS, OptimizeParams
from training.generate import MAX_ROWS
from training.logprobs import CHUNK

PROGRAM = 0.6 * 2**30
"""Python with torch and transformers, measured at import."""
Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer with gated MLPs (others need less)."""

    layers: int
    hidden: int
    heads_width: int
    kv_width: int
    inner: int
    vocab: int
    tied: bool
    experts: int = 1

    @property
    def layer(self) -> int:
        """Weights of a layer: attention, MLP, two norms."""
        attention = self.hidden * (2 * self.heads_width + 2 * self.kv_width)
        return attention + 3 * self.hidden * self.inner * self.experts + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, the head counted once when it is tied."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.layers * self.layer + self.hidden

    def adapters(self, lora: LoraParams) -> int:
        """Weights of low-rank adapters: rank * (inputs + outputs) a matrix."""
        h, q, kv = self.hidden, self.heads_width, self.kv_width
        sizes = 2 * (h + q) + 2 * (h + kv)
        if lora.target == "all-linear":
            sizes += 3 * (h + self.inner) * self.experts
        return lora.rank * sizes * min(lora.layers or self.layers, self.layers)


MINILM = Shape(6, 384, 384, 384, 1024, 30522, True)
"""The encoder's two-matrix MLP of 1536 counts as a gated one of 1024: as many weights."""


def shape_of(config: Mapping[str, object]) -> Shape | None:
    """Shape from a model's config.json; None where it does not say."""

    def size(name: str, otherwise: int | None = None) -> int:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if otherwise is None:
            raise KeyError(name)
        return otherwise

    try:
        hidden, heads = size("hidden_size"), size("num_attention_heads")
        width = size("head_dim", hidden // heads)
        return Shape(
            layers=size("num_hidden_layers"), hidden=hidden, heads_width=heads * width,
            kv_width=size("num_key_value_heads", heads) * width, inner=size("intermediate_size"),
            vocab=size("vocab_size"), tied=config.get("tie_word_embeddings") is True,
            experts=size("num_local_experts", size("num_experts", 1)),
        )  # fmt: skip
    except KeyError:
        return None


@dataclass(frozen=True)
class Need:
    """Bytes of one rank of a stage, by purpose."""

    stage: str
    processes: int
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def rank(self) -> float:
        """Bytes of one rank."""
        return sum(self.parts.values())


Trained = SftParams | RewardParams | OptimizeParams


def training(shape: Shape, section: Trained, stage: str, precision: Precision) -> Need:
    """Weights, gradients, optimizer, activations and logits of a training stage."""
    engine, lora = section.engine, section.lora
    size = 2 if precision == "bf16" else 4
    whole = shape.parameters / engine.tensor_parallel
    learned = shape.adapters(lora) if lora else whole
    base = whole * {"nf4": 0.5, "int8": 1.0, None: float(size)}[lora.quantise] if lora else 0.0
    share = section.processes // engine.tensor_parallel
    kept = shape.layers if lora is None or lora.layers is None else min(lora.layers, shape.layers)
    per_token = size * (4 * shape.inner + 7 * shape.hidden + 3 * shape.kv_width)
    crossed = shape.layers - section.frozen_layers if isinstance(section, RewardParams) else kept
    if engine.gradient_checkpointing:
        activations = section.token_budget * (size * shape.hidden * crossed + per_token)
    else:
        activations = section.token_budget * per_token * crossed
    parts = {
        "program": PROGRAM,
        "weights": base + (4 if lora or size == 4 else 6) * learned / (share if engine.zero == 3 else 1),
        "gradients": 4 * learned / (share if engine.zero >= 2 else 1),
        "optimizer": 0.0 if engine.offload else 8 * learned / (share if engine.zero >= 1 else 1),
        "activations": activations,
    }
    if not isinstance(section, RewardParams):
        parts["logits"] = 3.0 * 4 * CHUNK * shape.vocab
    return Need(stage, section.processes, parts)


def _cache(shape: Shape, rows: int, tokens: int, size: int) -> float:
    return 2.0 * size * shape.kv_width * shape.layers * rows * tokens


def estimate(params: Params, shape: Shape, precision: Mapping[str, Precision]) -> list[Need]:
    """Every stage that holds a model, in the order of the DAG."""
    needs = [training(shape, params.sft, "sft", precision["sft"])]
    for name, section in (("reward", params.reward), ("judge", params.judge)):
        if section.model in ("minilm", "policy"):
            model = MINILM if section.model == "minilm" else shape
            needs.append(training(model, section, name, precision[name]))
    optimize = params.optimize
    last = training(shape, optimize, "optimize", precision["optimize"])
    parts = dict(last.parts)
    if optimize.lora is None and optimize.algorithm not in ON_PAIRS:
        sharded = optimize.processes if optimize.engine.zero == 3 else 1
        parts["reference"] = 4 * shape.parameters / sharded / optimize.engine.tensor_parallel
    if optimize.algorithm not in ON_PAIRS and optimize.generator.kind == "builtin":
        rows = min(MAX_ROWS, -(-optimize.prompts // optimize.processes) * optimize.group)
        tokens = optimize.max_prompt + optimize.max_new_tokens
        parts["cache"] = _cache(shape, rows, tokens, 2 if precision["optimize"] == "bf16" else 4)
    needs.append(Need("optimize", optimize.processes, parts))
    compared, size = params.evaluate, 2 if precision["evaluate"] == "bf16" else 4
    rows = min(MAX_ROWS, -(-compared.prompts // compared.processes))
    needs.append(
        Need(
            "evaluate",
            compared.processes,
            {
                "program": PROGRAM,
                "weights": 4.0 * shape.parameters,
                "cache": _cache(shape, rows, compared.max_prompt + compared.max_new_tokens, size),
            },
        )
    )
    return needs


def at_once(needs: list[Need], parallel: int, shared: bool) -> Need:
    """The largest demand on one memory: a rank's where each has a device of its own, else that of all ranks
    of the stages that may run side by side (sft, reward and judge).
    """
    if not shared:
        return max(needs, key=lambda need: need.rank)
    groups = [[need] for need in needs]
    early = sorted(
        (n for n in needs if n.stage in ("sft", "reward", "judge")), key=lambda n: -n.rank * n.processes
    )
    groups.append(early[:parallel])
    best = max(groups, key=lambda group: sum(need.rank * need.processes for need in group))
    if len(best) == 1:
        one = best[0]
        return Need(one.stage, 1, {name: size * one.processes for name, size in one.parts.items()})
    parts = {need.stage: need.rank * need.processes for need in best}
    return Need(" with ".join(need.stage for need in best), 1, parts)
