"""Outputs are complete or absent, and cost no second copy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from data.errors import DataError, InfrastructureError
from tasks.places import digest, files_below, read_json, root, write_json
from tasks.publish import check_writable, dvc_digest, link_tree, publish, tidy


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"abc")
    (folder / "result.json").write_text("{}")
    return folder


def test_an_output_appears_whole_and_replaces_the_old_one(tmp_path: Path, work: Path) -> None:
    target = publish(tmp_path, "sft", work, ["result.json"])
    publish(tmp_path, "sft", work, ["result.json", "model"])
    assert files_below(target) == ["model/weights", "result.json"]
    assert (target / "model" / "weights").samefile(work / "model" / "weights")
    assert [item.name for item in target.parent.iterdir()] == ["sft"]


def test_nothing_appears_when_a_file_is_missing(tmp_path: Path, work: Path) -> None:
    publish(tmp_path, "sft", work, ["result.json"])
    with pytest.raises(
        InfrastructureError, match=r"metrics.jsonl: the training program ended without writing it"
    ):
        publish(tmp_path, "sft", work, ["result.json", "metrics.jsonl"])
    assert files_below(tmp_path / "data" / "stages" / "sft") == ["result.json"]


def test_a_copy_where_links_do_not_work(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    link_tree(work, tmp_path / "copy")
    assert digest(tmp_path / "copy") == digest(work)


def test_an_unwritable_output_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: object, **named: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(InfrastructureError, match="Read-only file system"):
        check_writable(tmp_path)


def test_dvc_digest_is_the_one_that_dvc_writes(tmp_path: Path) -> None:
    # Taken from the dvc.lock that DVC 3.67 wrote for this folder.
    (tmp_path / "m").mkdir()
    (tmp_path / "x").write_text("hello" * 1000)
    (tmp_path / "m" / "y").write_text("z" * 5000)
    assert dvc_digest(tmp_path, ["x", "m"]) == "44184cf4b2a4626610cdcbabdc59d90b.dir"


def test_tidy_keeps_work_that_the_lock_does_not_have(project: Path) -> None:
    work = project / ".plumbline" / "work" / "sft" / "abc"
    write_json(work / "result.json", {})
    publish(project, "sft", work, ["result.json"])
    lock = project / "dvc.lock"
    entry = "stages:\n  sft:\n    outs:\n    - path: data/stages/sft\n      md5: {}\n"
    lock.write_text(entry.format("0000.dir"))
    assert tidy(project) == []
    lock.write_text(entry.format(dvc_digest(work, ["result.json"])))
    assert tidy(project) == ["sft"]
    lock.write_text("stages: [broken")
    assert tidy(project) == []


def test_the_digest_of_a_folder_is_the_trainers(tmp_path: Path, work: Path) -> None:
    from training.models import digest as trainers

    assert digest(work) == trainers(work)
    before = digest(work)
    (work / "model" / "weights").rename(work / "model" / "weight")
    assert digest(work) != before


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.json: the file is missing; run the stage"):
        read_json(tmp_path / "nothing.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(DataError, match="holds a list"):
        read_json(tmp_path / "list.json")
    (tmp_path / "half.json").write_text(json.dumps({"a": 1})[:-2])
    with pytest.raises(DataError, match="not valid JSON"):
        read_json(tmp_path / "half.json")
    with pytest.raises(ValueError, match="neither this folder nor one above"):
        root(Path("/"))


@pytest.mark.parametrize(("there", "missing"), [("dvc.yaml", "params.yaml"), ("params.yaml", "dvc.yaml")])
def test_half_a_project_is_told_with_what_is_missing(tmp_path: Path, there: str, missing: str) -> None:
    (tmp_path / there).write_text("")
    (tmp_path / "below").mkdir()
    with pytest.raises(
        ValueError, match=f"{there} is there, {missing} is not; restore it with .git checkout"
    ):
        root(tmp_path / "below")
    (tmp_path / missing).write_text("")
    assert root(tmp_path / "below") == tmp_path
