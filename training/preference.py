"""Preference optimisation on given answers: `python -m training.launch -m training.preference WORKDIR`.

DPO, conservative and robust DPO, IPO, hinge, KTO (pairs, feedback without pairs, or both), ORPO and SimPO:
formulas and papers stand in training/losses.py. Each sum of a step is divided by the sum of the weights of
the whole step, whatever its micro batches and ranks.

In: `model` (folder), `pairs` and `test` (Preference rows), `feedback` (Feedback rows, read by kto alone).
Out: model/ with merged weights. The reference is `model` itself, asked once about all answers
(training/reference.py). The two answers of a pair share their prompt where the model can; its own
dropout is off.

Reported on the held-out pairs: accuracy and margin of the implicit rewards before and after, and `kl`: the
k3 estimate summed over the tokens of the chosen answers. Those are data, not samples of the policy, so it is
a measure of drift, never negative, and no unbiased KL; the evaluate stage measures that one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from data.errors import ConfigurationError, Stopped
from training import kl, losses, positions, watch
from training.batches import Tree, cannot_share, collate, deal, plan, step_rows, steps_per_epoch
from training.chat import load_tokenizer, template_hash
from training.checkpoint import Checkpoints
from training.config_optimize import ON_PAIRS, OptimizeParams
from training.device import autocast, device, resolve
from training.engine import Engine, connect
from training.heads import require_head
from training.logprobs import AnswerLogprobs
from training.losses import PREFERENCE_LOSSES, PreferenceLoss, needs
from training.models import digest, load_policy, merge_and_save, saved_dtype
from training.pairs import Item, mismatched, read
from training.reference import Forward, choose_layout, reference_logps, stack
from training.rundir import RunDir, program
from training.stats import wilson

START_TOLERANCE = {"ratio_off": 1e-5, "kl": 1e-6, "dpo_loss_off": 1e-3}
"""Before the first update: |pi / pi_ref - 1| of any token, k3 a token, |DPO's loss - ln 2|. Policy and
reference run in the same layout, so bf16 meets it too."""
KL_NOTE = "k3 a sequence on held-out chosen answers (data, not samples of the policy)"


@dataclass
class Trainer:
    """What a step works with."""

    run: RunDir
    params: OptimizeParams
    engine: Engine
    forward: Forward
    items: Sequence[Item]
    ref: Sequence[Tensor | None]
    """Of each item the reference's log-probabilities; None where the run never reads them."""
    partners: Sequence[Tree]
    """KTO: each item's prompt with an answer to another one, and what the reference says of it."""
    partner_ref: Sequence[Tensor | None]


# -- what is learned -----------------------------------------------------------------------------------------


def objective(
    params: OptimizeParams,
    logp: Float[Tensor, "N R"],
    ref_logp: Float[Tensor, "N R"] | None,
    mask: Tensor,
    items: Sequence[Item],
    point: float,
    count: float,
) -> tuple[Tensor, Float[Tensor, " N"]]:
    """Loss of some rows and the implicit reward of each answer; `point` is KTO's KL term."""
    function = PREFERENCE_LOSSES[params.algorithm]
    named = needs(function)
    own = params.preference
    settings = {
        "beta": params.beta, "smoothing": own.smoothing, "gamma": own.gamma, "lam": own.lam,
        "desirable": own.desirable, "undesirable": own.undesirable,
    }  # fmt: skip
    settings = {name: value for name, value in settings.items() if name in named}
    weight = torch.tensor([item.weight for item in items], device=mask.device)
    if params.algorithm == "kto":
        assert ref_logp is not None
        wanted = torch.tensor([flag for item in items for flag in item.wanted], device=mask.device)
        answers = torch.tensor([len(item.wanted) for item in items], device=mask.device)
        term = torch.tensor(point, device=mask.device)
        loss, _ = losses.kto(
            logp, ref_logp, mask, weight.repeat_interleave(answers), wanted, term, **settings, count=count
        )
        return loss, params.beta * kl.sequence_log_ratio(logp, ref_logp, mask).detach()
    ref = {"ref_logp": ref_logp} if "ref_logp" in named else {}
    out: PreferenceLoss = function(logp=logp, mask=mask, weight=weight, **ref, **settings, count=count)
    return out.loss, torch.stack([out.chosen_reward, out.rejected_reward], 1).flatten()


def tally(reward: Float[Tensor, " N"], items: Sequence[Item]) -> list[float]:
    """Sums to be divided once they are complete: reward and number of wanted answers, of unwanted ones, right
    pairs and pairs; a tie is half right."""
    sums = [0.0] * 6
    values = iter(reward.tolist())
    for item in items:
        rewards = [next(values) for _ in item.wanted]
        for value, wanted in zip(rewards, item.wanted, strict=True):
            sums[0 if wanted else 2] += value
            sums[1 if wanted else 3] += 1
        if len(rewards) == 2:
            gap = rewards[0] - rewards[1]
            sums[4] += 0.5 * (1 + (gap > 0) - (gap < 0))
            sums[5] += 1
    return sums


def means(sums: Sequence[float]) -> dict[str, float]:
    """Metrics of a tally; what was not there is absent."""
    found = {}
    for name, total, number in zip(
        ("chosen_reward", "rejected_reward", "accuracy"), sums[0::2], sums[1::2], strict=True
    ):
        if number:
            found[name] = total / number
    if "chosen_reward" in found and "rejected_reward" in found:
        found["margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found


def weight_of(params: OptimizeParams, items: Sequence[Item]) -> float:
    """What a step's loss is divided by: weights of its pairs; for KTO of its answers."""
    return sum(item.weight * (len(item.wanted) if params.algorithm == "kto" else 1) for item in items)


def mask_of(trees: Sequence[Tree]) -> Bool[Tensor, "N R"]:
    """Mask of all answers of some trees, without a model's batch."""
    lengths = torch.tensor([len(answer) for tree in trees for answer in tree.answers])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def held_out(
    params: OptimizeParams, items: Sequence[Item], logps: Sequence[Tensor], ref: Sequence[Tensor]
) -> dict[str, float]:
    """Accuracy, margin and drift on the held-out pairs, from log-probabilities of policy and reference."""
    mask = mask_of([item.tree for item in items])
    logp, ref_logp = stack(logps, mask), stack(ref, mask)
    _, reward = objective(params, logp, ref_logp, mask, items, 0.0, weight_of(params, items))
    drift = kl.k3(kl.log_ratio(logp, ref_logp, mask)).sum(1)[0::2]
    return {**means(tally(reward, items)), "kl": float(drift.double().mean())}


def reference_point(trainer: Trainer, rows: Sequence[int]) -> float:
    """KTO's KL term: mean over a step's rows of the log ratio of an answer put to another prompt."""
    logps = trainer.forward.logps([trainer.partners[row] for row in rows])
    total = 0.0
    for row, logp in zip(rows, logps, strict=True):
        ref = trainer.partner_ref[row]
        assert ref is not None
        total += float((logp - ref).sum())
    return total / len(rows)


def train_step(trainer: Trainer, rows: Sequence[int]) -> tuple[list[float], float]:
    """Gradient of one step; this rank's parts of loss and tally, and KTO's reference point."""
    params, forward, engine = trainer.params, trainer.forward, trainer.engine
    items = [trainer.items[row] for row in rows]
    count = weight_of(params, items)
    point = reference_point(trainer, rows) if params.algorithm == "kto" else 0.0
    batches = plan([item.tree for item in items], params.token_budget, forward.shared)
    micro = deal(batches, engine.rank, engine.world)
    sums = [0.0] * 7
    for number, (indices, counts) in enumerate(micro, 1):
        part = [items[index] for index in indices]
        batch = collate([item.tree for item in part], forward.pad_id, forward.shared).to(device())
        kept = [logp for index in indices if (logp := trainer.ref[rows[index]]) is not None]
        with autocast(params.precision):
            logp, _ = engine.module(batch, params.temperature)
        loss, reward = objective(
            params, logp, stack(kept, batch.mask) if kept else None, batch.mask, part, point, count
        )
        loss = loss * float(counts)
        engine.backward(loss, last=number == len(micro))
        if counts:
            own = [float(loss.detach()), *tally(reward, part)]
            sums = [total + value for total, value in zip(sums, own, strict=True)]
    return sums, point


# -- before the first update ---------------------------------------------------------------------------------


def check_start(
    params: OptimizeParams, forward: Forward, trees: Sequence[Tree], ref: Sequence[Tensor]
) -> dict[str, float]:
    """The policy is the reference: ratio 1, KL 0, DPO's loss ln 2; anything else stops the run."""
    indices = plan(trees, forward.token_budget, forward.shared)[0]
    forward.engine.module.eval()
    logp = forward.micro([trees[index] for index in indices], forward.shared)
    forward.engine.module.train()
    ratios = logp - torch.cat([ref[index] for index in indices])
    seen = {"ratio_off": float(ratios.exp().sub(1).abs().max()), "kl": float(kl.k3(ratios[None]).mean())}
    parts = dict(zip(indices, torch.split(logp, [len(ref[index]) for index in indices]), strict=True))
    pairs = [index for index in indices if len(trees[index].answers) == 2]
    if pairs:
        mask = mask_of([trees[index] for index in pairs])
        out = losses.dpo(
            stack([parts[index] for index in pairs], mask), stack([ref[index] for index in pairs], mask),
            mask, torch.ones(len(pairs)), beta=params.beta or 0.1, count=len(pairs),
        )  # fmt: skip
        seen["dpo_loss_off"] = abs(float(out.loss) - math.log(2))
    if not all(value <= START_TOLERANCE[name] for name, value in seen.items()):
        raise ConfigurationError(
            f"before the first update the policy is not the reference: {seen} exceeds {START_TOLERANCE}; "
            "inputs.model must be what the reference was, and the forward pass must repeat itself "
            "(dropout off, same device)"
        )
    return seen


# -- the program ---------------------------------------------------------------------------------------------


def main(run: RunDir) -> None:
    """Reads, asks the reference, trains, judges on held-out pairs, publishes."""
    params = run.params(OptimizeParams)
    if params.algorithm not in ON_PAIRS:
        raise ConfigurationError(
            f"optimize.algorithm is {params.algorithm!r}: this program knows {sorted(ON_PAIRS)}; the others "
            "are training.rl's"
        )
    source = run.input("model")
    tok = load_tokenizer(source)
    items, test, dropped = read(run, tok, params)
    positions.require_at(source, params, run.config["stage"])
    connect()
    model = load_policy(
        source, params.precision, params.lora, params.engine.gradient_checkpointing, dropout=False
    )
    require_head(model, source)
    total = min(params.steps, params.preference.epochs * steps_per_epoch(len(items), params.prompts))
    engine = Engine(
        AnswerLogprobs(model), params.engine, lr=params.lr, total_steps=total, warmup=params.warmup,
        min_lr_share=params.min_lr_share, weight_decay=params.weight_decay, clip_norm=params.clip_norm,
    )  # fmt: skip
    forward = Forward(
        engine, int(tok.pad_token_id), True, params.token_budget, params.temperature, params.precision
    )
    began = time.monotonic()
    identity = digest(source)
    trainer, test_ref, start = _prepare(run, params, forward, model, items, test, total, identity)
    run.timing(0, {"reference_seconds": time.monotonic() - began})
    checkpoints = Checkpoints(run, engine, params.keep)
    first, state = checkpoints.resume() or (0, watch.new_state())
    before = held_out(params, test, test_ref, test_ref)
    if first == 0:
        run.journal(
            "start", algorithm=params.algorithm, rows=len(items), held_out=len(test), dropped=dropped,
            steps=total, precision=resolve(params.precision), reference=identity,
            template_hash=template_hash(tok), **start,
        )  # fmt: skip
    for step in range(first, total):
        _step(trainer, checkpoints, state, step, total)
    ends = watch.ends(state["losses"])
    after = held_out(params, test, trainer.forward.logps([item.tree for item in test]), test_ref)
    folder = run.path / "model"
    weights = engine.full_state(model)
    if engine.first:
        merge_and_save(model, tok, folder, saved_dtype(run.config), weights)
        kept = wilson(after["accuracy"] * len(test), len(test))
        run.finish(
            {
                "status": "trained",
                "digest": digest(folder),
                "template_hash": template_hash(tok),
                "algorithm": params.algorithm,
                "steps": total,
                "rows": len(items),
                "dropped": dropped,
                "held_out": len(test),
                "reference": identity,
                **ends,
                "reward_before": before["margin"],
                "reward_after": after["margin"],
                "accuracy_before": before["accuracy"],
                "accuracy_after": after["accuracy"],
                "interval_after": [kept.lower, kept.upper],
                "kl": after["kl"],
                "kl_estimator": KL_NOTE,
                "kl_target": params.kl.target,
                "guards": state["seen"],
            }
        )
    engine.barrier()


def _prepare(
    run: RunDir, params: OptimizeParams, forward: Forward, model: Any, items: Sequence[Item],
    test: Sequence[Item], total: int, identity: str,
) -> tuple[Trainer, list[Tensor], dict[str, Any]]:  # fmt: skip
    """Asks the reference about what the run will read, before anything moves, and checks the start."""
    with_ref = "ref_logp" in needs(PREFERENCE_LOSSES[params.algorithm])
    used = sorted(
        {row for step in range(total) for row in step_rows(len(items), params.prompts, run.seed, step)}
        if with_ref
        else ()
    )
    partners = mismatched(items) if params.algorithm == "kto" else []
    trees = [items[row].tree for row in used] + [partners[row] for row in used if partners]
    trees += [item.tree for item in test]
    shared, reason = choose_layout(forward, trees, cannot_share(model))
    forward = replace(forward, shared=shared)
    logps, found = reference_logps(
        forward, model, trees, identity, run.path.parent / "reference", lambda: run.stop_requested
    )
    run.timing(0, {"reference": "kept" if found else "computed"})
    start = check_start(params, forward, trees, logps)
    ref: list[Tensor | None] = [None] * len(items)
    partner_ref: list[Tensor | None] = [None] * len(partners)
    for row, logp in zip(used, logps, strict=False):
        ref[row] = logp
    for row, logp in zip(used if partners else (), logps[len(used) :], strict=False):
        partner_ref[row] = logp
    trainer = Trainer(run, params, forward.engine, forward, items, ref, partners, partner_ref)
    return trainer, logps[-len(test) :], {"prompts_shared": shared, "repeated_because": reason, **start}


def _step(trainer: Trainer, checkpoints: Checkpoints, state: dict[str, Any], step: int, total: int) -> None:
    run, params, engine = trainer.run, trainer.params, trainer.engine
    began = time.monotonic()
    rows = step_rows(len(trainer.items), params.prompts, run.seed, step)
    sums, point = train_step(trainer, rows)
    info = engine.step()
    loss, *counts, stop = engine.sum([*sums, float(run.stop_requested)])
    seen = means(counts)
    extra = {"kl_point": point} if params.algorithm == "kto" else {}
    run.metrics(step + 1, {"loss": loss, **seen, **extra, "lr": info.lr, "grad_norm": info.grad_norm})
    run.progress(step + 1, total)
    seconds = time.monotonic() - began
    tokens = sum(
        len(trainer.items[row].tree.prompt) + sum(map(len, trainer.items[row].tree.answers)) for row in rows
    )
    run.timing(step + 1, {"seconds": seconds, "tokens_per_second": tokens / seconds})
    watch.after_step(run, engine, params.preference.guards, state, step + 1, loss, info)
    if stop or (step + 1) % params.checkpoint_every == 0 or step + 1 == total:
        checkpoints.save(step + 1, state, healthy=info.finite)
    if stop and step + 1 < total:
        raise Stopped(f"stopped after step {step + 1} of {total}; run again to go on from there")


if __name__ == "__main__":
    program(main)
