"""RLOO, GRPO and PPO learn: held-out accuracy on a reasoning-gym task: `python -m infra.evidence.learning`.

The task is spell_backward on words of three to five letters; the reward is reasoning-gym's own check, called
as a run calls it (training.verify:ReasoningGym in a worker process). The base model (three layers, bytes as
tokens) is fine-tuned from nothing until it is right on a quarter of the held-out words; then each algorithm
trains it for the same number of steps, three seeds each, by the on-policy program's own set_up, begin and
step_once. Accuracy is the share of held-out words, never trained on by either, whose sampled answer
(temperature 1) is exactly right, with a Wilson interval.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data.records import Message, Prompt, digest, to_line
from tests.training.tiny import byte_tokenizer, llama
from training import rl, rl_setting
from training.batches import Tree, collate
from training.chat import decode_answer, encode_answer, encode_prompt, load_tokenizer, stop_ids
from training.config_guards import GuardParams
from training.engine import connect
from training.generate import BuiltinGenerator
from training.logprobs import answer_logprobs
from training.models import load_causal
from training.rundir import RunDir, seed_everything, write_json
from training.stats import Interval, wilson

ALGORITHMS = ("rloo", "grpo", "ppo")
TASK = {"min_word_len": 3, "max_word_len": 5}
WORDS, HELD_OUT, START, MOST_STEPS, NEW_TOKENS = 1200, 300, 0.25, 4000, 8
STEPS, EVERY = 160, 10
LR = dict.fromkeys(ALGORITHMS, 2e-3)


def problems() -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on and prompts held out; no word is in both."""
    import reasoning_gym

    found: dict[str, Prompt] = {}
    for entry in reasoning_gym.create_dataset("spell_backward", size=20 * WORDS, seed=1, **TASK):
        text = entry["question"].rpartition(": ")[2]
        key = digest(text.lower())
        found.setdefault(
            key,
            Prompt(
                prompt=(Message(role="user", content=text),), id=key, group=key, reference=entry["answer"],
                extra={"metadata": json.loads(json.dumps(entry["metadata"]))},
            ),
        )  # fmt: skip
    rows = [found[key] for key in sorted(found)][:WORDS]
    if len(rows) <= 2 * HELD_OUT:
        raise SystemExit(
            f"spell_backward gave {len(rows)} different words, more than {2 * HELD_OUT} are needed"
        )
    return rows[HELD_OUT:], rows[:HELD_OUT]


def right(model: Any, tok: Any, rows: Sequence[Prompt], seed: int) -> int:
    """How many sampled answers are exactly right."""
    rollout = BuiltinGenerator(model, stop_ids(tok), int(tok.pad_token_id)).generate(
        [encode_prompt(tok, row.prompt) for row in rows], 1, max_new_tokens=NEW_TOKENS, temperature=1.0,
        keys=[row.id for row in rows], seed=seed,
    )  # fmt: skip
    said = [decode_answer(tok, samples[0]) for samples in rollout.answers]
    return sum(text == row.reference for text, row in zip(said, rows, strict=True))


def base(folder: Path, train: Sequence[Prompt], held_out: Sequence[Prompt]) -> Path:
    """Fine-tunes a fresh model on right answers until START of the held-out words are right."""
    seed_everything(0)
    tok = byte_tokenizer()
    model = llama(0, hidden_size=96, intermediate_size=192, num_hidden_layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    rng = random.Random(0)
    for step in range(MOST_STEPS):
        rows = rng.sample(list(train), 64)
        trees = [
            Tree(row.id, encode_prompt(tok, row.prompt), [encode_answer(tok, str(row.reference))])
            for row in rows
        ]
        batch = collate(trees, int(tok.pad_token_id), shared=True)
        logp, *_ = answer_logprobs(model, batch)
        optimizer.zero_grad()
        loss = -logp.sum() / batch.mask.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 25 == 0 and right(model, tok, held_out, seed=0) >= START * len(held_out):
            break
    else:
        raise SystemExit(f"the base model did not reach {START} within {MOST_STEPS} steps")
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    print(f"base model: {step} steps of fine-tuning", flush=True)
    return folder


def parameters(algorithm: str) -> dict[str, Any]:
    """optimize's section."""
    return {
        "algorithm": algorithm, "steps": STEPS, "prompts": 32, "group": 8, "max_new_tokens": NEW_TOKENS,
        "lr": LR[algorithm], "warmup": 0.05, "beta": 0.01, "held_out": 0, "lora": None, "precision": "fp32",
        "checkpoint_every": STEPS, "token_budget": 16384, "engine": {"backend": "torch"},
        "ppo": {"entropy": 0.0},
        "kl": {"where": "loss", "estimator": "k3"} if algorithm == "grpo" else {},
        "guards": dict.fromkeys(
            name for name, field in GuardParams.model_fields.items()
            if type(None) in getattr(field.annotation, "__args__", ())
        ),
        "rewards": {
            "scorers": [{"kind": "function", "name": "check", "path": "training.verify:ReasoningGym"}],
            "penalty": 0.0,
        },
    }  # fmt: skip


def play(algorithm: str, seed: int, model: Path, train: Sequence[Prompt], held_out: Sequence[Prompt],
         work: Path) -> dict[str, Any]:  # fmt: skip
    """One run: how many held-out answers are right before, and after each EVERY steps."""
    began = time.perf_counter()
    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "prompts.jsonl").write_text("".join(map(to_line, train)), encoding="utf-8")
    config = {
        "stage": "optimize", "program": "training.rl", "seed": seed, "dtype": "float32",
        "params": parameters(algorithm),
        "inputs": {"model": str(model), "prompts": str(folder / "prompts.jsonl")},
    }  # fmt: skip
    seed_everything(seed)
    setting = rl_setting.set_up(RunDir(folder, 0, config))
    _, state = rl.begin(setting)
    counts = [right(setting.learner.model, setting.tok, held_out, seed)]
    try:
        for step in range(1, STEPS + 1):
            rl.step_once(setting, state, step)
            if step % EVERY == 0:
                counts.append(right(setting.learner.model, setting.tok, held_out, seed))
    finally:
        for scorer in setting.scoring.scorers:
            scorer.close()
    kept = state["history"][EVERY - 1 :: EVERY]
    return {
        "algorithm": algorithm, "seed": seed, "right": counts,
        **{name: [round(row[name], 4) for row in kept] for name in ("reward", "kl")},
        "seconds": round(time.perf_counter() - began),
    }  # fmt: skip


def plot(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Accuracy by step, a panel an algorithm, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(ALGORITHMS), figsize=(10, 3.2), sharey=True)
    for panel, algorithm in zip(panels, ALGORITHMS, strict=True):
        for run in (one for one in runs if one["algorithm"] == algorithm):
            shares = [count / HELD_OUT for count in run["right"]]
            panel.plot([EVERY * at for at in range(len(shares))], shares, label=f"seed {run['seed']}")
        panel.set(title=algorithm.upper(), xlabel="step", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"right, of {HELD_OUT} held-out words")
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def shown(share: Interval) -> str:
    """A share with its interval."""
    return f"{share.estimate:.3f} [{share.lower:.3f}, {share.upper:.3f}]"


def main() -> int:
    """Runs all, prints a line a run; returns 1 when a run did not learn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("infra/evidence"))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    connect()
    train, held_out = problems()
    runs, learned = [], True
    with tempfile.TemporaryDirectory(prefix="plumbline-learning-") as name:
        model = base(Path(name) / "base", train, held_out)
        tok = load_tokenizer(model)
        start = right(load_causal(model, torch.float32), tok, held_out, seed=0)
        print(f"{len(train)} words to train on; held out: {start} of {len(held_out)} right", flush=True)
        for algorithm in args.algorithms:
            for seed in args.seeds:
                run = play(algorithm, seed, model, train, held_out, Path(name))
                before, after = (wilson(run["right"][at], HELD_OUT) for at in (0, -1))
                learned = learned and after.lower > before.upper
                print(
                    f"{algorithm} seed {seed}: {shown(before)} -> {shown(after)}, KL {run['kl'][-1]:.2f}, "
                    f"{run['seconds']:.0f} s",
                    flush=True,
                )
                runs.append(run)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "learning.json", {"held_out": HELD_OUT, "every": EVERY, "runs": runs})
    plot(runs, args.out / "learning.png")
    return 0 if learned else 1


if __name__ == "__main__":
    raise SystemExit(main())
