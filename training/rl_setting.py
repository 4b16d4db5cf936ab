"""What an on-policy run is made of: everything read and built before its first step (training/rl.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.records import Prompt, read_records
from training import generate_vllm, preflight
from training.batches import cannot_share
from training.chat import encode_prompt, load_tokenizer, stop_ids
from training.checkpoint import Checkpoints
from training.config_optimize import OptimizeParams
from training.device import autocast
from training.engine import Engine, connect
from training.experience import Scoring, build_scorers
from training.generate import BuiltinGenerator, Generator
from training.heads import require_head
from training.learner import Learner
from training.logprobs import AnswerLogprobs
from training.models import load_policy, reference
from training.rundir import RunDir
from training.score import ScoreModel
from training.trunk import Trunk
from training.value import ActorCritic


class Clock:
    """Seconds by part of a step; they go to timing.jsonl."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What has passed since the last lap belongs to `part`."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


@dataclass
class Setting:
    """What a run is made of; nothing here changes but the engine's weights."""

    run: RunDir
    params: OptimizeParams
    tok: PreTrainedTokenizerBase
    prompts: list[Prompt]
    held_out: list[Prompt]
    learner: Learner
    generator: Generator
    scoring: Scoring
    checkpoints: Checkpoints
    judge: ScoreModel | None
    clock: Clock

    @property
    def engine(self) -> Engine:
        return self.learner.engine


def set_up(run: RunDir) -> Setting:
    """Reads everything, builds everything."""
    params = run.params(OptimizeParams)
    generate_vllm.require(params.generator)
    source = run.input("model")
    tok = load_tokenizer(source)
    rows = list(read_records(run.input("prompts"), Prompt))
    kept = [row for row in rows if len(encode_prompt(tok, row.prompt)) <= params.max_prompt]
    if len(kept) < len(rows):
        run.timing(0, {"prompts_too_long": len(rows) - len(kept)})
    kept = list({row.id: row for row in sorted(kept, key=lambda row: row.id)}.values())
    held_out, prompts = kept[: params.held_out], kept[params.held_out :]
    if len(prompts) < params.prompts:
        raise DataError(
            f"{run.input('prompts')}: {len(prompts)} of {len(rows)} prompts are left (max_prompt "
            f"{params.max_prompt}, {len(held_out)} set apart), a step asks for {params.prompts}; give more "
            "prompts, or lower optimize.prompts or optimize.held_out"
        )
    preflight.lengths(source, params)
    preflight.tokens(tok, prompts)
    connect()
    model = load_policy(
        source, params.precision, params.lora, params.engine.gradient_checkpointing, dropout=False
    )
    require_head(model, source)
    frozen = reference(model, run.path)
    module = ActorCritic(model) if params.algorithm == "ppo" else AnswerLogprobs(model)
    total = params.steps * params.ppo.updates * params.ppo.minibatches
    engine = Engine(
        module, params.engine, lr=params.lr, total_steps=total, warmup=params.warmup,
        min_lr_share=params.min_lr_share, weight_decay=params.weight_decay, clip_norm=params.clip_norm,
    )  # fmt: skip
    why = cannot_share(model)
    trunk = Trunk.of(model) if params.engine.zero < 3 and params.generator.kind == "builtin" else None
    learner = Learner(engine, model, frozen, params, int(tok.pad_token_id), why is None, trunk)
    encoded = [encode_prompt(tok, row.prompt) for row in prompts[: params.generator.canaries]]
    generator = build_generator(run, learner, tok, encoded)
    inputs = run.config["inputs"]
    learned = run.input("reward") if "reward" in inputs else None
    scoring = Scoring(
        build_scorers(params.rewards, learned), params.rewards, params.max_new_tokens, engine.sum
    )
    judge = ScoreModel.load(run.input("judge")) if "judge" in inputs and params.guards.gap else None
    checkpoints = Checkpoints(run, engine, params.keep)
    setting = Setting(
        run, params, tok, prompts, held_out, learner, generator, scoring, checkpoints, judge, Clock()
    )
    if why is not None:
        run.timing(0, {"unshared": why})
    return setting


def build_generator(
    run: RunDir, learner: Learner, tok: PreTrainedTokenizerBase, canaries: Sequence[list[int]]
) -> Generator:
    """What params.generator names."""
    params, stops = learner.params, stop_ids(tok)
    if params.generator.kind == "vllm":
        return generate_vllm.connect(learner, stops, canaries, run.input("model"), run.path, run.seed)
    return BuiltinGenerator(
        learner.model, stops, learner.pad_id, autocast=lambda: autocast(params.precision),
        gathered=learner.engine.gathered, trunk=learner.trunk,
    )  # fmt: skip
