"""From a version to the files it came from, and from a row to the versions that it touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.errors import DataError
from tasks.history import chain, forward
from tasks.places import digest
from tasks.recorder import Ending
from tasks.registry import Registry
from tests.tasks.test_lineage import recorded

DATA = "data/stages/sources/data.json"
PAIRS, PROMPTS = "data/stages/validate/pairs_train.jsonl", "data/stages/validate/prompts_train.jsonl"
SFT, OPTIMIZED = "data/stages/sft/model", "data/stages/optimize/model"


@pytest.fixture
def followed(project: Path) -> Path:
    """Runs of a small pipeline: sources, validate, sft and optimize, and a registered version."""

    def keep(name: str, text: str) -> tuple[Path, str]:
        file = project / "kept" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file, name

    outside = keep("data.json", json.dumps({"files": {"rows.jsonl": "f1"}, "prompts": {}}))
    pairs = keep(
        "pairs_train.jsonl", json.dumps({"id": "abc123", "source": "rows.jsonl:7", "chosen": "yes"}) + "\n"
    )
    prompts = keep("prompts_train.jsonl", json.dumps({"id": "def456", "source": "rows.jsonl:8"}) + "\n")
    recorded(project, Ending("FINISHED", outputs={DATA: "d1"}, files=[outside]), stage="sources")
    written = Ending("FINISHED", outputs={PAIRS: "p1", PROMPTS: "p2"}, files=[pairs, prompts])
    recorded(project, written, stage="validate", inputs={DATA: "d1"})
    recorded(project, Ending("FINISHED", outputs={SFT: "m1"}), inputs={PAIRS: "p1"})
    model = project / "model"
    model.mkdir()
    (model / "weights").write_text("w")
    ending = Ending("FINISHED", outputs={OPTIMIZED: digest(model)})
    run_id = recorded(project, ending, stage="optimize", inputs={SFT: "m1", PROMPTS: "p2", "elsewhere": "x"})
    registry = Registry(project, "tiny")
    tags = {"plumbline.baseline": "m1", "plumbline.win_rate": "0.6383928571428571"}
    tags["plumbline.interval"] = "[0.5461, 0.721]"
    version = registry.register(digest(model), model, run_id, tags)
    registry.promote(version, None, "kim", "all gates passed")
    return project


def test_the_chain_ends_at_the_input_files(followed: Path) -> None:
    links = chain(followed, "tiny", "@champion")
    assert links[0].what == "tiny version 1"
    assert links[0].detail == "champion; win rate 0.638 [0.546, 0.721] against m1; all gates passed"
    by_name = {link.what: link for link in links}
    assert (by_name["rows.jsonl"].digest, by_name["rows.jsonl"].detail) == ("f1", "input file (files)")
    assert by_name[SFT].detail == "stage sft"
    assert by_name["elsewhere"].run_id is None
    depths = [link.depth for link in links if link.what in (SFT, PAIRS, DATA, "rows.jsonl")]
    assert depths[:4] == [1, 2, 3, 4]
    # What was shown once is not walked again.
    assert sum(link.what == "rows.jsonl" for link in links) == 1


def test_a_row_is_followed_to_the_versions_it_touched(followed: Path) -> None:
    (touch,) = forward(followed, "tiny", "abc123")
    assert (touch.file, touch.stage, touch.versions) == ("pairs_train.jsonl", "sft", ("1",))
    (touch,) = forward(followed, "tiny", "rows.jsonl:8")
    assert (touch.row, touch.stage, touch.versions) == ("def456", "optimize", ("1",))
    assert forward(followed, "tiny", "abc") == []


def test_a_store_without_runs_is_said(project: Path) -> None:
    with pytest.raises(DataError, match="no validate run is recorded"):
        forward(project, "tiny", "abc123")
