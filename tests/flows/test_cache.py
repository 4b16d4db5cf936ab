"""Files of data/stages that were edited in place, and with them DVC's cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flows import cache, dvc
from flows.stages import Outcome, Work
from tasks.publish import link_or_copy
from tasks.store import artifacts
from tests.flows.conftest import again, plan, ran

pytestmark = pytest.mark.slow
OUT = Path("data", "stages", "a", "result.json")


def run(project: Path, stage: str = "a") -> Outcome:
    return Work(project, 20).run(stage, lambda line: None, lambda status: None, poll=0.1)


@pytest.fixture
def linked(fake_project: Path) -> Path:
    """Stage a has run, its output is a hard link into the cache, and that was looked at once."""
    dvc.check(["config", "cache.type", "hardlink,copy"], fake_project)
    plan(fake_project, a={"value": 7})
    assert run(fake_project).state == "done"
    assert (fake_project / OUT).stat().st_nlink == 2
    assert cache.mend(fake_project) == []
    return fake_project


def edit(file: Path, text: str = "edited") -> None:
    """In place, mode and all as before: what root can do, and `vim` with `:w!`."""
    file.chmod(0o644)
    file.write_text(text)
    file.chmod(0o444)


def value(project: Path) -> object:
    return json.loads((project / OUT).read_text())["value"]


def test_a_damaged_output_is_told_dropped_and_made_again(linked: Path) -> None:
    kept = artifacts(linked) / "1" / "run" / "artifacts" / "result.json"
    link_or_copy(linked / OUT, kept)
    edit(linked / OUT)
    said = cache.mend(linked)
    assert len(said) == 1
    assert "data/stages/a/result.json: it was changed after stage a had made it" in said[0]
    assert said[0].endswith("a runs again")
    assert not kept.exists()  # nobody takes it for what the run had kept
    assert cache.mend(linked) == []
    assert run(linked).state == "done"
    assert value(linked) == 7
    assert cache.mend(linked) == []
    assert json.loads(kept.read_text())["value"] == 7


def test_finished_work_that_is_the_same_file_is_dropped_and_other_work_stays(linked: Path) -> None:
    work = linked / ".plumbline" / "work" / "a"
    link_or_copy(linked / OUT, work / "old" / "out" / "result.json")
    (work / "old" / "out" / "published.json").write_text('{"names": ["result.json"]}')
    (work / "new" / "checkpoints").mkdir(parents=True)
    edit(linked / OUT)
    assert len(cache.mend(linked)) == 1
    assert [folder.name for folder in work.iterdir()] == ["new"]


def test_what_a_remote_has_is_fetched_instead(linked: Path) -> None:
    dvc.check(["remote", "add", "-d", "local", "../remote"], linked)
    dvc.check(["push"], linked)
    (linked / "log.txt").unlink()
    edit(linked / OUT)
    said = cache.mend(linked)
    assert said[0].endswith("fetched again from the remote")
    assert run(linked).state == "restored"
    assert (value(linked), ran(linked)) == (7, [])


def test_a_damaged_output_of_an_older_run_is_not_restored(linked: Path) -> None:
    old = linked / "kept-by-a-link.json"
    os.link(linked / OUT, old)
    again(linked, seed=1)
    assert run(linked).state == "done"
    edit(old)
    again(linked, seed=0)
    plan(linked, a={"value": 7})
    assert run(linked).state == "done"
    assert ran(linked) == ["a start", "a end"]
    assert value(linked) == 7


def test_only_what_looks_other_than_before_is_read(linked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = cache.hashlib.file_digest

    def watched(stream: object, kind: object) -> object:
        read.append(Path(stream.name).name)  # type: ignore[attr-defined]
        return digest(stream, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(cache.hashlib, "file_digest", watched)
    assert (cache.mend(linked), read) == ([], [])
    os.utime(linked / OUT)
    assert cache.mend(linked) == []
    assert len(read) == 1
    edit(linked / OUT)
    assert len(cache.mend(linked)) == 1


def test_a_broken_memory_means_a_look_at_everything(linked: Path) -> None:
    (linked / ".plumbline" / "cache-check.json").write_text("[")
    assert cache.mend(linked) == []
    edit(linked / OUT)
    (linked / ".plumbline" / "cache-check.json").write_text('{"seen": 3}')
    assert len(cache.mend(linked)) == 1


def test_a_damaged_listing_is_found_too(linked: Path) -> None:
    listing = next((linked / ".dvc" / "cache" / "files" / "md5").rglob("*.dir"))
    edit(listing, "[")
    assert "data/stages/a: it was changed" in cache.mend(linked)[0]
    assert run(linked).good
    assert dvc.check(["status", "a"], linked).strip().endswith("up to date.")
