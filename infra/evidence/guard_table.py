"""Recall and false alarms of the guards on injected faults: `python -m infra.evidence.guard_table`.

Runs of the on-policy program (training.rl's own steps) on a base model of two layers, each a few seconds on
one thread. Guards stand at their defaults, but for their actions, which are all `warn`: so a run shows
everything that its guards would have said, until one that is meant for the fault has spoken. An alarm is a
line `guard` in the run's journal at or after the step that the fault touches first; a clean run with any such
line is a false alarm. A loophole counts as exploited when it has earned more than the wanted quality.

Finished runs are kept in the work folder under a key of their case and of the code, so that a killed command
goes on where it was. Only `held out` is published: `development` is what thresholds were chosen on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from data.errors import PlumblineError
from infra.evidence import world
from infra.evidence.faults import CLEAN, EVENTS, FAULTS, OWN_GUARDS, Variant
from infra.evidence.scores import CLEAN as REWARDS
from training import rl
from training.config_guards import GuardParams
from training.engine import connect
from training.guards import GUARDS, Watch, kl
from training.rundir import write_json
from training.stats import wilson

STEPS, PROMPTS, GROUP = 20, 6, 8
TARGET, OTHERS = 3.0, (0.1, 0.3, 1.0)
"""kl.target of the runs, as in the shipped profile; the first of the others is the default."""
SPLITS: dict[str, dict[str, Any]] = {
    "development": {
        "seed": 1000, "bases": (0, 1), "rewards": ("nature", "small", "opening"),
        "algorithms": ("rloo", "grpo", "ppo"), "rates": (3e-3,), "faulty": 6, "clean": 12,
    },
    "held out": {
        "seed": 9000, "bases": (2, 3), "rewards": ("good", "order", "different", "topical"),
        "algorithms": ("rloo", "dr_grpo", "reinforce_pp", "ppo"), "rates": (2e-3, 4e-3), "faulty": 24,
        "clean": 60,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run."""

    fault: str
    variant: Variant
    seed: int
    base: int
    reward: str
    algorithm: str
    lr: float

    def key(self) -> str:
        """Digest of the case and of all code that can change its outcome."""
        text = json.dumps([self.fault, self.variant.described(), self.seed, self.base, self.reward,
                           self.algorithm, self.lr, code_digest()], sort_keys=True)  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@cache
def code_digest() -> str:
    """Digest of the training code and of these runs' own."""
    whole = hashlib.sha256()
    for file in sorted([*Path("training").glob("*.py"), *Path("infra/evidence").glob("*.py")]):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:12]


def cases(split: str) -> list[Case]:
    """All runs of a split; each of a fault's variants, rewards, algorithms, ... comes up equally often."""
    plan = SPLITS[split]
    made = []
    for at, (fault, variants) in enumerate({"clean": CLEAN, **FAULTS}.items()):
        count = plan["clean"] if fault == "clean" else plan["faulty"]
        rng = random.Random(f"{split} {fault}")
        drawn = []
        for choices in (
            variants[split],
            *(plan[name] for name in ("bases", "rewards", "algorithms", "rates")),
        ):
            column = [choices[number % len(choices)] for number in range(count)]
            rng.shuffle(column)
            drawn.append(column)
        for number, (variant, base, reward, algorithm, rate) in enumerate(zip(*drawn, strict=True)):
            seed = plan["seed"] + 100 * at + number
            made.append(Case(fault, variant, seed, base, reward, algorithm, rate * variant.lr_factor))
    return made


# -- a run ---------------------------------------------------------------------------------------------------


class Judge:
    """A held-out judge, not trained against: the clean reward, misread by a fixed amount an answer."""

    def __init__(self, reward: str, spread: float = 0.15) -> None:
        self._reward, self._spread = REWARDS[reward], spread

    def score_members(self, rows: Sequence[tuple[Any, str]]) -> torch.Tensor:
        """[1, N, 1] scores of conversations and answers, as ScoreModel gives them."""
        values = []
        for prompt, text in rows:
            bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
            noise = self._spread * statistics.NormalDist().inv_cdf(min(max(bits, 1e-9), 1 - 1e-9))
            values.append(self._reward(prompt[-1].content.split(), text.split()) + noise)
        return torch.tensor(values).view(1, -1, 1)


def parameters(case: Case) -> dict[str, Any]:
    """optimize's section for a case: the guards' defaults, warnings only."""
    scorers = [
        {"kind": "function", "name": "score", "path": "infra.evidence.scores:Score"},
        {"kind": "function", "name": "loophole", "path": "infra.evidence.scores:loophole",
         "dimension": "loophole"},
    ]  # fmt: skip
    return {
        "algorithm": case.algorithm, "steps": STEPS, "prompts": PROMPTS, "group": GROUP,
        "max_new_tokens": world.NEW_TOKENS, "max_prompt": world.MAX_PROMPT,
        "lr": case.lr, "warmup": 0.0, "min_lr_share": 0.5, "beta": 0.05,
        "kl": {"target": TARGET}, "held_out": 0, "lora": None, "precision": "fp32", "checkpoint_every": 1000,
        "token_budget": 8192, "engine": {"backend": "torch"},
        "rewards": {"scorers": scorers, "weights": {"quality": 1.0, "loophole": 0.0}},
        "guards": {"actions": dict.fromkeys(GUARDS, "warn")},
    }  # fmt: skip


def own_alarm(case: Case, journal: Sequence[dict[str, Any]]) -> bool:
    """Whether a guard that is meant for the fault has spoken: the rest of the run would tell nothing."""
    return any(
        line["event"] == "guard" and line["step"] >= case.variant.start
        and line["guard"] in OWN_GUARDS.get(case.fault, ())
        for line in journal
    )  # fmt: skip


def play(case: Case, work: Path) -> dict[str, Any]:
    """Runs a case to its end; returns its journal's alarms, its history, and how it ended."""
    began = time.process_time()
    folder, variant = work / "run", case.variant
    extra = {"clean": case.reward, **variant.extra}
    if "broken" in extra:
        extra["broken_from"] = (variant.start - 1) * PROMPTS * GROUP
    model = world.base(work / f"base-{case.base}", case.base)
    setting = world.open_run(folder, model, parameters(case), case.seed, extra)
    setting.judge = Judge(case.reward)  # type: ignore[assignment]
    act = EVENTS[variant.event](variant.start) if variant.event else (lambda setting, step: None)
    ended = ""
    try:
        act(setting, 0)
        _, state = rl.begin(setting)
        for step in range(1, STEPS + 1):
            act(setting, step)
            ended = rl.step_once(setting, state, step) or ""
            if ended or own_alarm(case, world.journal(folder)):
                break
    except PlumblineError as error:
        ended = f"{error.kind}: {str(error).splitlines()[0]}"
    finally:
        for scorer in setting.scoring.scorers:
            scorer.close()
    alarms = [line for line in world.journal(folder) if line["event"] == "guard"]
    shutil.rmtree(folder)
    return {
        "alarms": [{key: alarm[key] for key in ("step", "guard", "value", "bound")} for alarm in alarms],
        "ended": ended, "seconds": time.process_time() - began, "history": state["history"],
    }  # fmt: skip


def results(split: str, work: Path) -> list[tuple[Case, dict[str, Any]]]:
    """All runs of a split, the finished ones from the work folder."""
    found = []
    everything = cases(split)
    for number, case in enumerate(everything, 1):
        file = work / "runs" / f"{case.key()}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, play(case, work))
        result = json.loads(file.read_text(encoding="utf-8"))
        found.append((case, result))
        seen = [f"{alarm['guard']}@{alarm['step']}" for alarm in result["alarms"]]
        print(
            f"{number}/{len(everything)} {case.fault}: {case.variant.name}, {case.reward}, {case.algorithm}, "
            f"{result['seconds']:.1f} s: {', '.join(seen) or 'nothing seen'} {result['ended'][:60]}",
            flush=True,
        )
    return found


# -- the table -----------------------------------------------------------------------------------------------


def alarms_of(case: Case, result: dict[str, Any], without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The alarms that count: not before the fault, and not of guards that are left out."""
    first = 1 if case.fault == "clean" else case.variant.start
    return [alarm for alarm in result["alarms"] if alarm["step"] >= first and alarm["guard"] not in without]


def exploited(history: Sequence[dict[str, float]]) -> bool:
    """Whether the loophole's pay rose by more than the wanted quality's, last five steps to the first."""

    def gain(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.fmean(map(of, history[-5:])) - of(history[0])

    paid = gain(lambda row: row["score_loophole"])
    return paid > max(gain(lambda row: row["score_quality"] - row["score_loophole"]), 0.05)


def row_of(fault: str, runs: Sequence[tuple[Case, dict[str, Any]]]) -> dict[str, Any]:
    """A line of the table."""
    mine = [(case, result) for case, result in runs if case.fault == fault]
    row: dict[str, Any] = {"fault": fault, "runs": len(mine)}
    for name, without in (("all", ()), ("no_judge", ("gap",))):
        seen = sum(bool(alarms_of(case, result, without)) for case, result in mine)
        row[name] = {"seen": seen, "rate": list(wilson(seen, len(mine)))[:3]}
    firsts = [(case, alarms_of(case, result)[0]) for case, result in mine if alarms_of(case, result)]
    delays = [alarm["step"] - case.variant.start for case, alarm in firsts]
    row["median_delay"] = statistics.median(delays) if delays else None
    row["first"] = dict(Counter(alarm["guard"] for _, alarm in firsts).most_common())
    if any("hack" in case.variant.extra for case, _ in mine):
        used = [exploited(result["history"]) for _, result in mine]
        row["exploited"] = sum(used)
        row["exploited_seen"] = sum(
            bool(alarms_of(case, result)) for (case, result), one in zip(mine, used, strict=True) if one
        )
    if fault != "clean":
        own = [
            any(alarm["guard"] in OWN_GUARDS[fault] for alarm in alarms_of(case, result))
            for case, result in mine
        ]
        row["own"] = sum(own)
        row["before"] = sum(
            any(alarm["step"] < case.variant.start for alarm in result["alarms"]) for case, result in mine
        )
        row["missed"] = sorted(
            f"{case.variant.name}, {case.reward}, {case.algorithm}, seed {case.seed}"
            for case, result in mine
            if not alarms_of(case, result)
        )
    return row


def kl_alarms(runs: Sequence[tuple[Case, dict[str, Any]]]) -> dict[str, list[int]]:
    """kl.target -> clean runs in which the KL guard would have spoken, and all of them. The target steers
    nothing else in these runs, so that their metrics would have been the same."""
    clean = [result["history"] for case, result in runs if case.fault == "clean"]
    found = {}
    for target in (*OTHERS, TARGET):
        watch = Watch(GuardParams(), target, error_limit=1.0)
        seen = sum(any(kl(one[:end], watch) for end in range(1, len(one) + 1)) for one in clean)
        found[f"{target:g}"] = [seen, len(clean)]
    return found


def targets_table(alarms: dict[str, list[int]]) -> str:
    """Markdown."""
    lines = ["| kl.target | clean runs with an alarm of the KL guard |", "|--:|--:|"]
    lines += [f"| {target} | {percent(list(wilson(*counts))[:3])} |" for target, counts in alarms.items()]
    return "\n".join(lines) + "\n"


def percent(rate: Sequence[float]) -> str:
    """Estimate with its interval."""
    return f"{rate[0]:.0%} [{rate[1]:.0%}, {rate[2]:.0%}]"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| fault | runs | recall | without the judge's guard | loophole exploited, and seen "
        "| its own guard fired | steps to the alarm | first guard (runs) |",
        "|---|--:|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        first = ", ".join(f"{name} {count}" for name, count in row["first"].items()) or "none"
        if row["fault"] == "clean":
            first = f"false alarms: {first}"
        delay = "" if row["median_delay"] is None or row["fault"] == "clean" else f"{row['median_delay']:g}"
        used = f"{row['exploited']}, {row['exploited_seen']}" if "exploited" in row else ""
        own = f"{row['own']}/{row['runs']}" if "own" in row else ""
        name = "**clean: false alarms**" if row["fault"] == "clean" else row["fault"]
        lines.append(
            f"| {name} | {row['runs']} | {percent(row['all']['rate'])} "
            f"| {percent(row['no_judge']['rate'])} | {used} | {own} | {delay} | {first} |"
        )
    return "\n".join(lines) + "\n"


def commit() -> str:
    """The commit that ran, marked when the tree had changes."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()


def main() -> int:
    """Runs what is missing, prints the table, writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("infra/evidence"))
    parser.add_argument("--work", type=Path, default=Path(".plumbline/evidence"), help="finished runs")
    parser.add_argument("--split", choices=list(SPLITS), default="held out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    connect()
    runs = results(args.split, args.work)
    rows = [row_of(fault, runs) for fault in ("clean", *FAULTS)]
    text = f"{table(rows)}\n{targets_table(kl_alarms(runs))}"
    print(text)
    if args.split == "held out":
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "guard_table.md").write_text(text, encoding="utf-8")
        write_json(
            args.out / "guard_table.json",
            {
                "commit": commit(), "steps": STEPS, "guards": GuardParams().model_dump(mode="json"),
                "cpu_seconds": round(sum(result["seconds"] for _, result in runs)), "rows": rows,
                "kl_target": TARGET, "kl_alarms": kl_alarms(runs),
                "runs": [summary(case, result) for case, result in runs],
            },
        )  # fmt: skip
    return 0


def summary(case: Case, result: dict[str, Any]) -> str:
    """A run in one line."""
    first: dict[str, int] = {}
    for alarm in result["alarms"]:
        first.setdefault(alarm["guard"], alarm["step"])
    seen = " ".join(f"{guard}@{step}" for guard, step in first.items()) or "-"
    last = result["history"][-1] if result["history"] else {}
    numbers = " ".join(
        f"{name}={last[name]:.3g}"
        for name in ("reward", "kl", "length")
        if math.isfinite(last.get(name, math.nan))
    )
    return (
        f"{case.fault} | {case.variant.name} from step {case.variant.start} | {case.reward} {case.algorithm} "
        f"lr {case.lr:g} base {case.base} seed {case.seed} | {seen} | {numbers} | {result['ended']}"
    )


if __name__ == "__main__":
    sys.exit(main())
