"""Reward models on hh_rlhf by five folds, ours beside TRL's: `python -m infra.evidence.reward_folds`.

The folds part prompt groups. In each one our program (training.reward) and TRL's RewardTrainer train MiniLM
on the other four: the same ids, rows a step in the same order, steps, learning rate with warmup and cosine,
weight decay and clipping; both read the pretrained pooler, their heads are each side's own. Accuracy on the
held-out folds is pooled; intervals take a prompt group as one cluster, tests compare pair by pair. A fold
that is done is kept under --work.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest

from data.records import Preference, digest, group_key, to_line
from infra.bench.work import pair_rows
from infra.evidence.learning import shown
from training import reward
from training.batches import step_rows, steps_per_epoch
from training.config import RewardParams
from training.engine import connect
from training.rundir import RunDir, seed_everything, write_json
from training.score import ScoreModel, load_score_tokenizer, locate
from training.stats import clustered_share

FOLDS, SEED = 5, 0
PARAMS: dict[str, Any] = {
    "model": "minilm", "epochs": 2, "max_length": 128, "frozen_layers": 3, "precision": "fp32",
    "pooling": "pooler", "token_budget": 4096, "checkpoint_every": 100_000, "engine": {"backend": "torch"},
}  # fmt: skip


def pairs(file: Path) -> list[Preference]:
    """Well-formed pairs with their prompt groups."""
    rows = pair_rows({"pairs": str(file)})
    return [row.model_copy(update={"group": group_key(row.prompt)}) for row in rows]


def fold_of(group: str) -> int:
    """The fold that holds a prompt group out."""
    return int(digest(f"fold {SEED}", group), 16) % FOLDS


def wins(gaps: Sequence[float]) -> list[float]:
    """1 for a pair in the right order, ½ for a tie."""
    return [0.5 * (1 + (gap > 0) - (gap < 0)) for gap in gaps]


def ours(train: Sequence[Preference], test: Sequence[Preference], folder: Path) -> list[float]:
    """Held-out wins of the program's published model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("pairs", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
    config = {
        "stage": "reward", "program": "training.reward", "seed": SEED, "params": PARAMS, "dtype": "float32",
        "inputs": {name: str(folder / f"{name}.jsonl") for name in ("pairs", "test")},
    }  # fmt: skip
    seed_everything(SEED)
    reward.main(RunDir(folder, 0, config))
    scores = reward.pair_scores(ScoreModel.load(folder / "model"), test).mean((0, 2))
    return wins((scores[0::2] - scores[1::2]).tolist())


def trl(train: Sequence[Preference], test: Sequence[Preference], folder: Path) -> list[float]:
    """Held-out wins of TRL's trainer on the same ids."""
    import trl as library
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForSequenceClassification

    params = RewardParams(**PARAMS)
    source = locate("minilm", None)
    tok = load_score_tokenizer(source, "encoder")
    seed_everything(SEED)
    model = AutoModelForSequenceClassification.from_pretrained(
        str(source), num_labels=1, local_files_only=True
    )
    reward.freeze(model.bert, params.frozen_layers)
    encoded = [reward.encode_pairs(tok, "encoder", rows, params) for rows in (train, test)]
    steps = params.epochs * steps_per_epoch(len(train), params.batch)
    order = [at for step in range(steps) for at in step_rows(len(train), params.batch, SEED, step)]
    rows = [
        {"chosen_ids": pair.prompt + pair.answers[0], "rejected_ids": pair.prompt + pair.answers[1]}
        for pair in (encoded[0][at] for at in order)
    ]  # fmt: skip
    config = library.RewardConfig(
        output_dir=str(folder), per_device_train_batch_size=params.batch, max_steps=steps,
        learning_rate=params.lr, lr_scheduler_type="cosine", warmup_steps=int(params.warmup * steps),
        weight_decay=params.weight_decay, max_grad_norm=params.clip_norm, use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, seed=SEED, max_length=params.max_length,
        center_rewards_coefficient=params.centring,
    )  # fmt: skip
    trainer = library.RewardTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tok
    )
    trainer._get_train_sampler = lambda *args, **kwargs: SequentialSampler(trainer.train_dataset)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    model.eval()
    gaps = []
    with torch.no_grad():
        for pair in encoded[1]:
            scores = [
                float(model(input_ids=torch.tensor([pair.prompt + ids])).logits) for ids in pair.answers
            ]
            gaps.append(scores[0] - scores[1])
    return wins(gaps)


SIDES = {"ours": ours, "trl": trl}


def folds(rows: Sequence[Preference], work: Path, sides: Sequence[str]) -> list[dict[str, Any]]:
    """A line a held-out pair: its group, who was right, whether the length rule was."""
    found: list[dict[str, Any]] = []
    for number in range(FOLDS):
        train = [row for row in rows if fold_of(row.group) != number]
        test = [row for row in rows if fold_of(row.group) == number]
        rule, _ = reward.length_baseline(train, test)
        sign = 1 if rule == "longer" else -1
        table = {"length": wins([sign * (len(row.chosen) - len(row.rejected)) for row in test])}
        for side in sides:
            file = work / f"{side}-{number}.json"
            if not file.exists():
                began = time.perf_counter()
                values = SIDES[side](train, test, work / f"{side}-{number}")
                write_json(file, {"wins": values, "seconds": time.perf_counter() - began})
            table[side] = json.loads(file.read_text(encoding="utf-8"))["wins"]
            share = sum(table[side]) / len(test)
            print(f"fold {number}, {side}: {share:.3f} of {len(test)} held-out pairs", flush=True)
        found += [
            {"group": row.group, **{name: values[at] for name, values in table.items()}}
            for at, row in enumerate(test)
        ]
    return found


def sign_test(rows: Sequence[dict[str, Any]], better: str, worse: str) -> float:
    """One-sided exact sign test on the pairs where the two differ."""
    more = sum(row[better] > row[worse] for row in rows)
    less = sum(row[better] < row[worse] for row in rows)
    return float(binomtest(more, more + less, alternative="greater").pvalue) if more + less else 1.0


def main() -> int:
    """Prints the table; returns 1 when ours is not above chance and above length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with hh_rlhf/")
    parser.add_argument("--work", type=Path, default=Path(".plumbline/evidence/reward_folds"))
    parser.add_argument("--out", type=Path, default=Path("infra/evidence"))
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--most", type=int, help="only the first pairs of the file, to try the program")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    connect()
    rows = folds(pairs(args.data / "hh_rlhf" / "harmless-base.jsonl")[: args.most], args.work, args.sides)
    groups = [row["group"] for row in rows]
    shares = {name: clustered_share([row[name] for row in rows], groups) for name in ("length", *args.sides)}
    for name, share in shares.items():
        print(f"{name}: {shown(share)} on {share.n} pairs, {len(set(groups))} prompt groups")
    against = {name: sign_test(rows, "ours", name) for name in shares if name != "ours" and "ours" in shares}
    for name, value in against.items():
        print(f"ours right where {name} is wrong, more often than the other way: p = {value:.2g}")
    summary = {
        "folds": FOLDS, "pairs": len(rows), "groups": len(set(groups)), "params": PARAMS,
        "accuracy": {name: [s.estimate, s.lower, s.upper] for name, s in shares.items()}, "p": against,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "reward_folds.json", summary)
    good = "ours" in shares and shares["ours"].lower > 0.5 and against["length"] < 0.05
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
