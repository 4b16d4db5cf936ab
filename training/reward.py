"""Bradley-Terry reward model or judge: `python -m training.launch -m training.reward WORKDIR`.

    L = sum_i w_i [-(1-s) log sigma(g_i) - s log sigma(-g_i) + c (r_chosen + r_rejected)^2] / sum_i w_i
    g_i = r_chosen - r_rejected - margin

In: `pairs` (Preference rows to learn from), `test` (held-out rows), `model` when params.model is policy.
Out: model/ and a verdict: accuracy with a Wilson interval, margin, calibration, the length-only baseline
and a gate. With `heads` a pair trains the head of its dimension (all heads equally when it names none of
them). Members of an ensemble differ in the start of their heads and in the order of the rows. What is
judged is what was published: the model is loaded again from its folder, and its scores are compared with
those of the trained one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from data.errors import ConfigurationError, DataError, DivergenceError, InfrastructureError, Stopped
from data.records import Preference, read_records
from training import losses, positions, watch
from training.batches import Batch, deal, fill, step_rows, steps_per_epoch
from training.checkpoint import Checkpoints
from training.config import GateParams, RewardParams
from training.device import autocast, device, resolve
from training.engine import Engine, connect
from training.models import add_lora, digest, saved_dtype
from training.rundir import RunDir, program
from training.score import (
    Kind,
    Member,
    Padded,
    ScoreModel,
    batch_of,
    encode_row,
    load_backbone,
    load_score_tokenizer,
    locate,
)
from training.stats import expected_calibration_error, wilson
from training.steps import StepBatch

ROUND_TRIP = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Score difference allowed between the trained model and its saved copy."""


@dataclass(frozen=True)
class Pair:
    """An encoded pair with one prompt for both answers, and the weight it has on each head."""

    prompt: list[int]
    answers: tuple[list[int], list[int]]
    weight: list[float]


class Ensemble(nn.Module):
    """All members as one module: one micro batch a member in each forward pass, so that all get their
    gradient."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, batches: Sequence[Batch | Padded | StepBatch]) -> list[Float[Tensor, "*N heads"]]:
        """Scores of each member for its own batch."""
        return [member(batch) for member, batch in zip(self.members, batches, strict=True)]


def head_weights(heads: Sequence[str], pair: Preference) -> list[float]:
    """The pair's weight on its dimension's head; spread over all when no head is meant."""
    if pair.dimension in heads:
        return [pair.weight * float(head == pair.dimension) for head in heads]
    return [pair.weight / max(1, len(heads))] * max(1, len(heads))


def encode_pairs(tok: Any, kind: Kind, rows: Sequence[Preference], params: RewardParams) -> list[Pair]:
    """Both answers see the same prompt, cut for the longer one: neither may know more than the other."""
    pairs = []
    for row in rows:
        (first, chosen), (second, rejected) = (
            encode_row(tok, kind, row.prompt, text, params.max_length) for text in (row.chosen, row.rejected)
        )
        prompt = min(first, second, key=len)
        pairs.append(Pair(prompt, (chosen, rejected), head_weights(params.heads, row)))
    return pairs


def micro_batches(
    pairs: Sequence[Pair], indices: Sequence[int], budget: int, shared: bool
) -> list[list[int]]:
    """A step's pairs, filled by tokens."""
    lengths = []
    for index in indices:
        pair = pairs[index]
        rows = [len(pair.prompt) + len(answer) for answer in pair.answers]
        lengths.append([sum(rows) - len(pair.prompt)] if shared else rows)
    return [[indices[at] for at in part] for part in fill(lengths, budget, padded=not shared)]


def train_step(
    engine: Engine,
    pairs: Sequence[Pair],
    params: RewardParams,
    pad_id: int,
    shared: bool,
    seed: int,
    step: int,
) -> tuple[float, float]:
    """Gradient of one step of all members; returns this rank's parts of the mean loss and of the correct
    pairs."""
    members = params.members
    plans, counts = [], []
    for number in range(members):
        indices = step_rows(len(pairs), params.batch, seed + number, step)
        counts.append(sum(sum(pairs[index].weight) for index in indices))
        plans.append(micro_batches(pairs, indices, max(1, params.token_budget // members), shared))
    # A member with fewer micro batches computes its first one again with weight 0.
    zipped = list(itertools.zip_longest(*plans))
    mine = deal([[at] for at in range(len(zipped))], engine.rank, engine.world)
    total = correct = 0.0
    for number, ([at], real) in enumerate(mine, 1):
        parts = [part or plan[0] for part, plan in zip(zipped[at], plans, strict=True)]
        factors = [float(real and part is not None) for part in zipped[at]]
        groups = [
            [[(pairs[i].prompt, answer) for answer in pairs[i].answers] for i in part] for part in parts
        ]
        with autocast(params.precision):
            scores = engine.module([batch_of(group, pad_id, shared).to(device()) for group in groups])
        loss = torch.zeros((), device=device())
        for part, factor, score, count in zip(parts, factors, scores, counts, strict=True):
            weight = factor * torch.tensor([pairs[i].weight for i in part], device=device())
            out = losses.bradley_terry(
                score[0::2], score[1::2], torch.full_like(weight, params.margin), weight,
                centring=params.centring, smoothing=params.smoothing, count=count * members,
            )  # fmt: skip
            loss = loss + out.loss
            correct += float((out.correct * weight).sum() / (count * members))
        engine.backward(loss, last=number == len(mine))
        total += float(loss.detach())
    return total, correct


def main(run: RunDir) -> None:
    """Reads, trains, publishes, judges."""
    params = run.params(RewardParams)
    rows = list(read_records(run.input("pairs"), Preference))
    test = list(read_records(run.input("test"), Preference))
    if not rows or not test:
        raise DataError(f"{len(rows)} pairs to learn from and {len(test)} held out: both must be at least 1")
    source = locate(params.model, run.input("model") if params.model == "policy" else None)
    positions.require_at(source, params, run.config["stage"])
    connect()
    members, kind = build_members(source, params, run.seed)
    tok = load_score_tokenizer(source, kind)
    pairs = encode_pairs(tok, kind, rows, params)
    ensemble = Ensemble(members).to(device()).train()
    total = params.epochs * steps_per_epoch(len(pairs), params.batch)
    total = min(total, params.max_steps or total)
    engine = Engine(
        ensemble, params.engine, lr=params.lr, total_steps=total, warmup=params.warmup,
        min_lr_share=params.min_lr_share, weight_decay=params.weight_decay, clip_norm=params.clip_norm,
        fast=[member.head for member in members], fast_factor=params.head_lr_factor,
    )  # fmt: skip
    settings = {
        "kind": kind,
        "heads": list(params.heads),
        "members": params.members,
        "max_length": params.max_length,
        "pooling": params.pooling,
    }
    live = ScoreModel(members, tok, settings, params.precision)
    ensemble.train()
    checkpoints = Checkpoints(run, engine, params.keep)
    start, state = checkpoints.resume() or (0, {**watch.new_state(), "correct": []})
    if start == 0:
        run.journal("start", pairs=len(pairs), held_out=len(test), steps=total, kind=kind,
                    prompts_shared=live.shared, precision=resolve(params.precision))  # fmt: skip

    def work(step: int) -> tuple[float, float]:
        return train_step(engine, pairs, params, int(tok.pad_token_id), live.shared, run.seed, step)

    for step in range(start, total):
        take_step(run, engine, checkpoints, params, work, state, step, total)
    publish(run, engine, live, params, state, total, counts={"pairs": len(rows)},
            scores=lambda model: pair_scores(model, test[:8]),
            verdict=lambda model: judge(model, rows, test, params.gate))  # fmt: skip


def build_members(source: Path | str, params: RewardParams, seed: int) -> tuple[list[Member], Kind]:
    """Fresh heads on pretrained backbones; each member's head has a seed of its own."""
    members = []
    kind: Kind = "encoder"
    for number in range(params.members):
        backbone, kind = load_backbone(source, params.pooling)
        if params.frozen_layers:
            freeze(backbone, params.frozen_layers)
        if params.lora:
            backbone = add_lora(backbone, params.lora)
        if params.engine.gradient_checkpointing:
            backbone.gradient_checkpointing_enable({"use_reentrant": False})
        heads = max(1, len(params.heads))
        members.append(Member(backbone, kind, heads, head_seed(seed, number), params.pooling))
    return members, kind


def freeze(backbone: nn.Module, count: int) -> None:
    """Keeps the embeddings and the lowest `count` layers as they are: no gradient, no optimizer state."""
    stacks = [(name, part) for name, part in backbone.named_modules() if isinstance(part, nn.ModuleList)]
    name, layers = max(stacks, key=lambda stack: len(stack[1]))
    if count >= len(layers):
        raise ConfigurationError(
            f"frozen_layers is {count} of {len(layers)} layers; at least one must be left to learn"
        )
    lowest = tuple(f"{name}.{number}." for number in range(count))
    for key, parameter in backbone.named_parameters():
        # Outside the stack there are embeddings, and in some models one last norm, which goes on learning.
        embedding = not key.startswith(f"{name}.") and ("embed" in key or "wte" in key or "wpe" in key)
        if embedding or key.startswith(lowest):
            parameter.requires_grad_(False)


def head_seed(seed: int, number: int) -> int:
    """Seed of a member's head."""
    return seed * 1009 + number


def take_step(
    run: RunDir, engine: Engine, checkpoints: Checkpoints, params: RewardParams,
    work: Callable[[int], tuple[float, float]], state: dict[str, Any], step: int, total: int,
) -> None:  # fmt: skip
    """One optimizer step and what belongs to it. `work` makes the gradient and gives this rank's parts of
    loss and accuracy."""
    began = time.monotonic()
    loss, correct = work(step)
    info = engine.step()
    loss, correct, stop = engine.sum([loss, correct, float(run.stop_requested)])
    # Nothing was right or wrong in a step whose rows have no weight.
    state["correct"] += [correct] if math.isfinite(correct) else []
    run.metrics(step + 1, {"loss": loss, "accuracy": correct, "lr": info.lr, "grad_norm": info.grad_norm})
    run.progress(step + 1, total)
    run.timing(step + 1, {"seconds": time.monotonic() - began})
    watch.after_step(run, engine, params.guards, state, step + 1, loss, info)
    if stop or (step + 1) % params.checkpoint_every == 0 or step + 1 == total:
        checkpoints.save(step + 1, state, healthy=info.finite)
    if stop and step + 1 < total:
        raise Stopped(f"stopped after step {step + 1} of {total}; run again to go on from there")


def publish(
    run: RunDir, engine: Engine, live: ScoreModel, params: RewardParams, state: dict[str, Any], total: int,
    *, counts: dict[str, Any], scores: Callable[[ScoreModel], Tensor],
    verdict: Callable[[ScoreModel], dict[str, Any]],
) -> None:  # fmt: skip
    """Saves the model, compares it with its copy by some held-out scores, and writes the verdict on the
    copy."""
    ends = watch.ends(state["losses"])
    folder = run.path / "model"
    states = [engine.full_state(member) for member in live.members]
    if engine.first:
        dtype = torch.float32 if live.kind == "encoder" else saved_dtype(run.config)
        live.save(folder, dtype, states if params.engine.zero == 3 else None)
        saved = ScoreModel.load(folder)
        saved.seal(folder)
        if params.engine.zero != 3:
            check_round_trip(live, saved, scores, ROUND_TRIP[dtype])
        for number, member in enumerate(saved.members):
            fresh = Member(member.backbone, live.kind, max(1, len(params.heads)), head_seed(run.seed, number))
            if torch.equal(fresh.head.detach(), member.head.detach().cpu()):
                raise DivergenceError(
                    f"the head of member {number} is as it was at the start: nothing was learned"
                )
        tail = max(1, len(state["correct"]) // 4)
        run.finish(
            {
                "status": "trained",
                "digest": digest(folder),
                "steps": total,
                **counts,
                **ends,
                "guards": state["seen"],
                "train_accuracy": sum(state["correct"][-tail:]) / tail,
                **verdict(saved),
            }
        )
    engine.barrier()


def pair_scores(model: ScoreModel, rows: Sequence[Preference]) -> Float[Tensor, "M N heads"]:
    """Scores of both answers of some pairs."""
    return model.score_members([(row.prompt, text) for row in rows for text in (row.chosen, row.rejected)])


def check_round_trip(
    live: ScoreModel, saved: ScoreModel, scores: Callable[[ScoreModel], Tensor], bound: float
) -> None:
    """Scores of some rows before and after the disk; a head that was not saved shows here."""
    for member in live.members:
        member.eval()
    live.precision = "fp32"
    worst = float((scores(live) - scores(saved)).abs().max())
    if not worst <= bound:
        raise InfrastructureError(
            f"the saved reward model's scores differ from the trained one's by {worst:.3g} (bound {bound}); "
            "set model.dtype: float32, or look for a disk that is full"
        )


def judge(
    model: ScoreModel, rows: Sequence[Preference], test: Sequence[Preference], gate: GateParams
) -> dict[str, Any]:
    """Held-out evidence about a score model, and whether it may be used."""
    scores = pair_scores(model, test).mean(0)
    weights = torch.tensor([head_weights(model.heads, row) for row in test])
    weights = weights / weights.sum(1, keepdim=True)
    gaps = ((scores[0::2] - scores[1::2]) * weights).sum(1).double()
    wins = (0.5 * (1 + gaps.sign())).tolist()
    accuracy = wilson(sum(wins), len(wins), confidence=gate.confidence)
    rule, baseline = length_baseline(rows, test)
    confident = gaps.abs().sigmoid().tolist()
    verdict = decide(accuracy.estimate, accuracy.lower, len(wins), baseline, gate)
    return {
        "accuracy": accuracy.estimate,
        "interval": [accuracy.lower, accuracy.upper],
        "n": len(wins),
        "margin_mean": float(gaps.mean()),
        "margin_std": float(gaps.std(correction=0)),
        "score_mean": float(scores.double().mean()),
        "score_std": float(scores.double().std(correction=0)),
        "calibration": {
            "ece": expected_calibration_error(confident, wins),
            "confidence_mean": sum(confident) / len(confident),
        },
        "dimensions": by_dimension(test, wins),
        "length_rule": rule,
        "length_baseline": baseline,
        "gate": verdict,
    }


def by_dimension(test: Sequence[Preference], wins: Sequence[float]) -> dict[str, dict[str, float]]:
    """Accuracy and number of pairs of each dimension."""
    table: dict[str, list[float]] = {}
    for row, win in zip(test, wins, strict=True):
        table.setdefault(row.dimension or "none", []).append(win)
    return {name: {"accuracy": sum(won) / len(won), "n": len(won)} for name, won in sorted(table.items())}


def length_baseline(rows: Sequence[Preference], test: Sequence[Preference]) -> tuple[str, float]:
    """The better of "longer wins" and "shorter wins" on the training pairs, and its accuracy on the held-
    out ones."""

    def longer(pairs: Sequence[Preference]) -> float:
        signs = [(len(p.chosen) > len(p.rejected)) - (len(p.chosen) < len(p.rejected)) for p in pairs]
        return 0.5 + 0.5 * sum(signs) / len(signs)

    return ("longer", longer(test)) if longer(rows) >= 0.5 else ("shorter", 1 - longer(test))


def decide(accuracy: float, lower: float, n: int, baseline: float, gate: GateParams) -> dict[str, Any]:
    """The gate: open only for a model that is better than chance with confidence, and better than length
    alone."""
    if n < gate.min_pairs:
        return {
            "open": False,
            "reason": f"{n} held-out pairs are fewer than gate.min_pairs = {gate.min_pairs}",
        }
    if lower <= 0.5:
        return {
            "open": False,
            "reason": (
                f"not better than chance: accuracy {accuracy:.3f} on {n} pairs, lower end {lower:.3f} <= .5"
            ),
        }
    if gate.beat_length and accuracy <= baseline:
        return {
            "open": False,
            "reason": f"not better than length alone: {accuracy:.3f} against {baseline:.3f}",
        }
    return {
        "open": True,
        "reason": f"accuracy {accuracy:.3f} on {n} pairs, lower end {lower:.3f}; length alone {baseline:.3f}",
    }


if __name__ == "__main__":
    program(main)
