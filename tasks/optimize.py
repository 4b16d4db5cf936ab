"""The policy against the reward model (RLOO and its relatives), or on the pairs (DPO and its family)."""

from __future__ import annotations

from tasks.places import Json
from tasks.stage import Stage, run
from training.config_optimize import ON_PAIRS


def closed_gate(result: Json, what: str) -> str | None:
    """Why the gate of a reward model or judge is closed, None when it is open."""
    gate = result.get("gate")
    if isinstance(gate, dict) and gate.get("open") is True:
        return None
    reason = gate.get("reason") if isinstance(gate, dict) else result.get("reason")
    return f"the {what} is not good enough: {reason or 'its result has no gate'}"


def body(stage: Stage) -> None:
    """Train, unless the reward model's gate is closed; a run that a guard ended is published as such."""
    params = stage.params.optimize
    on_pairs = params.algorithm in ON_PAIRS
    reason = None if on_pairs else closed_gate(stage.result_of("reward"), "reward model")
    if reason is not None:
        stage.not_run(reason)
        return
    inputs = {"model": stage.output_of("sft", "model")}
    if on_pairs:
        inputs["pairs"] = stage.output_of("validate", "pairs_train.jsonl")
        inputs["test"] = stage.output_of("validate", "pairs_validation.jsonl")
        inputs["feedback"] = stage.output_of("validate", "feedback.jsonl")
    else:
        inputs["prompts"] = stage.output_of("validate", "prompts_train.jsonl")
        inputs["reward"] = stage.output_of("reward", "model")
        inputs["judge"] = stage.output_of("judge", "model")
    program = "training.preference" if on_pairs else "training.rl"
    stage.launch(program, params, inputs, params.processes, params.threads)
    stage.publish("result.json", "metrics.jsonl", "journal.jsonl", "model")


if __name__ == "__main__":
    run("optimize", body)
