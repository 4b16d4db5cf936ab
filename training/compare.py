"""Candidate and champion answer the same prompts: `python -m training.launch -m training.compare WORKDIR`.

In: `candidate`, `champion`, `judge`, `prompts`, and `reference` (the SFT model; the champion when it is not
given). Both draw with the same random numbers, so what the two models have in common cancels. Out:
samples.jsonl, a row a prompt: both texts, the judge's scores, broken rules, and for the first `kl_prompts`

    kl = sum over the candidate's tokens of log pi_candidate - log pi_reference       (nats an answer)

Verdicts are drawn from the rows elsewhere: this program generates and measures. A prompt without a verdict
has a `failure`, and is never left out. Rows are in the order of the prompts; a killed run starts anew.
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
from training import rules
from training.batches import Tree, cannot_share, collate, plan
from training.chat import decode_answer, encode_prompt, load_tokenizer, preflight, stop_ids, template_hash
from training.config import EvaluateParams
from training.engine import connect
from training.generate import BuiltinGenerator, Rollout
from training.logprobs import answer_logprobs
from training.models import autocast, device, digest, load_causal, resolve
from training.rundir import RunDir, program
from training.score import ScoreModel

CHUNK = 64
"""Prompts generated between two looks at a stop signal."""


def load(folder: Path, params: EvaluateParams) -> Any:
    """A model that only reads."""
    dtype = torch.bfloat16 if resolve(params.precision) == "bf16" else torch.float32
    return load_causal(folder, dtype).to(device()).requires_grad_(False).eval()


def answer(
    run: RunDir, model: Any, tok: PreTrainedTokenizerBase, prompts: Sequence[Prompt],
    encoded: Sequence[list[int]], params: EvaluateParams,
) -> Rollout:  # fmt: skip
    """One answer a prompt; the random numbers depend on seed and prompt alone."""
    generator = BuiltinGenerator(
        model, stop_ids(tok), int(tok.pad_token_id), autocast=lambda: autocast(params.precision)
    )
    whole = Rollout()
    # Prompts of like length together, back in their order afterwards.
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), CHUNK):
        if run.stop_requested:
            raise Stopped("the comparison was stopped; run again to start it anew")
        part = order[start : start + CHUNK]
        found = generator.generate(
            [encoded[index] for index in part], 1, max_new_tokens=params.max_new_tokens,
            temperature=params.temperature, keys=[prompts[index].id for index in part], seed=run.seed,
        )  # fmt: skip
        whole.answers += found.answers
        whole.logp += found.logp
        whole.finished += found.finished
    back = sorted(range(len(order)), key=order.__getitem__)
    return Rollout(
        *([field[place] for place in back] for field in (whole.answers, whole.logp, whole.finished))
    )


def log_likelihoods(model: Any, trees: Sequence[Tree], pad_id: int, params: EvaluateParams) -> list[float]:
    """log pi(answer | prompt) of each tree's one answer, at the sampling temperature."""
    found = [0.0] * len(trees)
    temperature = params.temperature or 1.0
    shared = cannot_share(model) is None
    with torch.no_grad(), autocast(params.precision):
        for part in plan(trees, params.token_budget, shared):
            batch = collate([trees[index] for index in part], pad_id, shared).to(device())
            logp, _ = answer_logprobs(model, batch, temperature)
            for index, value in zip(part, logp.double().sum(1).tolist(), strict=True):
                found[index] = value
    return found


def divergence(
    made: Rollout, encoded: Sequence[list[int]], keys: Sequence[str], reference: Any, pad_id: int,
    params: EvaluateParams,
) -> list[float | None]:  # fmt: skip
    """KL of each of the first answers, by its own sample (k1); None for the others."""
    wanted = min(params.kl_prompts, len(encoded))
    trees = [Tree(keys[row], list(encoded[row]), made.answers[row]) for row in range(wanted)]
    known = log_likelihoods(reference, trees, pad_id, params) if trees else []
    kls: list[float | None] = [sum(made.logp[row][0]) - known[row] for row in range(wanted)]
    return kls + [None] * (len(encoded) - wanted)


def side(
    tok: PreTrainedTokenizerBase, prompt: Prompt, made: Rollout, row: int, score: float | None
) -> dict[str, Any]:
    """One model's half of a row."""
    text = decode_answer(tok, made.answers[row][0])
    return {
        "text": text,
        "score": score,
        "tokens": len(made.answers[row][0]),
        "words": len(text.split()),
        "rules": rules.broken(prompt.prompt, text, made.finished[row][0]),
    }


def judge_all(folder: Path, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float | None]:
    """The judge's score of each answer, the mean of its heads; None where it is no finite number."""
    judge = ScoreModel.load(folder)
    scores = judge.score_members(
        [(prompt.prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    ).mean((0, 2))
    return [float(score) if bool(score.isfinite()) else None for score in scores]


def main(run: RunDir) -> None:
    """Generates with one model after the other, judges, writes."""
    params = run.params(EvaluateParams)
    _, world = connect()
    if world > 1:
        raise ConfigurationError("evaluate.processes must be 1: compare runs on one rank; raise threads")
    toks = {name: load_tokenizer(run.input(name)) for name in ("candidate", "champion")}
    hashes = {name: template_hash(tok) for name, tok in toks.items()}
    prompts = list(read_records(run.input("prompts"), Prompt))[: params.prompts]
    if not prompts:
        raise DataError(f"{run.input('prompts')}: no evaluation prompts; give data.eval_prompts")
    preflight(toks["candidate"], prompts[0].prompt, "An answer.")
    tok = toks["candidate"]
    encoded = [encode_prompt(tok, prompt.prompt) for prompt in prompts]
    fits = [index for index, ids in enumerate(encoded) if len(ids) <= params.max_prompt]
    chosen, ids = [prompts[index] for index in fits], [encoded[index] for index in fits]
    began = time.monotonic()
    made: dict[str, Rollout] = {}
    kls: list[float | None] = []
    digests = {name: digest(run.input(name)) for name in ("candidate", "champion")}
    baseline = run.input("reference") if "reference" in run.config["inputs"] else run.input("champion")
    digests["reference"] = digest(baseline)
    for number, name in enumerate(("candidate", "champion"), 1):
        own = ids if name == "candidate" else [encode_prompt(toks[name], row.prompt) for row in chosen]
        model = load(run.input(name), params)
        made[name] = answer(run, model, toks[name], chosen, own, params)
        run.progress(number, 4, "part")
        run.timing(number, {"seconds": time.monotonic() - began, "part": name})
        if name == "champion":
            if digests["reference"] != digests["champion"]:
                del model
                gc.collect()
                model = load(baseline, params)
            keys = [prompt.id for prompt in chosen]
            kls = divergence(made["candidate"], ids, keys, model, int(tok.pad_token_id), params)
        del model
        gc.collect()
    run.progress(3, 4, "part")
    texts = {name: [decode_answer(toks[name], samples[0]) for samples in made[name].answers] for name in made}
    scores = judge_all(run.input("judge"), [*chosen, *chosen], texts["candidate"] + texts["champion"])
    rows = []
    for place, prompt in enumerate(chosen):
        ours, theirs = scores[place], scores[place + len(chosen)]
        rows.append(
            {
                "id": prompt.id, "slice": prompt.slice,
                "prompt": [message.model_dump() for message in prompt.prompt],
                "candidate": side(toks["candidate"], prompt, made["candidate"], place, ours),
                "champion": side(toks["champion"], prompt, made["champion"], place, theirs),
                "kl": kls[place],
                "failure": None if None not in (ours, theirs) else "the judge gave no finite score",
            }
        )  # fmt: skip
    rows += [
        {
            "id": prompt.id, "slice": prompt.slice,
            "prompt": [message.model_dump() for message in prompt.prompt],
            "candidate": _blank(), "champion": _blank(), "kl": None,
            "failure": f"the prompt has {len(encoded[index])} tokens, evaluate.max_prompt is {params.max_prompt}",
        }
        for index, prompt in enumerate(prompts) if index not in set(fits)
    ]  # fmt: skip
    write_rows(run.path / "samples.jsonl", rows)
    run.progress(4, 4, "part")
    run.timing(4, {"seconds": time.monotonic() - began, "part": "judge"})
    known = [value for value in kls if value is not None]
    run.finish(
        {
            "status": "compared",
            "n": len(rows),
            "failures": sum(row["failure"] is not None for row in rows),
            "kl": sum(known) / len(known) if known else None,
            "digests": digests,
            "template_hashes": hashes,
            "identical_texts": sum(
                a == b for a, b in zip(texts["candidate"], texts["champion"], strict=True)
            ),
        }
    )


def _blank() -> dict[str, Any]:
    return {"text": "", "score": None, "tokens": 0, "words": 0, "rules": {}}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows or none."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(
        "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows), encoding="utf-8"
    )
    unfinished.replace(path)


if __name__ == "__main__":
    program(main)
