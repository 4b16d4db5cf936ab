"""Two models on the same prompts: `python -m training.launch -m training.compare WORKDIR`.

In: `candidate`, `champion`, `reference` (folders of causal LMs), `judge` (a score model), `prompts` (Prompt
rows). Out: samples.jsonl, one row a prompt, and result.json. Both models answer with the same keyed random
numbers, the judge reads decoded text and does not know whose it is, and a prompt that could not be judged is
a row with a `failure`, never a zero.

    kl = sum_t KL( pi(. | s_t) || pi_ref(. | s_t) )     over the states s_t of the candidate's own answer

the full distribution's KL in every state visited, so it is never negative; with temperature 1 its mean is the
unbiased, Rao-Blackwellised estimate of the sequence KL [2504.10637], at other temperatures it is the KL along
the answers that are compared. It is taken on the first `kl_prompts` prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.errors import ConfigurationError, DataError, Stopped
from data.records import Prompt, read_records
from training.batches import Tree, collate, plan
from training.chat import decode_answer, encode_prompt, load_tokenizer, stop_ids, template_hash
from training.config import EvaluateParams
from training.engine import connect
from training.generate import BuiltinGenerator
from training.logprobs import backbone_and_head, hidden_states
from training.models import autocast, device, load_causal, resolve
from training.rewards import judge_directed, repetition
from training.rundir import RunDir, program
from training.score import ScoreModel

SIDES = ("candidate", "champion")
CHUNK = 256
REFUSAL = re.compile(
    r"\b(i|we)('m| am|'re| are)? ?(can ?not|can't|can’t|won't|won’t|will not|unable to|not able to|"
    r"must decline|have to decline|refuse to)\b"
    r"|\b(i'm|i am|i’m) sorry,? (but )?(i|we|that)\b|\bas an ai\b",
    re.IGNORECASE,
)
"""How refusals open; read in the first sentences only, where an answer says whether it is one."""


def broken_rules(answer: str, finished: bool) -> dict[str, bool]:
    """Rule -> whether the answer breaks it."""
    return {
        "unfinished": not finished,
        "empty": not answer.strip(),
        "repetition": repetition(answer) > 0,
        "judge_directed": judge_directed(answer) > 0,
        "refusal": REFUSAL.search(answer[:200]) is not None,
    }


def read_prompts(run: RunDir, limit: int) -> list[Prompt]:
    """The first `limit` prompts of the file."""
    path = run.input("prompts")
    rows = list(read_records(path, Prompt))[:limit]
    if not rows:
        raise DataError(f"{path}: no prompt to compare on; name a file in data.eval_prompts")
    return rows


def answers(
    run: RunDir, side: str, prompts: Sequence[Prompt], params: EvaluateParams, tok: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """One model's answers: ids, text, whether they ended by themselves. Kept as a file, so that a killed run
    answers only once."""
    kept = run.path / f"answers-{side}.{run.rank}.json"
    if kept.is_file():
        rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
        return rows
    precision = resolve(params.precision)
    model = load_causal(run.input(side), torch.bfloat16 if precision == "bf16" else torch.float32)
    model.to(device())
    generator = BuiltinGenerator(
        model, stop_ids(tok), int(tok.pad_token_id), autocast=lambda: autocast(precision)
    )
    rollout = generator.generate(
        [encode_prompt(tok, prompt.prompt) for prompt in prompts],
        1,
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        keys=[prompt.id for prompt in prompts],
        seed=run.seed,
    )
    rows = [
        {"ids": ids[0], "text": decode_answer(tok, ids[0]).strip(), "finished": finished[0]}
        for ids, finished in zip(rollout.answers, rollout.finished, strict=True)
    ]
    unfinished = kept.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rows), encoding="utf-8")
    unfinished.replace(kept)
    return rows


def token_kl(policy: Any, reference: Any, trees: Sequence[Tree], pad_id: int, budget: int) -> list[float]:
    """Sum over each answer's tokens of the KL between two models' next-token distributions, in nats."""
    found = [0.0] * len(trees)
    for indices in plan(trees, budget, shared=False):
        batch = collate([trees[index] for index in indices], pad_id, shared=False).to(device())
        read = batch.source[batch.mask]
        states, heads = [], []
        for model in (policy, reference):
            backbone, head = backbone_and_head(model)
            states.append(hidden_states(backbone, batch)[read])
            heads.append(head)
        parts: list[Tensor] = []
        for at in range(0, len(read), CHUNK):
            ours, theirs = (
                head(state[at : at + CHUNK]).float().log_softmax(-1)
                for state, head in zip(states, heads, strict=True)
            )
            parts.append((ours.exp() * (ours - theirs)).sum(-1).clamp(min=0))
        kl = torch.zeros(batch.mask.shape, device=read.device).masked_scatter(batch.mask, torch.cat(parts))
        for row, index in enumerate(indices):
            found[index] = float(kl[row].sum())
    return found


def divergences(
    run: RunDir,
    prompts: Sequence[Prompt],
    rows: Sequence[dict[str, Any]],
    params: EvaluateParams,
    tok: PreTrainedTokenizerBase,
) -> list[float]:
    """KL of the candidate to the reference along its own answers."""
    dtype = torch.bfloat16 if resolve(params.precision) == "bf16" else torch.float32
    models: list[Any] = [
        load_causal(run.input(side), dtype).to(device()).eval() for side in ("candidate", "reference")
    ]
    trees = [
        Tree(prompt.id, encode_prompt(tok, prompt.prompt), [row["ids"]])
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    with torch.no_grad(), autocast(params.precision):
        return token_kl(*models, trees, int(tok.pad_token_id), params.token_budget)


def judge(
    run: RunDir,
    prompts: Sequence[Prompt],
    texts: dict[str, list[str]],
    params: EvaluateParams,
) -> dict[str, list[float | None]]:
    """Scores a side; None where the judge gave no number."""
    model = ScoreModel.load(run.input("judge"), resolve(params.precision))
    rows = [
        (prompt.prompt, text) for side in SIDES for prompt, text in zip(prompts, texts[side], strict=True)
    ]
    scores = model.score(rows, params.token_budget)
    flat = scores.mean(-1) if scores.ndim > 1 else scores
    values = [float(score) if bool(score.isfinite()) else None for score in flat]
    return {"candidate": values[: len(prompts)], "champion": values[len(prompts) :]}


def main(run: RunDir) -> None:
    """Answers of both sides, scores, KL; each rank its share of the prompts."""
    params = run.params(EvaluateParams)
    _, world = connect()
    prompts = read_prompts(run, params.prompts)
    tok = load_tokenizer(run.input("candidate"))
    champion_tok = load_tokenizer(run.input("champion"))
    if template_hash(tok) != template_hash(champion_tok):
        raise ConfigurationError(
            f"{run.input('champion')}: its chat template is not the candidate's; a comparison would compare "
            "templates. Start a registry of its own with registry.name"
        )
    mine = prompts[run.rank :: world]
    run.progress(0, 4, "part")
    found: dict[str, list[dict[str, Any]]] = {}
    for number, side in enumerate(SIDES, 1):
        found[side] = answers(run, side, mine, params, tok if side == "candidate" else champion_tok)
        run.progress(number, 4, "part")
        if run.stop_requested:
            raise Stopped(f"stopped after the {side}'s answers; run again to go on from there")
    texts = {side: [row["text"] for row in found[side]] for side in SIDES}
    scores = judge(run, mine, texts, params)
    run.progress(3, 4, "part")
    measured = [index for index in range(len(mine)) if index * world + run.rank < params.kl_prompts]
    kls = divergences(
        run, [mine[i] for i in measured], [found["candidate"][i] for i in measured], params, tok
    ) if measured else []  # fmt: skip
    rows = [
        _row(
            prompt,
            {side: found[side][index] for side in SIDES},
            {side: scores[side][index] for side in SIDES},
        )
        for index, prompt in enumerate(mine)
    ]
    for index, kl in zip(measured, kls, strict=True):
        rows[index]["kl"] = kl
    _write(run.path / f"samples.{run.rank}.jsonl", rows)
    if world > 1:
        torch.distributed.barrier()
    if run.rank == 0:
        parts = [_read(run.path / f"samples.{rank}.jsonl") for rank in range(world)]
        merged = [parts[index % world][index // world] for index in range(len(prompts))]
        _write(run.path / "samples.jsonl", merged)
        run.progress(4, 4, "part")
        failed = sum(row["failure"] is not None for row in merged)
        run.finish({"status": "compared", "n": len(merged), "failures": failed})


def _row(
    prompt: Prompt, answered: dict[str, dict[str, Any]], scores: dict[str, float | None]
) -> dict[str, Any]:
    sides = {
        side: {
            "text": answered[side]["text"],
            "tokens": len(answered[side]["ids"]),
            "score": scores[side],
            "rules": broken_rules(answered[side]["text"], answered[side]["finished"]),
        }
        for side in SIDES
    }
    unjudged = [side for side in SIDES if scores[side] is None]
    return {
        "id": prompt.id,
        "slice": prompt.slice or "all",
        "prompt": [message.model_dump() for message in prompt.prompt],
        **sides,
        "kl": None,
        "failure": f"the judge gave no finite score to {' and '.join(unjudged)}" if unjudged else None,
    }


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


if __name__ == "__main__":
    program(main)
