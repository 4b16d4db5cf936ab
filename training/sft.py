"""Supervised fine-tuning: `python -m training.launch -m training.sft WORKDIR`.

    L = -sum(logp of answer tokens, EOS included) / number of those tokens in the step

In: `model` (folder), `demonstrations` (Demonstration rows; when there are none, the chosen answers of
`pairs`). Out: model/ with merged weights. The order of the rows is a pure function of seed and epoch; a
step's rows are filled into micro batches by tokens, longest first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.errors import DataError, Stopped
from data.records import Demonstration, Preference, read_records
from training import losses, positions, watch
from training.batches import Tree, cannot_share, collate, deal, plan, step_rows, steps_per_epoch
from training.chat import encode_answer, encode_prompt, load_tokenizer, preflight, stop_ids, template_hash
from training.checkpoint import Checkpoints
from training.config import SftParams
from training.device import autocast, device, resolve
from training.engine import Engine, connect
from training.generate import BuiltinGenerator
from training.heads import require_head
from training.logprobs import AnswerLogprobs
from training.models import digest, load_policy, merge_and_save, saved_dtype
from training.reference import Forward, choose_layout
from training.rundir import RunDir, program


def demonstrations(run: RunDir) -> list[Demonstration]:
    """The rows to imitate: demonstrations, or each pair's chosen answer once."""
    rows = list(read_records(run.input("demonstrations"), Demonstration))
    if rows or "pairs" not in run.config["inputs"]:
        return rows
    chosen = {
        (pair.prompt, pair.chosen): Demonstration(
            prompt=pair.prompt, id=pair.id, group=pair.group, source=pair.source, answer=pair.chosen
        )
        for pair in read_records(run.input("pairs"), Preference)
        if not pair.disputed
    }
    return list(chosen.values())


def encode(
    tok: PreTrainedTokenizerBase, rows: Sequence[Demonstration], params: SftParams
) -> tuple[list[Tree], Counter[str]]:
    """Rows as ids; those over a limit are left out and counted, never cut: a cut answer teaches not to
    end."""
    trees, dropped = [], Counter[str]()
    for row in rows:
        tree = Tree(row.id, encode_prompt(tok, row.prompt), [encode_answer(tok, row.answer)])
        if len(tree.prompt) > params.max_prompt:
            dropped["prompt over max_prompt"] += 1
        elif len(tree.prompt) + len(tree.answers[0]) > params.max_length:
            dropped["prompt and answer over max_length"] += 1
        elif len(tree.answers[0]) < 2:
            dropped["empty answer"] += 1
        else:
            trees.append(tree)
    return trees, dropped


def train_step(forward: Forward, trees: Sequence[Tree], params: SftParams) -> tuple[float, int]:
    """Gradient of one step's rows; returns this rank's part of the loss and the rows' answer tokens."""
    engine, shared = forward.engine, forward.shared
    count = sum(len(tree.answers[0]) for tree in trees)
    micro = deal(plan(trees, params.token_budget, shared), engine.rank, engine.world)
    total = 0.0
    for number, (indices, counts) in enumerate(micro, 1):
        batch = collate([trees[index] for index in indices], forward.pad_id, shared).to(device())
        with autocast(params.precision):
            logp, _ = engine.module(batch)
        loss = losses.cross_entropy(logp, batch.mask, count=count).loss * float(counts)
        engine.backward(loss, last=number == len(micro))
        total += float(loss.detach())
    return total, count


def main(run: RunDir) -> None:
    """Reads, trains, publishes."""
    params = run.params(SftParams)
    source = run.input("model")
    tok = load_tokenizer(source)
    rows = demonstrations(run)
    trees, dropped = encode(tok, rows, params)
    if not trees:
        raise DataError(
            f"{run.input('demonstrations')}: none of {len(rows)} demonstrations can be used "
            f"({dict(dropped)}); "
            "raise sft.max_length and sft.max_prompt, or give other data"
        )
    preflight(tok, rows[0].prompt, rows[0].answer)
    positions.require_at(source, params, run.config["stage"])
    connect()
    model = load_policy(source, params.precision, params.lora, params.engine.gradient_checkpointing)
    require_head(model, source)
    total = params.epochs * steps_per_epoch(len(trees), params.batch)
    total = min(total, params.max_steps or total)
    engine = Engine(
        AnswerLogprobs(model), params.engine, lr=params.lr, total_steps=total, warmup=params.warmup,
        min_lr_share=params.min_lr_share, weight_decay=params.weight_decay, clip_norm=params.clip_norm,
    )  # fmt: skip
    forward = Forward(engine, int(tok.pad_token_id), True, params.token_budget, 1.0, params.precision)
    shared, reason = choose_layout(forward, trees, cannot_share(model))
    if not shared:
        run.timing(0, {"padded rows": reason})
    forward = replace(forward, shared=shared)
    checkpoints = Checkpoints(run, engine, params.keep)
    start, state = checkpoints.resume() or (0, {**watch.new_state(), "tokens": 0})
    if start == 0:
        run.journal(
            "start", rows=len(trees), dropped=dict(dropped), steps=total, precision=resolve(params.precision)
        )
    for step in range(start, total):
        _step(run, forward, checkpoints, params, trees, state, step, total)
    _publish(run, engine, model, tok, state, trees, dropped, total)


def _step(
    run: RunDir, forward: Forward, checkpoints: Checkpoints, params: SftParams, trees: Sequence[Tree],
    state: dict[str, Any], step: int, total: int,
) -> None:  # fmt: skip
    engine = forward.engine
    began = time.monotonic()
    rows = [trees[index] for index in step_rows(len(trees), params.batch, run.seed, step)]
    loss, tokens = train_step(forward, rows, params)
    info = engine.step()
    loss, stop = engine.sum([loss, float(run.stop_requested)])
    state["tokens"] += tokens
    run.metrics(step + 1, {"loss": loss, "lr": info.lr, "grad_norm": info.grad_norm, "answer_tokens": tokens})
    run.progress(step + 1, total)
    seconds = time.monotonic() - began
    everything = sum(len(tree.prompt) + len(tree.answers[0]) for tree in rows)
    run.timing(step + 1, {"seconds": seconds, "tokens_per_second": everything / seconds})
    watch.after_step(run, engine, params.guards, state, step + 1, loss, info)
    if stop or (step + 1) % params.checkpoint_every == 0 or step + 1 == total:
        checkpoints.save(step + 1, state, healthy=info.finite)
    if stop and step + 1 < total:
        raise Stopped(f"stopped after step {step + 1} of {total}; run again to go on from there")


def _publish(
    run: RunDir, engine: Engine, model: Any, tok: PreTrainedTokenizerBase, state: dict[str, Any],
    trees: Sequence[Tree], dropped: Counter[str], total: int,
) -> None:  # fmt: skip
    ends = watch.ends(state["losses"])
    folder = run.path / "model"
    weights = engine.full_state(model)
    if engine.first:
        merge_and_save(model, tok, folder, saved_dtype(run.config), weights)
        result = {
            "status": "trained",
            "digest": digest(folder),
            "template_hash": template_hash(tok),
            "steps": total,
            "rows": len(trees),
            "dropped": dict(sorted(dropped.items())),
            "answer_tokens": state["tokens"],
            **ends,
            "guards": state["seen"],
            "stop_share": stop_share(model, tok, trees, run.params(SftParams), run.seed),
        }
        run.finish(result)
    engine.barrier()


def stop_share(
    model: Any, tok: PreTrainedTokenizerBase, trees: Sequence[Tree], params: SftParams, seed: int
) -> float | None:
    """Share of sampled answers that end by themselves within twice the longest answer that was learned.

    A model that never learned to stop shows here, not in its loss. None: not looked at, or sharded weights.
    Where the model has fewer positions than that, answers get as many as are left.
    """
    if params.stop_check == 0 or params.engine.zero == 3 or params.engine.tensor_parallel > 1:
        return None
    cap = 2 * max(len(tree.answers[0]) for tree in trees)
    prompts = [tree.prompt for tree in trees[: params.stop_check]]
    limit = positions.positions(model.config.to_dict())
    if limit is not None:
        cap = min(cap, limit - max(map(len, prompts)))
    generator = BuiltinGenerator(
        model, stop_ids(tok), int(tok.pad_token_id), autocast=lambda: autocast(params.precision)
    )
    rollout = generator.generate(prompts, 1, max_new_tokens=cap, temperature=1.0, seed=seed, step=0)
    ended = [finished for group in rollout.finished for finished in group]
    return sum(ended) / len(ended)


if __name__ == "__main__":
    program(main)
