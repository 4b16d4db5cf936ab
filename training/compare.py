"""Two models on the same prompts: `python -m training.launch -m training.compare WORKDIR`.

In: `candidate`, `champion`, `judge`, `prompts`, and `reference` (the SFT model; the champion when it is not
given). Both models draw with the same random numbers, so what they have in common cancels, and the judge
reads text without knowing whose it is. Out: samples.jsonl, a row a prompt with both texts, the judge's
scores, broken rules, and for the first `kl_prompts` prompts

    kl = log pi_candidate(answer) - log pi_reference(answer)          (nats an answer, answer ~ candidate)

whose mean estimates the KL without bias at temperature 1 (a single one may be negative). The first term comes
with the answer. Verdicts are drawn from the rows elsewhere. A prompt that could not be judged is a row with a
`failure`, never left out and never a zero. What a killed run has generated is kept.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.errors import ConfigurationError, DataError, Stopped
from data.records import Prompt, read_records
from training import positions, rules
from training.batches import Tree, cannot_share, collate, plan
from training.chat import decode_answer, encode_prompt, load_tokenizer, preflight, stop_ids, template_hash
from training.config import EvaluateParams
from training.device import autocast, device, resolve
from training.engine import connect
from training.generate import BuiltinGenerator
from training.heads import require_head
from training.logprobs import answer_logprobs
from training.models import digest, load_causal
from training.rundir import RunDir, program, write_json
from training.score import ScoreModel

SIDES = ("candidate", "champion")
CHUNK = 64
"""Prompts generated between two looks at a stop signal."""


def load(folder: Path, params: EvaluateParams) -> Any:
    """A model that only reads."""
    dtype = torch.bfloat16 if resolve(params.precision) == "bf16" else torch.float32
    model: Any = load_causal(folder, dtype).to(device()).requires_grad_(False).eval()
    require_head(model, folder)
    return model


def answers(
    run: RunDir, side: str, prompts: Sequence[Prompt], params: EvaluateParams, tok: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """One model's answer to each prompt: ids, their log-probability, text, whether it ended by itself."""
    kept = run.path / f"answers-{side}.{run.rank}.json"
    if kept.is_file():
        rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
        return rows
    model = load(run.input(side), params)
    generator = BuiltinGenerator(
        model, stop_ids(tok), int(tok.pad_token_id), autocast=lambda: autocast(params.precision)
    )
    encoded = [encode_prompt(tok, prompt.prompt) for prompt in prompts]
    found: dict[int, dict[str, Any]] = {}
    # Prompts of like length together: less padding.
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), CHUNK):
        part = order[start : start + CHUNK]
        rollout = generator.generate(
            [encoded[index] for index in part], 1, max_new_tokens=params.max_new_tokens,
            temperature=params.temperature, keys=[prompts[index].id for index in part], seed=run.seed,
        )  # fmt: skip
        for place, index in enumerate(part):
            ids = rollout.answers[place][0]
            found[index] = {
                "ids": ids,
                "logp": sum(rollout.logp[place][0]),
                "text": decode_answer(tok, ids).strip(),
                "finished": rollout.finished[place][0],
            }
        if run.stop_requested and start + CHUNK < len(order):
            raise Stopped(f"stopped within the {side}'s answers; run again to start them anew")
    rows = [found[index] for index in range(len(prompts))]
    write_json(kept, rows)
    return rows


def divergences(
    run: RunDir, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], params: EvaluateParams,
    tok: PreTrainedTokenizerBase,
) -> list[float]:  # fmt: skip
    """KL of the candidate to the reference by its own answers."""
    if not prompts:
        return []
    model = load(run.input("reference" if "reference" in run.config["inputs"] else "champion"), params)
    trees = [
        Tree(prompt.id, encode_prompt(tok, prompt.prompt), [row["ids"]])
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    found = [0.0] * len(trees)
    shared = cannot_share(model) is None
    with torch.no_grad(), autocast(params.precision):
        for part in plan(trees, params.token_budget, shared):
            batch = collate([trees[index] for index in part], int(tok.pad_token_id), shared).to(device())
            logp, _ = answer_logprobs(model, batch, params.temperature or 1.0)
            for index, value in zip(part, logp.double().sum(1).tolist(), strict=True):
                found[index] = rows[index]["logp"] - value
    return found


def judge(
    run: RunDir, prompts: Sequence[Prompt], texts: Sequence[str], params: EvaluateParams
) -> list[float | None]:
    """A score a text, the mean of members and heads; None where it is no finite number."""
    model = ScoreModel.load(run.input("judge"), resolve(params.precision))
    pairs = [(prompt.prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    scores = model.score_members(pairs, params.token_budget).mean((0, 2))
    return [float(score) if bool(score.isfinite()) else None for score in scores]


def tokenizers(run: RunDir, prompt: Prompt) -> dict[str, PreTrainedTokenizerBase]:
    """Each side's own; their templates must be the same."""
    toks = {side: load_tokenizer(run.input(side)) for side in SIDES}
    if template_hash(toks["candidate"]) != template_hash(toks["champion"]):
        raise ConfigurationError(
            f"{run.input('champion')}: its chat template is not the candidate's; a comparison would compare "
            "templates. Start a registry of its own with registry.name"
        )
    for tok in toks.values():
        preflight(tok, prompt.prompt, "An answer.")
    return toks


def compare(
    run: RunDir, params: EvaluateParams, prompts: Sequence[Prompt], world: int
) -> list[dict[str, Any]]:
    """Rows of one rank's prompts."""
    for name in (*SIDES, *(["reference"] if "reference" in run.config["inputs"] else [])):
        positions.require_at(run.input(name), params, run.config["stage"])
    toks = tokenizers(run, prompts[0])
    lengths = [len(encode_prompt(toks["candidate"], prompt.prompt)) for prompt in prompts]
    fits = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= params.max_prompt]
    began = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {}
    for number, side in enumerate(SIDES, 1):
        found[side] = answers(run, side, fits, params, toks[side]) if fits else []
        run.progress(number, 4, "part")
        run.timing(number, {"seconds": time.monotonic() - began, "part": side})
        gc.collect()
        if run.stop_requested:
            raise Stopped(f"stopped after the {side}'s answers; run again to go on from there")
    scores = judge(run, [*fits, *fits], [row["text"] for side in SIDES for row in found[side]], params)
    run.progress(3, 4, "part")
    wanted = fits[: -(-params.kl_prompts // world)]
    kls = divergences(run, wanted, found["candidate"][: len(wanted)], params, toks["candidate"])
    run.timing(4, {"seconds": time.monotonic() - began, "part": "judge and KL"})
    rows = {
        prompt.id: row_of(
            prompt,
            [found[side][place] for side in SIDES],
            [scores[place], scores[place + len(fits)]],
            kls[place] if place < len(kls) else None,
        )
        for place, prompt in enumerate(fits)
    }
    return [
        rows.get(prompt.id)
        or unanswered(prompt, f"the prompt has {length} tokens, evaluate.max_prompt is {params.max_prompt}")
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def row_of(
    prompt: Prompt, found: Sequence[dict[str, Any]], scores: Sequence[float | None], kl: float | None
) -> dict[str, Any]:
    """One compared prompt."""
    sides = {
        side: {
            "text": answer["text"],
            "tokens": len(answer["ids"]),
            "words": len(answer["text"].split()),
            "score": score,
            "rules": rules.broken(prompt.prompt, answer["text"], answer["finished"]),
        }
        for side, answer, score in zip(SIDES, found, scores, strict=True)
    }
    unjudged = [side for side, score in zip(SIDES, scores, strict=True) if score is None]
    failure = f"the judge gave no finite score to {' and '.join(unjudged)}" if unjudged else None
    return {**_head(prompt), **sides, "kl": kl, "failure": failure}


def unanswered(prompt: Prompt, why: str) -> dict[str, Any]:
    """A prompt that neither model was asked."""
    blank = {"text": "", "tokens": 0, "words": 0, "score": None, "rules": {}}
    return {**_head(prompt), "candidate": blank, "champion": blank, "kl": None, "failure": why}


def _head(prompt: Prompt) -> dict[str, Any]:
    turns = [message.model_dump() for message in prompt.prompt]
    return {"id": prompt.id, "slice": prompt.slice, "prompt": turns}


def main(run: RunDir) -> None:
    """Each rank its share of the prompts; rank 0 puts them together, in the prompts' order."""
    params = run.params(EvaluateParams)
    rank, world = connect()
    path = run.input("prompts")
    prompts = list(read_records(path, Prompt))[: params.prompts]
    if len(prompts) < world:
        raise DataError(f"{path}: {len(prompts)} prompts to compare on; name a file in data.eval_prompts")
    write_rows(run.path / f"samples.{rank}.jsonl", compare(run, params, prompts[rank::world], world))
    if world > 1:
        torch.distributed.barrier()
    if rank == 0:
        parts = [read_rows(run.path / f"samples.{other}.jsonl") for other in range(world)]
        rows = [parts[index % world][index // world] for index in range(len(prompts))]
        write_rows(run.path / "samples.jsonl", rows)
        kls = [row["kl"] for row in rows if row["kl"] is not None]
        run.progress(4, 4, "part")
        run.finish(
            {
                "status": "compared",
                "n": len(rows),
                "failures": sum(row["failure"] is not None for row in rows),
                "identical": sum(row["candidate"]["text"] == row["champion"]["text"] for row in rows),
                "kl": sum(kls) / len(kls) if kls else None,
                "digests": {side: digest(run.input(side)) for side in SIDES},
            }
        )


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows or none."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    unfinished.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What `write_rows` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


if __name__ == "__main__":
    program(main)
