"""The command line: help, exit codes, one block for a failure."""

from __future__ import annotations

import errno
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app, main
from tests.conftest import ROOT
from tests.flows.conftest import command

COMMANDS = sorted(command.callback.__name__ for command in app.registered_commands if command.callback)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the project's parameters and DAG, nothing run yet."""
    folder = tmp_path / "mon projet é"
    folder.mkdir()
    (folder / ".dvc").mkdir()
    for name in ("dvc.yaml", "params.yaml", ".dvc/config"):
        (folder / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert f"Example: plumbline {name}" in shown.output


def test_help_lists_all_commands_and_exit_codes_and_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert cpu < 1.5, f"{cpu:.2f} s of CPU: something heavy is imported for help"
    wanted = {
        "run",
        "status",
        "report",
        "lineage",
        "reproduce",
        "promote",
        "rollback",
        "doctor",
        "sweep",
        "ui",
    }
    assert wanted <= set(COMMANDS) <= set(re.findall(r"[a-z]+", done.stdout))
    assert "3 not promoted, 10 configuration" in " ".join(done.stdout.split())


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, flows.cli; print([m for m in ('torch', 'prefect', 'mlflow', 'dvc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_usage_is_2(project: Path) -> None:
    assert command(project, "run", "--no-such-option").returncode == 2
    assert command(project, "promote", "3").returncode == 2  # --reason is missing


def test_outside_of_a_project(tmp_path: Path) -> None:
    done = command(tmp_path, "status")
    assert done.returncode == 10
    assert "change into the project folder" in done.stderr


def test_a_wrong_key_is_one_block_without_traceback(project: Path) -> None:
    before = (project / "params.yaml").read_bytes()
    done = command(project, "run", "--set", "optimize.stepz=3")
    assert done.returncode == 10
    assert done.stderr.startswith("plumbline: configuration\n")
    assert "did you mean 'steps'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert (project / "params.yaml").read_bytes() == before
    assert "Traceback" in command(project, "--debug", "run", "--set", "optimize.stepz=3").stderr


def test_a_missing_file_is_told_before_anything_is_written(project: Path) -> None:
    before = (project / "params.yaml").read_bytes()
    done = command(project, "run", "--data", "nowhere.jsonl")
    assert done.returncode == 10
    assert "nowhere.jsonl: there is no such file" in done.stderr
    assert (project / "params.yaml").read_bytes() == before


def test_params_writes_and_shows(project: Path) -> None:
    done = command(project, "params", "--set", "seed=7", "--set", "optimize.steps=3")
    assert done.returncode == 0
    assert "changed seed, optimize.steps" in done.stdout
    assert "\nseed: 7\n" in "\n" + done.stdout.split("nothing", 1)[-1]
    assert "# " in (project / "params.yaml").read_text(encoding="utf-8")  # comments survive


def test_data_shows_a_card_or_says_what_is_wrong(project: Path) -> None:
    rows = [{"prompt": f"Question {n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)]
    (project / "é.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    good = command(project, "data", "é.jsonl", "--set", "min_pairs=10", "--set", "min_part=2")
    assert good.returncode == 0, good.stderr
    assert "kept 40 of 40 rows" in good.stdout
    assert good.stdout.startswith("reading é.jsonl ...")
    (project / "bad.jsonl").write_text('{"prompt": "x"\n', encoding="utf-8")
    bad = command(project, "data", "bad.jsonl")
    assert bad.returncode == 11
    assert "bad.jsonl" in bad.stderr
    assert not (project / "data" / "stages").exists()


def test_nothing_to_report_before_the_first_run(project: Path) -> None:
    done = command(project, "report")
    assert done.returncode == 11
    assert "nothing has run here yet" in done.stderr


def test_a_bare_name_that_is_no_file_is_told_at_once(project: Path) -> None:
    for words in (("data", "nosuch"), ("run", "--data", "nosuch")):
        begun = time.monotonic()
        done = command(project, *words)
        assert (done.returncode, "there is no such file or folder" in done.stderr) == (10, True)
        assert time.monotonic() - begun < 20


def test_a_run_asks_for_its_inputs_before_anything_is_started(project: Path) -> None:
    before = (project / "params.yaml").read_bytes()
    wrong = ("--set", "data.files=[data/nosuch.jsonl]", "--set", "model.source=./nomodel")
    done = command(project, "run", *wrong)
    assert done.returncode == 11, done.stdout + done.stderr
    assert "data/nosuch.jsonl: no such file" in done.stderr
    assert "./nomodel: no such file" in done.stderr
    assert not (project / ".plumbline" / "prefect").exists()
    assert (project / "params.yaml").read_bytes() == before  # as a --data that is not there leaves it
    told = command(project, "params", *wrong)
    assert "data/nosuch.jsonl: no such file" in told.stdout
    refused = command(project, "run", "--wait", "-5")
    assert refused.returncode == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jsonl", '{"prompt": "x"}\n', "a file that is no model"),
        ("bad.gguf", "GGML", "does not begin as a GGUF file"),
        ("bad/config.json", "{}", "without weights"),
        ("bad/model.safetensors", "", "without config.json"),
        ("", "", "gguf:nosuchpackage: the package 'nosuchpackage' is not installed; install it"),
    ],
)
def test_a_model_that_is_none_is_told_before_anything_is_started(
    project: Path, name: str, content: str, said: str
) -> None:
    if name:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(content, encoding="utf-8")
    (project / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    before = (project / "params.yaml").read_bytes()
    model = name.partition("/")[0] or "gguf:nosuchpackage"
    done = command(project, "run", "--data", "rows.jsonl", "--model", model)
    assert done.returncode == 10, done.stdout + done.stderr
    assert said in done.stderr
    assert done.stderr.count("params.yaml") == 1
    assert (project / "params.yaml").read_bytes() == before


@pytest.mark.parametrize("words", [("run", "--data", ""), ("run", "--profile", " "), ("data", "")])
def test_an_empty_value_is_wrong_usage(project: Path, words: tuple[str, ...]) -> None:
    before = (project / "params.yaml").read_bytes()
    done = command(project, *words)
    assert (done.returncode, "it is empty" in done.stderr) == (2, True)
    assert (project / "params.yaml").read_bytes() == before


@pytest.mark.parametrize("text", ["", "seed: 0\n"])
def test_keys_that_dvc_would_miss_are_told_before_anything_is_started(project: Path, text: str) -> None:
    (project / "params.yaml").write_text(text, encoding="utf-8")
    done = command(project, "run")
    assert done.returncode == 10
    assert "params.yaml: optimize: the key is missing, and dvc.yaml names it" in done.stderr
    assert ("params.yaml: seed: " in done.stderr) is not bool(text)
    assert not (project / ".plumbline" / "prefect").exists()


@pytest.mark.parametrize(
    "words",
    [("lineage",), ("promote", "1", "--reason", "x"), ("rollback", "--reason", "x"), ("reproduce", "1")],
)
def test_nothing_registered_is_told_without_mlflow(project: Path, words: tuple[str, ...]) -> None:
    done = command(project, *words)
    assert (done.returncode, "no version is registered" in done.stderr) == (11, True)
    assert not (project / ".plumbline" / "mlflow.db").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_the_disk_refuses_has_a_remedy(
    project: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "no", "/somewhere/file")

    monkeypatch.setattr("flows.views.show_status", full)
    monkeypatch.setattr(sys, "argv", ["plumbline", "-C", str(project), "status"])
    monkeypatch.setenv("PLUMBLINE_PROJECT", str(project))
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 13
    said = capsys.readouterr().err
    assert "/somewhere/file" in said
    assert "OSError" not in said
