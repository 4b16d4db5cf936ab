"""The sft stage with the fake launcher and program."""

from __future__ import annotations

from tasks import stage as stages


def body(stage: stages.Stage) -> None:
    stage.launch("tests.tasks.fake_program", stage.params.sft, {"model": stage.output_of("base", "model")})
    stage.publish("result.json", "metrics.jsonl", "journal.jsonl", "model")


if __name__ == "__main__":
    stages.LAUNCHER = "tests.tasks.fake_launch"
    stages.run("sft", body)
