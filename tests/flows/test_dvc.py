"""DVC's files: comparing locks, mending what a kill left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data.errors import InfrastructureError
from flows import dvc
from tasks.publish import Lock, read_lock

LOCK = """
schema: '2.0'
stages:
  a:
    cmd: python a.py
    deps: [{path: a.py, hash: md5, md5: '11', size: 3}]
    params: {params.yaml: {seed: 0, sft.lr: 0.1}}
    outs: [{path: data/stages/a, hash: md5, md5: '22.dir', size: 3, nfiles: 1}]
"""


def lock_of(folder: Path, text: str) -> dict[str, Lock]:
    (folder / "dvc.lock").write_text(text, encoding="utf-8")
    return read_lock(folder)


def test_equal_locks_differ_in_nothing_whatever_their_order(tmp_path: Path) -> None:
    assert read_lock(tmp_path) == {}
    one = lock_of(tmp_path, LOCK)
    other = lock_of(tmp_path, LOCK.replace("seed: 0, sft.lr: 0.1", "sft.lr: 0.1, seed: 0"))
    assert dvc.differences(one, other) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("'22.dir'", "'23.dir'", "a: outs: data/stages/a: '22.dir' against '23.dir'"),
        ("'11'", "'12'", "a: deps: a.py: '11' against '12'"),
        ("sft.lr: 0.1", "sft.lr: 0.2", "a: params: params.yaml:sft.lr: 0.1 against 0.2"),
        ("python a.py", "python b.py", "a: cmd: 'python a.py' against 'python b.py'"),
        ("  a:", "  b:", "a: only in the first"),
    ],
)
def test_each_difference_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in dvc.differences(lock_of(tmp_path, LOCK), lock_of(tmp_path, LOCK.replace(old, new)))


def test_a_broken_lock_names_file_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"(?s)dvc\.lock: not valid YAML .*git checkout dvc\.lock"):
        lock_of(tmp_path, "stages: [")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- a\n", b"stages: [1]\n", b"stages: {a: 1}\n"])
def test_a_lock_that_dvc_did_not_write_names_file_and_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dvc.lock").write_bytes(content)
    with pytest.raises(InfrastructureError, match=r"(?s)dvc\.lock: .*git checkout dvc\.lock"):
        read_lock(tmp_path)


def test_a_half_written_rwlock_is_removed(tmp_path: Path) -> None:
    file = tmp_path / ".dvc" / "tmp" / "rwlock"
    assert dvc.mend_locks(tmp_path) == []
    file.parent.mkdir(parents=True)
    file.write_text('{"write": {"/x": {"pid"')
    assert "broken by a kill" in dvc.mend_locks(tmp_path)[0]
    assert not file.exists()


def test_entries_of_processes_that_are_gone_or_no_dvc_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)", "dvc repro"]
    with subprocess.Popen(sleeper) as alive:
        try:
            while not psutil.Process(alive.pid).cmdline():  # the kernel sets it a moment after the start
                time.sleep(0.01)
            mine = {"pid": os.getpid(), "cmd": "a reused pid"}
            theirs = {"pid": alive.pid, "cmd": "dvc repro"}
            dead = {"pid": gone.pid, "cmd": "dvc repro"}
            file = tmp_path / ".dvc" / "tmp" / "rwlock"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps({"write": {"/x": mine, "/y": theirs}, "read": {"/z": [dead, theirs]}}))
            assert "2 entries" in dvc.mend_locks(tmp_path)[0]
            assert json.loads(file.read_text()) == {"write": {"/y": theirs}, "read": {"/z": [theirs]}}
            assert dvc.mend_locks(tmp_path) == []
        finally:
            alive.kill()
