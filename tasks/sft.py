"""Supervised fine-tuning of the base model; its weights are the reference of all that follows."""

from __future__ import annotations

from tasks.stage import Stage, run


def body(stage: Stage) -> None:
    """Train on the demonstrations (chosen answers where the data has none)."""
    params = stage.params.sft
    inputs = {
        "model": stage.output_of("base", "model"),
        "demonstrations": stage.output_of("validate", "demonstrations.jsonl"),
    }
    stage.launch("training.sft", params, inputs, params.processes, params.threads)
    stage.publish("result.json", "metrics.jsonl", "journal.jsonl", "model")


if __name__ == "__main__":
    run("sft", body)
