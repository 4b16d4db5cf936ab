"""Facts of a healthy run, and the folder that it would leave; tests change single numbers of both."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tasks.evidence import Facts
from tasks.params import Params
from tasks.results import RESULTS

HEALTHY: dict[str, dict[str, Any]] = {
    "validate": {
        "rows_in": 1000, "rows_refused": 0,
        "pairs": {"train": 500, "judge": 300, "validation": 100, "test": 100},
        "agreement": {"mean": 0.8, "pairs_judged_more_than_once": 400, "contradicted_pairs": 40},
        "length_baseline": {"accuracy": 0.55, "rule": "longer"}, "prompts": {"evaluate": 300},
    },
    "sft": {"status": "trained", "rows": 250, "dropped": {}, "stop_share": 0.9},
    "reward": {
        "status": "trained", "n": 100, "accuracy": 0.8, "interval": [0.72, 0.87], "length_baseline": 0.55,
        "calibration": {"ece": 0.05}, "score_std": 1.0, "train_accuracy": 0.82,
    },
    "judge": {
        "status": "trained", "n": 100, "accuracy": 0.8, "interval": [0.72, 0.87], "length_baseline": 0.55,
    },
    "optimize": {
        "status": "trained", "reason": None, "algorithm": "rloo", "steps": 12, "reward_before": -1.0,
        "reward_after": 0.0, "kl": 0.08, "guards": [],
    },
    "evaluate": {
        "status": "compared", "n": 200, "win_rate": 0.65, "interval": [0.58, 0.71], "overlap": 0,
        "failure_share": 0.0, "length_controlled": {"estimate": 0.64}, "kl": 0.5,
        "slices": [{"slice": "advice", "worse": False}], "rules": {"over_refusal_rise": 0.0},
    },
    "promote": {"promote": False},
}  # fmt: skip


def course() -> dict[str, list[dict[str, Any]]]:
    """Metrics of the training stages of a healthy run."""
    steps = range(12)
    return {
        "sft": [{"step": n + 1, "loss": 3.0 - 0.1 * n} for n in steps],
        "optimize": [
            {
                "step": n + 1, "reward": -1.0 + 0.1 * n + 0.02 * (-1) ** n, "reward_std": 0.9,
                "kl": 0.008 * n, "entropy": 1.2, "length": 30.0, "clipped": 0.2, "zero_variance": 0.0,
                "repetition": 0.0, "grad_norm": 2.0, "ratio_clipped": 0.01,
                "proxy": -1.0 + 0.1 * n, "proxy_std": 1.0, "judge": -1.0 + 0.09 * n, "judge_std": 1.0,
            }
            for n in steps
        ],
    }  # fmt: skip


def changed(changes: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Results and metrics with other values: `reward.n` in a result, `optimize:kl` in a metric (a list: step
    by step); a stage's whole result by its name, None takes it away.
    """
    results, metrics = copy.deepcopy(HEALTHY), course()
    for place, value in changes.items():
        stage, colon, name = place.partition(":")
        if colon:
            for number, row in enumerate(metrics[stage]):
                row[name] = value[number] if isinstance(value, list) else value
            continue
        *keys, last = place.split(".")
        at: Any = results
        for key in keys:
            at = at[key]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return results, metrics


def facts(changes: dict[str, Any] | None = None, params: dict[str, Any] | None = None, **more: Any) -> Facts:
    """Facts of a run that differs from a healthy one in some places."""
    results, metrics = changed(changes or {})
    return Facts(Params.model_validate(params or {}), results, metrics, **more)


def write_run(project: Path, changes: dict[str, Any], params: str = "{}\n") -> None:
    """The same as a project folder."""
    (project / "params.yaml").write_text(params, encoding="utf-8")
    (project / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    results, metrics = changed(changes)
    for stage, result in results.items():
        folder = project / "data" / "stages" / stage
        folder.mkdir(parents=True)
        (folder / RESULTS.get(stage, "result.json")).write_text(json.dumps(result), encoding="utf-8")
        lines = "".join(json.dumps(row) + "\n" for row in metrics.get(stage, ()))
        if lines:
            (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
