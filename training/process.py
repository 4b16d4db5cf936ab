"""Process reward model: `python -m training.launch -m training.process WORKDIR`.

    L = -1/K sum over labelled steps of y log sigma(s) + (1 - y) log sigma(-s)        [2305.20050]

s is read at a step's last token, K is the number of labelled steps of a member's whole batch, and a step
that nobody judged only gives context. In: `pairs` (StepLabels to learn from), `test` (held-out ones), `model`
when params.model is policy. Out: as training/reward.py, with the accuracy of held-out steps. Its interval
takes the steps of one prompt as one cluster: they are anything but independent.

Deviation from the paper: two labels; a neutral step counts as not judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from data.errors import ConfigurationError, DataError
from data.records import StepLabels, read_records
from training import losses, positions, watch
from training.batches import Tree, deal, plan, step_rows, steps_per_epoch
from training.checkpoint import Checkpoints
from training.config import GateParams, ProcessParams, RewardParams
from training.device import autocast, device, resolve
from training.engine import Engine, connect
from training.reward import Ensemble, build_members, publish, take_step
from training.rundir import RunDir, program
from training.score import ScoreModel, load_score_tokenizer, locate
from training.stats import clustered_share, expected_calibration_error
from training.steps import encode_steps, joined, score_steps, split_steps, step_batch, step_ends


@dataclass(frozen=True)
class Labelled:
    """An encoded answer with the label of each step that fits."""

    tree: Tree
    ends: list[int]
    labels: list[bool | None]

    @property
    def judged(self) -> int:
        """Steps with a label."""
        return sum(label is not None for label in self.labels)


def encode(
    tok: Any, rows: Sequence[StepLabels], process: ProcessParams, max_length: int
) -> tuple[list[Labelled], dict[str, int]]:
    """Answers with at least one labelled step, and what was lost: steps over max_length, answers without a
    label left, steps that `split` would part again when it meets them in an answer."""
    found = []
    lost = {"steps_over_max_length": 0, "answers_without_label": 0, "steps_parted_again": 0}
    for row in rows:
        prompt, parts = encode_steps(tok, row.prompt, row.steps, process.split, max_length)
        lost["steps_over_max_length"] += len(row.steps) - len(parts)
        lost["steps_parted_again"] += sum(len(split_steps(step, process.split)) > 1 for step in row.steps)
        answer = Labelled(
            Tree(row.id, prompt, [joined(parts)]), step_ends(parts), list(row.labels[: len(parts)])
        )
        if answer.judged:
            found.append(answer)
        else:
            lost["answers_without_label"] += 1
    return found, lost


def train_step(
    engine: Engine, answers: Sequence[Labelled], params: RewardParams, pad_id: int, seed: int, step: int
) -> tuple[float, float]:
    """Gradient of one step of all members; returns this rank's parts of the mean loss and of the right
    verdicts."""
    members = params.members
    plans, counts = [], []
    for number in range(members):
        rows = [answers[index] for index in step_rows(len(answers), params.batch, seed + number, step)]
        counts.append(sum(row.judged for row in rows))
        parts = plan([row.tree for row in rows], max(1, params.token_budget // members), shared=False)
        plans.append([[rows[index] for index in part] for part in parts])
    # A member with fewer micro batches computes its first one again with weight 0.
    zipped = list(itertools.zip_longest(*plans))
    mine = deal([[at] for at in range(len(zipped))], engine.rank, engine.world)
    total = correct = 0.0
    for number, ([at], real) in enumerate(mine, 1):
        used = [part or own[0] for part, own in zip(zipped[at], plans, strict=True)]
        factors = [float(real and part is not None) for part in zipped[at]]
        batches = [
            step_batch([row.tree for row in part], [row.ends for row in part], pad_id, shared=False)
            for part in used
        ]
        with autocast(params.precision):
            scores = engine.module([batch.to(device()) for batch in batches])
        loss = torch.zeros((), device=device())
        for part, factor, score, count in zip(used, factors, scores, counts, strict=True):
            label, mask = labels_of(part)
            label, mask = label.to(device()), mask.to(device())
            out = losses.process_reward(score[..., 0], label, mask, count=count * members)
            loss = loss + factor * out.loss
            right = ((score[..., 0] > 0) == (label > 0)) & mask
            correct += factor * float(right.sum()) / (count * members)
        engine.backward(loss, last=number == len(mine))
        total += float(loss.detach())
    return total, correct


def labels_of(answers: Sequence[Labelled]) -> tuple[Tensor, Tensor]:
    """Labels [N, S] as 0 or 1, and True where there is one."""
    width = max(len(answer.labels) for answer in answers)
    label, mask = torch.zeros(len(answers), width), torch.zeros(len(answers), width, dtype=torch.bool)
    for number, answer in enumerate(answers):
        for step, value in enumerate(answer.labels):
            if value is not None:
                label[number, step], mask[number, step] = float(value), True
    return label, mask


def main(run: RunDir) -> None:
    """Reads, trains, publishes, judges."""
    params = run.params(RewardParams)
    process = params.process or ProcessParams()
    rows = list(read_records(run.input("pairs"), StepLabels))
    test = list(read_records(run.input("test"), StepLabels))
    if not rows or not test:
        raise DataError(
            f"{len(rows)} answers with labelled steps to learn from and {len(test)} held out: both must be "
            "at least 1; add records of prompt, steps and labels to data.files, or set reward.process: null"
        )
    source = locate(params.model, run.input("model") if params.model == "policy" else None)
    positions.require_at(source, params, run.config["stage"])
    connect()
    members, kind = build_members(source, params, run.seed)
    if kind != "causal":
        raise ConfigurationError(
            f"reward.model: {params.model} is an encoder, it reads in both directions, so a step's score "
            "would know the steps after it; set reward.model: policy or name a causal LM"
        )
    tok = load_score_tokenizer(source, kind)
    answers, lost = encode(tok, rows, process, params.max_length)
    if not answers:
        raise DataError(
            f"no labelled step of {len(rows)} answers fits into reward.max_length = {params.max_length}; "
            "raise it"
        )
    total = params.epochs * steps_per_epoch(len(answers), params.batch)
    total = min(total, params.max_steps or total)
    engine = Engine(
        Ensemble(members).to(device()).train(), params.engine, lr=params.lr, total_steps=total,
        warmup=params.warmup, min_lr_share=params.min_lr_share, weight_decay=params.weight_decay,
        clip_norm=params.clip_norm, fast=[member.head for member in members],
        fast_factor=params.head_lr_factor,
    )  # fmt: skip
    settings = {
        "kind": kind, "heads": [], "members": params.members, "max_length": params.max_length,
        "process": process.model_dump(),
    }  # fmt: skip
    live = ScoreModel(members, tok, settings, params.precision)
    for member in members:
        member.train()
    checkpoints = Checkpoints(run, engine, params.keep)
    start, state = checkpoints.resume() or (0, {**watch.new_state(), "correct": []})
    counts = {"answers": len(answers), "judged_steps": sum(answer.judged for answer in answers), **lost}
    if start == 0:
        run.journal("start", held_out=len(test), steps=total, precision=resolve(params.precision), **counts)

    def work(step: int) -> tuple[float, float]:
        return train_step(engine, answers, params, int(tok.pad_token_id), run.seed, step)

    for step in range(start, total):
        take_step(run, engine, checkpoints, params, work, state, step, total)
    publish(run, engine, live, params, state, total, counts=counts,
            scores=lambda model: score_steps(model, [(row.prompt, row.steps) for row in test[:8]])[0],
            verdict=lambda model: judge(model, rows, test, params.gate))  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A held-out step that was read: what was said of it, and what is true."""

    score: float
    """Log odds of being right."""
    label: bool
    length: int
    """Characters."""
    group: str


def judge(
    model: ScoreModel, rows: Sequence[StepLabels], test: Sequence[StepLabels], gate: GateParams
) -> dict[str, Any]:
    """Held-out evidence about a process model, and whether it may be used."""
    scores, read = score_steps(model, [(row.prompt, row.steps) for row in test])
    means = scores.mean(0).double()
    steps = [
        Verdict(float(means[number, at]), label, len(row.steps[at]), row.group)
        for number, row in enumerate(test)
        for at, label in enumerate(row.labels)
        if label is not None and at < read.shape[1] and bool(read[number, at])
    ]
    if not steps:
        raise DataError(
            f"no labelled step of {len(test)} held-out answers fits into reward.max_length = "
            f"{model.max_length}; raise it"
        )
    wins = [0.5 if one.score == 0 else float((one.score > 0) == one.label) for one in steps]
    accuracy = clustered_share(wins, [one.group for one in steps], confidence=gate.confidence)
    common, majority = majority_baseline(rows, steps)
    rule, length = length_baseline(rows, steps)
    chances = [float(torch.sigmoid(torch.tensor(one.score))) for one in steps]
    recall = {
        name: sum(win for win, one in zip(wins, steps, strict=True) if one.label is label) / count
        for name, label in (("right", True), ("wrong", False))
        if (count := sum(one.label is label for one in steps))
    }
    prompts = len({one.group for one in steps})
    return {
        "accuracy": accuracy.estimate,
        "interval": [accuracy.lower, accuracy.upper],
        "n": len(steps),
        "prompts": prompts,
        "recall": recall,
        "calibration": {
            "ece": expected_calibration_error(chances, [float(one.label) for one in steps]),
            "confidence_mean": sum(max(chance, 1 - chance) for chance in chances) / len(chances),
        },
        "majority_label": common,
        "majority_baseline": majority,
        "length_rule": rule,
        "length_baseline": length,
        "gate": decide(accuracy.estimate, accuracy.lower, prompts, majority, length, gate),
    }


def majority_baseline(rows: Sequence[StepLabels], steps: Sequence[Verdict]) -> tuple[str, float]:
    """The commoner label of the training steps, and its accuracy on the held-out ones: chance, for steps."""
    labels = [label for row in rows for label in row.labels if label is not None]
    right = 2 * sum(labels) >= len(labels)
    return ("right" if right else "wrong"), sum(one.label is right for one in steps) / len(steps)


def length_baseline(rows: Sequence[StepLabels], steps: Sequence[Verdict]) -> tuple[str, float]:
    """The better of "long steps are right" and "short steps are right" on the training steps (long: the
    median or more), and its accuracy on the held-out ones."""
    taught = [
        (len(step), label)
        for row in rows
        for step, label in zip(row.steps, row.labels, strict=True)
        if label is not None
    ]
    bound = median(length for length, _ in taught)
    longer = 2 * sum((length >= bound) == label for length, label in taught) >= len(taught)
    said = [((one.length >= bound) == longer) == one.label for one in steps]
    return ("longer" if longer else "shorter"), sum(said) / len(said)


def decide(
    accuracy: float, lower: float, prompts: int, majority: float, length: float, gate: GateParams
) -> dict[str, Any]:
    """The gate: open only for a model that is better than the commoner label with confidence, and better
    than length alone."""
    reason, opened = "", False
    if prompts < gate.min_pairs:
        reason = f"{prompts} held-out prompts are fewer than gate.min_pairs = {gate.min_pairs}"
    elif lower <= max(majority, 0.5):
        reason = (
            f"not better than the commoner label: accuracy {accuracy:.3f} on the steps of {prompts} prompts, "
            f"lower end {lower:.3f} <= {max(majority, 0.5):.3f}"
        )
    elif gate.beat_length and accuracy <= length:
        reason = f"not better than length alone: {accuracy:.3f} against {length:.3f}"
    else:
        opened = True
        reason = (
            f"accuracy {accuracy:.3f} on the steps of {prompts} prompts, lower end {lower:.3f}; commoner "
            f"label {majority:.3f}, length alone {length:.3f}"
        )
    return {"open": opened, "reason": reason}


if __name__ == "__main__":
    program(main)
