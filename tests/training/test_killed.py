"""A run that dies between any two writes, or in the middle of one, ends with the bytes of one that did not.

The programs run in this process; a kill is an exception that nothing catches, thrown where a file is about to
be written, synced, renamed, cut or removed, half of it done.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from data.records import Prompt, to_line
from tests.training.tiny import (
    prompt,
    run_program,
    save_policy,
    workdir,
    write_demonstrations,
    write_pairs,
)
from training import preference, reward, rl, sft
from training.rundir import RunDir

EVERY: dict[str, Any] = {
    "precision": "fp32", "checkpoint_every": 1, "keep": 1, "engine": {"backend": "torch"},
    "lora": {"rank": 2, "dropout": 0.1},
}  # fmt: skip
PAIRS = {"algorithm": "dpo", "steps": 3, "prompts": 4}
POLICY = {
    "algorithm": "ppo", "ppo": {"updates": 2}, "steps": 3, "prompts": 2, "group": 2, "max_new_tokens": 6,
    "held_out": 2, "held_out_every": 1, "lora": None,
    "rewards": {"scorers": [{"kind": "function", "name": "f", "path": "tests.training.scorer:vowels"}]},
}  # fmt: skip
PROGRAMS: dict[str, tuple[Callable[[RunDir], None], dict[str, Any]]] = {
    "sft": (sft.main, {"max_steps": 3, "batch": 4}),
    "reward": (reward.main, {"model": "policy", "max_steps": 3, "batch": 4, "members": 2}),
    "preference": (preference.main, PAIRS),
    "rl": (rl.main, POLICY),
}
FEW, MANY = 29, 3
"""Every which place is tried."""


class Killed(BaseException):
    """Like kill -9: nothing cleans up behind it."""


class Places:
    """Counts the places where a run touches its files, and kills it at one of them."""

    def __init__(self, fatal: int | None = None) -> None:
        self.count, self.fatal = 0, fatal

    def wrap(self, owner: Any, name: str, half: Callable[..., object]) -> tuple[Any, str, Any]:
        real = getattr(owner, name)

        def touched(*given: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.fatal:
                half(*given)
                raise Killed
            return real(*given, **named)

        return owner, name, touched


def half_saved(state: Any, file: Path) -> None:
    """A file of torch.save that breaks off."""
    file.write_bytes(b"PK\x03\x04 and no more")


def half_appended(run: RunDir, name: str, line: Mapping[str, Any]) -> None:
    """A line of a log without its end."""
    text = json.dumps(line)
    with (run.path / name).open("a", encoding="utf-8") as file:
        file.write(text[: len(text) // 2])


def half_removed(folder: Path, **_: Any) -> None:
    """A folder that has lost some of its files."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file())[:2]:
        file.unlink()


def untouched(*_: Any) -> None:
    """Dead before anything is done."""


@contextmanager
def watched(places: Places) -> Iterator[None]:
    """Files are touched by way of `places`."""
    with pytest.MonkeyPatch.context() as patch:
        for changed in (
            places.wrap(torch, "save", half_saved), places.wrap(RunDir, "_append", half_appended),
            places.wrap(shutil, "rmtree", half_removed), places.wrap(os, "fsync", untouched),
            places.wrap(os, "truncate", untouched), places.wrap(Path, "rename", untouched),
            places.wrap(Path, "replace", untouched),
        ):  # fmt: skip
            patch.setattr(*changed)
        yield


def start(program: str, folder: Path, model: Path, places: Places) -> Path:
    """The program in a folder, from where it stands; `Killed` where `places` says so."""
    main, changes = PROGRAMS[program]
    rows = [Prompt(prompt=prompt(f"say {n}"), id=str(n), group=str(n)) for n in range(6)]
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(map(to_line, rows)), encoding="utf-8")
    pairs = write_pairs(folder / "pairs.jsonl")
    inputs = {
        "model": model, "pairs": pairs, "test": pairs, "prompts": folder / "prompts.jsonl",
        "demonstrations": write_demonstrations(folder / "shown.jsonl"),
    }  # fmt: skip
    path = workdir(folder / "run", program, {**EVERY, **changes}, inputs)
    made: list[rl.Setting] = []
    set_up = rl.set_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "set_up", lambda run: made.append(set_up(run)) or made[-1])
        try:
            with watched(places):
                run_program(main, path)
        finally:
            for scorer in made[0].scoring.scorers if made else ():
                scorer.close()
    return path


def outcome(path: Path) -> dict[str, bytes]:
    """All that a later stage reads, and what would be left lying about."""
    found = {name: (path / name).read_bytes() for name in ("metrics.jsonl", "journal.jsonl", "result.json")}
    found |= {str(f.relative_to(path)): f.read_bytes() for f in path.glob("model/**/*") if f.is_file()}
    return found | {path.name: b"" for path in path.rglob("*.unfinished")}


@pytest.mark.parametrize("stride", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_dies_anywhere_ends_as_one_that_did_not(tmp_path: Path, program: str, stride: int) -> None:
    model, whole = save_policy(tmp_path / "model"), Places()
    wanted = outcome(start(program, tmp_path / "whole", model, whole))
    assert whole.count > 40, "there is something to be killed at"
    for fatal in range(stride, whole.count + 1, stride):
        folder = tmp_path / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        with pytest.raises(Killed):
            start(program, folder, model, Places(fatal))
        # inputs.* differ by their folder alone, and stand in no output.
        assert outcome(start(program, folder, model, Places())) == wanted, f"killed at place {fatal}"
