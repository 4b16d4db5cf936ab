"""Our training steps against TRL's, side by side on this machine's CPU: `python -m infra.bench`.

Each side of a comparison runs in a process of its own, so that peak memory is its own. The two take turns: a
step of ours, a step of TRL's, on the same rows (the same ids), weights, batch, learning rate and token limit,
so that a busy machine hits both. A step is everything from the rows to the moved weights: for DPO the
reference's pass over the step's rows is in it on both sides, for GRPO and RLOO sampling and scoring too. No
adapters, float32 weights, no gradient checkpointing, on either side. The first pair of steps warms up and is
not counted, unless it is the only one. Loading, and fetching rows, are outside the timing.

Ours are the programs' own step functions (training.sft.train_step, training.reward.train_step,
training.preference.train_step, training.rl.step_once), with the shipped token budgets, in
the environment that training.launch gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from infra.bench.side import Side, environment, prepare, serve
from infra.bench.work import BATCH, COMPARABLE, NEW_TOKENS, TASKS

PASSES = {"sft": 6, "reward": 6, "dpo": 8, "grpo": 10, "rloo": 10}
"""Floating point operations a weight and token: 6 for forward and backward, 2 for each pass more (reference,
sampling). Attention, embedding and head are left out, so a share of the peak is a lower bound."""


def compare(spec: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of steps, ours and TRL's; which goes first alternates."""
    sides: dict[str, Side] = {}
    try:
        for name in ("ours", "trl"):
            sides[name] = Side({**spec, "side": name})
        pairs = []
        for number in range(spec["steps"]):
            order = ("ours", "trl") if number % 2 == 0 else ("trl", "ours")
            found = {name: sides[name].step() for name in order}
            pairs.append((found["ours"], found["trl"]))
        return pairs
    finally:
        for side in sides.values():
            side.close()


def row_of(
    task: str, precision: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], size: dict[str, Any]
) -> dict[str, Any]:
    """The figures of one comparison."""
    counted = pairs[1:] or pairs
    row: dict[str, Any] = {"task": task, "precision": precision, "pairs": len(counted)}
    for place, name in enumerate(("ours", "trl")):
        steps = [pair[place] for pair in counted]
        rate = statistics.median(step["tokens"] / step["seconds"] for step in steps)
        row[f"{name}_seconds"] = statistics.median(step["seconds"] for step in steps)
        row[f"{name}_rate"] = rate
        row[f"{name}_peak"] = max(pair[place]["peak"] for pair in pairs)
        row[f"{name}_share"] = rate * PASSES[task] * size["weights"] / size["peaks"][precision]
        if task not in COMPARABLE:
            # Each new token of the longest sample reads all weights (float32) once.
            decode = statistics.median(step["decode"] for step in steps)
            row[f"{name}_bandwidth"] = NEW_TOKENS * size["whole"] * 4 / decode / size["bandwidth"]
        row[f"{name}_losses"] = [pair[place]["loss"] for pair in pairs]
    row["ratio"] = statistics.median(
        (ours["tokens"] / ours["seconds"]) / (other["tokens"] / other["seconds"]) for ours, other in counted
    )
    row["memory"] = row["ours_peak"] / row["trl_peak"]
    if task in COMPARABLE:
        row["loss_gap"] = max(abs(ours["loss"] - other["loss"]) for ours, other in pairs)
    return row


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="ours / TRL; ratio: tokens a second, median of pairs of steps")
    for name in ("task", "s a step", "tokens/s", "ratio", "peak MB", "memory", "last loss", "loss gap",
                 "of matmul peak", "of bandwidth, decoding", "pairs"):  # fmt: skip
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in rows:
        last = f"{row['ours_losses'][-1]:.4f} / {row['trl_losses'][-1]:.4f}"
        table.add_row(
            f"{row['task']} {row['precision']}",
            f"{row['ours_seconds']:.3f} / {row['trl_seconds']:.3f}",
            f"{row['ours_rate']:.0f} / {row['trl_rate']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ours_peak']:.0f} / {row['trl_peak']:.0f}",
            f"{row['memory']:.2f}",
            last if "loss_gap" in row else "-",
            f"{row['loss_gap']:.1e}" if "loss_gap" in row else "-",
            f"{row['ours_share']:.1%} / {row['trl_share']:.1%}",
            f"{row['ours_bandwidth']:.0%} / {row['trl_bandwidth']:.0%}" if "ours_bandwidth" in row else "-",
            str(row["pairs"]),
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a causal LM; without it a tiny random one")
    parser.add_argument("--data", default="../shared/data", help="folder with hh_rlhf/ and gsm8k/")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument(
        "--steps", type=int, default=6, help="pairs of steps a comparison, the first a warm-up"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--backend", choices=("deepspeed", "torch"), default="deepspeed", help="our engine's")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Compares all that was asked for; returns 1 when a comparison could not be made."""
    args = options()
    if args.serve:
        serve(json.loads(args.serve))
        return 0
    if args.prepare:
        prepare(json.loads(args.prepare))
        return 0
    data = Path(args.data)
    real, asked = data / "hh_rlhf" / "harmless-base.jsonl", data / "gsm8k" / "train.jsonl"
    sample = Path("data/sample/preferences.jsonl")
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="plumbline-bench-") as folder:
        base = {
            "folder": folder, "model": args.model or f"{folder}/tiny", "threads": args.threads,
            "steps": args.steps, "backend": args.backend, "precisions": args.precision,
            "pairs": str(real if real.exists() else sample),
            "prompts": str(asked if asked.exists() else sample),
        }  # fmt: skip
        made = subprocess.run(
            [sys.executable, "-m", "infra.bench", "--prepare", json.dumps(base)],
            check=True, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        size = json.loads(made.stdout.splitlines()[-1])
        for precision in args.precision:
            for task in args.tasks:
                spec = {**base, "task": task, "precision": precision, "batch": BATCH[task]}
                try:
                    rows.append(row_of(task, precision, compare(spec), size))
                except RuntimeError as error:
                    failed.append(f"{task} {precision}: {error}")
    used = ", ".join(sorted({base["pairs"], base["prompts"]}))
    peaks = ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in size["peaks"].items())
    machine = f"matmul peak {peaks}, read bandwidth {size['bandwidth'] / 1e9:.1f} GB/s"
    show(rows, f"{args.model or 'tiny random model'}, {args.threads} threads, {used}, {machine}")
    for message in failed:
        print(f"not compared: {message}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps({"size": size, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
