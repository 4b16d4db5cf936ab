"""`plumbline doctor --run`: the table, the headline, the exit codes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from data.errors import DataError
from flows.cli import app
from flows.diagnose import diagnose
from tests.tasks.constructed import write_run


def shown(project: Path, width: int = 80) -> tuple[int, str]:
    text = io.StringIO()
    code = diagnose(project, Console(file=text, width=width, highlight=False))
    return code, text.getvalue()


def test_the_headline_comes_first_and_its_command_stands_on_one_line(tmp_path: Path) -> None:
    gamed = [1.0 - 0.2 * n for n in range(12)]
    write_run(tmp_path, {"optimize:judge": gamed, "evaluate.kl": 99.0, "reward.calibration.ece": 0.12})
    code, text = shown(tmp_path)
    assert code == 3
    first, also = (
        text.index("Cause: the proxy is over-optimised"),
        text.index("Also: the candidate is too far"),
    )
    assert first < also
    command = "plumbline run --set optimize.beta=0.1 --set reward.members=3 --set"
    assert any(line.strip().startswith(command) for line in text.splitlines())
    assert "suspicious" in text and "optimize/metrics.jsonl" in text


def test_the_table_fits_into_80_columns(tmp_path: Path) -> None:
    write_run(tmp_path, {"sft.stop_share": None})
    code, text = shown(tmp_path)
    assert max(map(len, text.splitlines())) <= 80
    assert code == 0
    assert "No cause found." in text
    assert "unknown" in text


def test_a_promoted_run_is_0_with_its_weak_points(tmp_path: Path) -> None:
    crowned = {"promote.promote": True, "register": {"registered": True, "alias": "champion"}}
    write_run(tmp_path, crowned)
    assert "The candidate was promoted." in shown(tmp_path)[1]
    other = tmp_path / "other"
    other.mkdir()
    write_run(other, {**crowned, "validate.pairs.train": 10})
    code, text = shown(other)
    assert code == 0
    assert "was promoted. Weak points" in text and "too few preference pairs" in text


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (None, "`register` has not carried that out"),
        ({"registered": True, "alias": "challenger", "reason": "all gates passed"}, "it is challenger"),
        ({"registered": True, "alias": None, "reason": "these weights were rolled back"}, "rolled back"),
    ],
)
def test_gates_that_passed_are_no_promotion_yet(
    tmp_path: Path, register: dict[str, object] | None, said: str
) -> None:
    changes: dict[str, object] = {"promote.promote": True, "validate.pairs.train": 10}
    write_run(tmp_path, changes if register is None else {**changes, "register": register})
    code, text = shown(tmp_path)
    assert code == 3
    assert "was promoted" not in text and said in text
    assert text.index("All gates passed, but") < text.index("Cause: too few preference pairs")


def test_without_a_run_it_is_an_error_of_data(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("{}\n")
    with pytest.raises(DataError, match="no stage has left a result"):
        shown(tmp_path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, {"judge.interval": [0.4, 0.6]})
    monkeypatch.setenv("PLUMBLINE_PROJECT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--run"])
    assert done.exit_code == 3
    assert "Cause: the judge is no better than chance" in done.output
    assert CliRunner().invoke(app, ["doctor", "--run", "--profile", "tiny"]).exit_code == 2
    help_text = " ".join(CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "plumbline doctor --run" in help_text and "3 a cause found" in help_text
