"""The judge: the reward model's program on other pairs, so that what is optimised never decides about
itself.
"""

from __future__ import annotations

from tasks.reward import train
from tasks.stage import Stage, run


def body(stage: Stage) -> None:
    """Trained on the judge part, tested on the test part; neither the policy nor the proxy has seen them."""
    train(stage, stage.params.judge, "pairs_judge.jsonl", "pairs_test.jsonl")


if __name__ == "__main__":
    run("judge", body)
