"""The programs behind `make evidence` still play their runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.evidence import guard_table, overoptimisation
from training import rl_setting

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs put scorers of their own in place of the run's; afterwards they are the run's again."""
    monkeypatch.setattr(rl_setting, "build_scorers", vars(rl_setting)["build_scorers"])


def test_guards_are_played_on_an_injected_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_table, "STEPS", 2)
    case = guard_table.cases("development")[-1]
    assert len(guard_table.play(case, tmp_path)["history"]) == 2


def test_over_optimisation_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overoptimisation, "STEPS", 2)
    played = overoptimisation.play(11, None, tmp_path)
    assert len(played["steps"]) == 2 and played["reason"] is None
