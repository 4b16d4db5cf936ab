"""The reward model (the proxy that is optimised): trained on the train part, tested on the validation
part, on pairs or, with `reward.process`, on labelled steps.
"""

from __future__ import annotations

from pathlib import Path

from tasks.stage import Stage, run
from training.config import RewardParams


def train(
    stage: Stage, params: RewardParams, pairs: str, held_out: str, program: str = "training.reward"
) -> None:
    """A reward model from one part of the records, tested on another; the gate's verdict is in the
    result.
    """
    inputs: dict[str, Path] = {
        "pairs": stage.output_of("validate", pairs),
        "test": stage.output_of("validate", held_out),
    }
    if params.model == "policy":
        inputs["model"] = stage.output_of("base", "model")
    stage.launch(program, params, inputs, params.processes, params.threads)
    stage.publish("result.json", "metrics.jsonl", "journal.jsonl", "model")


def body(stage: Stage) -> None:
    """The proxy."""
    params = stage.params.reward
    if params.process is not None:
        train(stage, params, "steps_train.jsonl", "steps_validation.jsonl", "training.process")
    else:
        train(stage, params, "pairs_train.jsonl", "pairs_validation.jsonl")


if __name__ == "__main__":
    run("reward", body)
