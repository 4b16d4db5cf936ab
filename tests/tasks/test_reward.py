"""Which program trains the reward model, and on which records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks import judge, reward
from tasks.params import Params


class Stub:
    """Stands for a stage: remembers what was launched and published."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = Params.model_validate(params)
        self.launched: list[tuple[str, dict[str, str]]] = []
        self.published: tuple[str, ...] = ()

    def output_of(self, stage: str, name: str) -> Path:
        return Path(stage) / name

    def launch(self, program: str, params: Any, inputs: dict[str, Path], *_: int) -> None:
        self.launched.append((program, {name: path.as_posix() for name, path in inputs.items()}))

    def publish(self, *names: str) -> None:
        self.published = names


@pytest.mark.parametrize(
    ("section", "program", "kind"),
    [
        ({"model": "policy"}, "training.reward", "pairs"),
        ({"model": "policy", "process": {}}, "training.process", "steps"),
    ],
)
def test_the_parameters_choose_program_and_records(section: dict[str, Any], program: str, kind: str) -> None:
    stage: Any = Stub({"reward": section})
    reward.body(stage)
    files = {"pairs": f"validate/{kind}_train.jsonl", "test": f"validate/{kind}_validation.jsonl"}
    assert stage.launched == [(program, {**files, "model": "base/model"})]
    assert "model" in stage.published and "result.json" in stage.published


def test_the_judge_stays_on_pairs() -> None:
    stage: Any = Stub({"reward": {"model": "policy", "process": {}}})
    judge.body(stage)
    files = {"pairs": "validate/pairs_judge.jsonl", "test": "validate/pairs_test.jsonl"}
    assert stage.launched == [("training.reward", files)]
