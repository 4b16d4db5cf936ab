"""Over-optimisation, and where the guards stop it: `python -m infra.evidence.overoptimisation`.

Gold is a fixed function of an answer. The proxy that is optimised, and the judge that the guards ask, are two
linear models of words fitted to noisy preferences by gold between answers of the base model: on other answers
each, the proxy on counts of words, the judge on which words there are. Nobody trains or stops on gold: it is
scored with weight 0, so that it stands in the metrics. Each seed runs with the guards off, and with their
defaults for each KL target of TARGETS; gold rises, peaks and falls as √KL grows [2210.10760].
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.records import Prompt
from infra.evidence import world
from infra.evidence.guard_table import code_digest, commit
from infra.evidence.scores import gold, linear
from training import rl
from training.chat import decode_answer, encode_prompt, load_tokenizer, stop_ids
from training.config_guards import GuardParams
from training.engine import connect
from training.generate import BuiltinGenerator
from training.models import load_causal
from training.rl_setting import Setting
from training.rundir import write_json

STEPS, PAIRS, WRONG, SMOOTH = 160, 300, 0.15, 5
STATED = 0.20
"""Share of gold's possible gain that a run may lose before the guards stop it. The share stands since before
the first run, what it is a share of does not: at first a run was held against the best peak of all runs of
its seed, then against its own (a run that is stopped on its way up has lost nothing). Both are published."""
SEEDS = (21, 22, 23, 24, 25, 26, 27, 28)
"""Published. Rate, number of steps, targets and the second measure were chosen on seeds 11 to 14."""
TARGETS = (0.1, 1.0, 3.0)
"""kl.target, nats an answer: the default, and looser ones. The KL guard acts at five times it."""


def base_answers(model: Path, prompts: Sequence[Prompt], group: int, seed: int) -> list[list[str]]:
    """Words of answers that the base model gives."""
    tok, policy = load_tokenizer(model), load_causal(model, torch.float32)
    rollout = BuiltinGenerator(policy, stop_ids(tok), int(tok.pad_token_id)).generate(
        [encode_prompt(tok, prompt.prompt) for prompt in prompts], group,
        max_new_tokens=world.NEW_TOKENS, temperature=1.0, keys=[prompt.id for prompt in prompts], seed=seed,
    )  # fmt: skip
    return [decode_answer(tok, ids).split() for samples in rollout.answers for ids in samples]


def fit(answers: Sequence[Sequence[str]], seed: int, presence: bool) -> dict[str, float]:
    """Weights of words by Bradley-Terry on pairs that gold labels, some of them wrongly; ridge 1, Newton."""
    rng = random.Random(seed)
    names = sorted({word for words in answers for word in words})
    table = np.array([[words.count(name) for name in names] for words in answers], float)
    table = np.minimum(table, 1.0) if presence else table
    first, second = (np.array([rng.randrange(len(answers)) for _ in range(PAIRS)]) for _ in range(2))
    better = np.array([gold(answers[a]) > gold(answers[b]) for a, b in zip(first, second, strict=True)])
    label = np.array([float(value) if rng.random() >= WRONG else 1.0 - value for value in better])
    design = table[first] - table[second]
    weight = np.zeros(len(names))
    for _ in range(20):
        chance = 1 / (1 + np.exp(-design @ weight))
        curve = design.T @ (design * (chance * (1 - chance))[:, None]) + np.eye(len(names))
        weight += np.linalg.solve(curve, design.T @ (label - chance) - weight)
    return dict(zip(names, map(float, weight), strict=True))


class Judge:
    """The second proxy, where rl asks a ScoreModel."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights

    def score_members(self, rows: Sequence[tuple[Any, str]]) -> torch.Tensor:
        """[1, N, 1] scores of conversations and answers, as ScoreModel gives them."""
        values = [linear(self._weights, sorted(set(text.split()))) for _, text in rows]
        return torch.tensor(values).view(1, -1, 1)


def parameters(target: float | None) -> dict[str, Any]:
    """optimize's section: the guards' defaults with a KL target, or without guards."""
    function = {"kind": "function", "path": "infra.evidence.scores:Score"}
    off = [name for name, field in GuardParams.model_fields.items() if field.default is not None
           and type(None) in getattr(field.annotation, "__args__", ())]  # fmt: skip
    return {
        "algorithm": "rloo", "steps": STEPS, "prompts": 8, "group": 6,
        "max_new_tokens": world.NEW_TOKENS, "max_prompt": world.MAX_PROMPT,
        "lr": 4e-4, "warmup": 0.0, "min_lr_share": 1.0, "beta": 0.01, "kl": {"target": target or 1.0},
        "held_out": 0, "lora": None, "precision": "fp32", "checkpoint_every": 2, "token_budget": 8192,
        "engine": {"backend": "torch"}, "guards": {} if target else dict.fromkeys(off),
        "rewards": {
            "scorers": [{**function, "name": "proxy"}, {**function, "name": "gold", "dimension": "gold",
                         "path": "infra.evidence.scores:gold_of"}],
            "weights": {"quality": 1.0, "gold": 0.0}, "penalty": 0.0,
        },
    }  # fmt: skip


def gold_now(setting: Setting) -> float:
    """Mean gold of fresh answers to all prompts, from the weights as they are."""
    found = rl.roll(setting, setting.prompts, 2, step=-3, epochs=[0] * len(setting.prompts))
    return float(found.scored.score[:, found.scored.dimensions.index("gold")].mean())


def play(seed: int, target: float | None, work: Path) -> dict[str, Any]:
    """One run: metrics of each step, why it ended, gold of the weights that would be published."""
    began = time.process_time()
    model, folder = world.base(work / f"base-{seed % 2 + 4}", seed % 2 + 4), work / "over"
    texts = base_answers(model, world.prompts(seed, {}), 12, seed)
    proxy = fit(texts[::2], seed, presence=False)
    judge = fit(texts[1::2], seed + 1, presence=True)
    setting = world.open_run(folder, model, parameters(target), seed, {"weights": proxy})
    setting.judge = Judge(judge)  # type: ignore[assignment]
    reason = None
    _, state = rl.begin(setting)
    before = gold_now(setting)
    for step in range(1, STEPS + 1):
        reason = rl.step_once(setting, state, step)
        if reason is not None:
            setting.checkpoints.rollback()
            break
    published = gold_now(setting)
    for scorer in setting.scoring.scorers:
        scorer.close()
    lines = [line for line in world.journal(folder) if line["event"] in ("guard", "rollback")]
    shutil.rmtree(folder)
    names = {"kl": "kl", "score_quality": "proxy", "score_gold": "gold", "length": "length"}
    return {
        "steps": [{short: row[name] for name, short in names.items()} for row in state["history"]],
        "journal": [{key: line.get(key) for key in ("event", "step", "guard", "action")} for line in lines],
        "reason": reason, "gold_before": before, "gold_published": published,
        "seconds": time.process_time() - began,
    }  # fmt: skip


def smooth(values: Sequence[float]) -> list[float]:
    """Mean of the last `SMOOTH` steps."""
    return [statistics.fmean(values[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(values))]


def verdict(off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """What gold could gain and lost without guards; what it gained, and lost after its peak, with them."""
    curve, guarded = (smooth([row["gold"] for row in run["steps"]]) for run in (off, on))
    start, peak = curve[0], max([*curve, *guarded])
    gain, end = peak - start, len(on["steps"]) - 1
    top = max(guarded)
    return {
        "start": start, "peak": peak, "peak_step": curve.index(max(curve)) + 1,
        "lost_without": (max(curve) - curve[-1]) / gain, "stop_step": end + 1,
        "guard": on["reason"].partition(":")[0] if on["reason"] else None,
        "root_kl_at_stop": math.sqrt(max(on["steps"][-1]["kl"], 0.0)),
        "gained": (top - start) / gain, "lost_at_stop": (top - guarded[-1]) / gain,
        "below_best": (peak - guarded[-1]) / gain,
        "published": on["gold_published"], "before": on["gold_before"],
    }  # fmt: skip


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| seed | kl.target | gold: start, peak | lost without guards | guard that stopped, step | √KL "
        "| gained of the possible gain | lost after its peak | below the best peak | gold published |",
        "|--:|--:|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for run in runs:
        for target, on in run["on"].items():
            v = verdict(run["off"], on)
            stopped = f"{v['guard']}, {v['stop_step']}" if v["guard"] else "none"
            lines.append(
                f"| {run['seed']} | {target} | {v['start']:.2f}, {v['peak']:.2f} "
                f"| {v['lost_without']:.1f} x the gain | {stopped} | {v['root_kl_at_stop']:.1f} "
                f"| {v['gained']:.0%} | {v['lost_at_stop']:.0%} | {v['below_best']:.0%} "
                f"| {v['published']:.2f} |"
            )
    return "\n".join([*lines, "", *summary(runs)]) + "\n"


def summary(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Per KL target: runs that were stopped before more than STATED was lost, by both measures."""
    lines = ["| kl.target | runs | within, of its own peak | within, of the best peak | worst of each |"]
    lines.append("|--:|--:|--:|--:|--:|")
    for target in runs[0]["on"]:
        found = [verdict(run["off"], run["on"][target]) for run in runs]
        own, best = ([v[name] for v in found] for name in ("lost_at_stop", "below_best"))
        counts = [sum(v["guard"] is not None and v[name] <= STATED for v in found)
                  for name in ("lost_at_stop", "below_best")]  # fmt: skip
        lines.append(
            f"| {target} | {len(found)} | {counts[0]} | {counts[1]} | {max(own):.0%}, {max(best):.0%} |"
        )
    return lines


def plot(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Proxy and gold against √KL without guards, a column a seed, and where the guards stopped."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, len(runs), figsize=(3.2 * len(runs), 5), squeeze=False, sharex="col")
    for column, run in enumerate(runs):
        for row, name in enumerate(("proxy", "gold")):
            panel = panels[row][column]
            for label, part in {"guards off": run["off"], **run["on"]}.items():
                x = [math.sqrt(max(step["kl"], 0.0)) for step in part["steps"]]
                y = smooth([step[name] for step in part["steps"]])
                if part is run["off"]:
                    panel.plot(x, y, color="grey", lw=1.2, label=label)
                else:
                    panel.plot(x[-1], y[-1], "o", label=f"stop, target {label}")
        low, high = verdict(run["off"], run["off"])["start"], verdict(run["off"], run["off"])["peak"]
        panels[0][column].set_title(f"seed {run['seed']}")
        panels[1][column].set(xlabel="√KL to the reference", ylim=(low - 1.5, high + 0.2))
    for name, row in zip(("proxy", "gold"), panels, strict=True):
        row[0].set_ylabel(name)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def main() -> int:
    """Runs what is missing, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("infra/evidence"))
    parser.add_argument("--work", type=Path, default=Path(".plumbline/evidence"), help="finished runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    connect()
    runs, digest = [], code_digest()
    for seed in args.seeds:
        found: dict[float | None, dict[str, Any]] = {}
        for target in (None, *TARGETS):
            file = args.work / "over-runs" / f"{seed}-{target}-{digest}.json"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, play(seed, target, args.work))
            found[target] = json.loads(file.read_text(encoding="utf-8"))
        runs.append({"seed": seed, "off": found[None], "on": {f"{t:g}": found[t] for t in TARGETS}})
        print(f"seed {seed} done", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    print(table(runs))
    (args.out / "overoptimisation.md").write_text(table(runs), encoding="utf-8")
    verdicts = [
        {"seed": run["seed"], "target": target, **verdict(run["off"], on)}
        for run in runs
        for target, on in run["on"].items()
    ]
    written = {"commit": commit(), "stated": STATED, "verdicts": verdicts}
    write_json(args.out / "overoptimisation.json", written)
    plot(runs, args.out / "overoptimisation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
