"""The reward model (the proxy that is optimised): trained on the train part, tested on the validation
part.
"""

from __future__ import annotations

from pathlib import Path

from tasks.stage import Stage, run
from training.config import RewardParams


def train(stage: Stage, params: RewardParams, pairs: str, held_out: str) -> None:
    """Bradley-Terry on one part of the preferences, tested on another; the gate's verdict is in the
    result.
    """
    inputs: dict[str, Path] = {
        "pairs": stage.output_of("validate", pairs),
        "test": stage.output_of("validate", held_out),
    }
    if params.model == "policy":
        inputs["model"] = stage.output_of("base", "model")
    stage.launch("training.reward", params, inputs, params.processes, params.threads)
    stage.publish("result.json", "metrics.jsonl", "journal.jsonl", "model")


def body(stage: Stage) -> None:
    """The proxy."""
    train(stage, stage.params.reward, "pairs_train.jsonl", "pairs_validation.jsonl")


if __name__ == "__main__":
    run("reward", body)
