"""The report appears for every ending, offline, and shows the numbers of the outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tasks.places import read_json, stage_folder, write_json
from tasks.plots import draw_all
from tasks.promote import Evidence, PromoteParams, decide, decision
from tasks.report import build, headline, summary
from tests.tasks.test_promote import GOOD


def outputs(project: Path) -> None:
    """Results of a whole run."""
    for stage, result in GOOD.items():
        write_json(stage_folder(project, stage) / "result.json", result)
    gates = decide(Evidence(params=PromoteParams(), **GOOD))
    write_json(stage_folder(project, "promote") / "decision.json", decision(gates, "c", "b", False))
    registered = {"registered": True, "alias": "champion", "candidate": "c", "reason": "all gates passed"}
    write_json(stage_folder(project, "register") / "register.json", registered)
    lines = [
        json.dumps({"step": n, "reward": n / 10, "kl": n / 50, "loss": 1 / n}) + "\n" for n in range(1, 9)
    ]
    (stage_folder(project, "optimize") / "metrics.jsonl").write_text("".join(lines))
    bins = [{"confidence": 0.6, "accuracy": 0.55, "n": 20}, {"confidence": 0.9, "accuracy": 0.8, "n": 12}]
    calibrated = {**GOOD["reward"], "calibration": {"ece": 0.05, "bins": bins}}
    write_json(stage_folder(project, "reward") / "result.json", calibrated)
    slices = [{"slice": "a<b", "n": 30, "win_rate": 0.6, "interval": [0.4, 0.8], "worse": False}]
    write_json(stage_folder(project, "evaluate") / "result.json", {**GOOD["evaluate"], "slices": slices})
    sample = {
        "id": "1",
        "prompt": [{"role": "user", "content": "<script>alert(1)</script> | pipe"}],
        "candidate": {"text": "yes", "score": 1.0},
        "champion": {"text": "no", "score": 0.5},
    }
    (stage_folder(project, "evaluate") / "samples.jsonl").write_text(json.dumps(sample) + "\n")


def test_line_separators_in_an_answer_end_no_row(tmp_path: Path) -> None:
    outputs(tmp_path)
    file = stage_folder(tmp_path, "evaluate") / "samples.jsonl"
    sample = json.loads(file.read_text(encoding="utf-8"))
    sample["candidate"]["text"] = "one\u0085two\u2028three"
    file.write_text(json.dumps(sample, ensure_ascii=False) + "\n", encoding="utf-8")
    assert "three" in build(tmp_path).read_text(encoding="utf-8")


def test_a_page_that_needs_no_network_and_runs_no_foreign_text(tmp_path: Path) -> None:
    outputs(tmp_path)
    page = build(tmp_path).read_text(encoding="utf-8")
    assert page.count("<figure>") == 5
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', re.sub(r"xmlns:?\w*=\"[^\"]*\"", "", page))
    assert build(tmp_path).read_text(encoding="utf-8") == page
    text = (tmp_path / ".plumbline" / "reports" / "report.md").read_text(encoding="utf-8")
    assert "| win rate | 0.620 [0.530, 0.700] |" in text
    assert "\\| pipe" in text


def test_the_summary_has_the_rows_of_a_run(tmp_path: Path) -> None:
    outputs(tmp_path)
    rows = {row.label: row for row in summary(tmp_path, version="3")}
    assert rows["reward model accuracy"].value == "0.700 [0.600, 0.800]"
    assert rows["gate: win rate"].value == "passed"
    assert rows["gate: win rate"].detail.startswith("0.620; [0.530, 0.700]; n = 120; bound 0.500")
    assert (rows["decision"].value, rows["registered version"].value) == ("promoted", "3")


def test_a_run_that_ended_early_is_reported_too(tmp_path: Path) -> None:
    assert summary(tmp_path)[-2].value == "none"
    outputs(tmp_path)
    reason = "the reward model is not good enough: chance"
    for stage in ("optimize", "evaluate"):
        write_json(stage_folder(tmp_path, stage) / "result.json", {"status": "not_run", "reason": reason})
    rows = {row.label: row for row in summary(tmp_path)}
    assert rows["win rate"].value == "-"
    assert rows["win rate"].detail == f"not run: {reason}"
    assert "not run: the reward model" in build(tmp_path).read_text(encoding="utf-8")


def test_the_headline_says_what_came_out_and_what_to_try(tmp_path: Path) -> None:
    outputs(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    assert headline(tmp_path) == ["Promoted: all gates passed"]
    assert "<strong>Promoted: all gates passed</strong>" in build(tmp_path).read_text(encoding="utf-8")
    result = stage_folder(tmp_path, "evaluate") / "result.json"
    weak = {**read_json(result), "win_rate": 0.45, "interval": [0.36, 0.54]}
    write_json(result, weak)
    gates = decide(Evidence(params=PromoteParams(), **{**GOOD, "evaluate": weak}))
    write_json(stage_folder(tmp_path, "promote") / "decision.json", decision(gates, "c", "b", False))
    kept = {"registered": False, "alias": None, "candidate": "c", "reason": "win rate below its bound"}
    write_json(stage_folder(tmp_path, "register") / "register.json", kept)
    said = headline(tmp_path)
    assert said[0] == "Not promoted: win rate below its bound"
    assert any("Try: " in line for line in said[1:])
    text = build(tmp_path).with_name("report.md").read_text(encoding="utf-8")
    assert text.startswith("# Pipeline report\n\n**Not promoted: win rate below its bound**\n\n- ")


def test_every_axis_of_the_plots_has_a_name(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": 1.0, "reward": 0.1, "judge": 0.2, "kl": 0.3} for n in (1, 2)]
    for stage in ("sft", "optimize"):
        folder = stage_folder(tmp_path, stage)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_json(folder / "result.json", {"status": "trained"})
    part = {"slice": "advice", "n": 20, "win_rate": 0.6, "interval": [0.5, 0.7]}
    write_json(stage_folder(tmp_path, "evaluate") / "result.json", {"slices": [part]})
    drawn = {plot.caption: plot.svg for plot in draw_all(tmp_path)}
    names = {
        "Reward during optimisation": ("step", "score of an answer"),
        "KL to the SFT model during optimisation": ("step", "nats an answer"),
        "Loss: sft": ("step", "loss"),
        "Loss: optimize": ("step", "loss"),
        "Win rate by slice, with interval": ("win rate", "slice (prompts)"),
    }
    assert drawn.keys() == names.keys()
    for caption, axes in names.items():
        for name in axes:
            assert f">{name}</text>" in drawn[caption], (caption, name)
