"""A folder of records: the files that are read are the files that are digested."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.config import DataParams
from data.errors import DataError
from data.readers import files_in, source_digest
from flows.inputs import files
from tasks.places import digest
from tests.data.samples import pair, write_jsonl


def test_hidden_files_of_a_folder_are_neither_read_nor_digested(tmp_path: Path) -> None:
    shown = tmp_path / "below" / "b.jsonl"
    for name in ("below/b.jsonl", ".hidden.jsonl", ".cache/c.jsonl", "below/.ipynb_checkpoints/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, [pair(prompt=name)])
        known = (files_in(str(tmp_path)), source_digest(str(tmp_path)), digest(tmp_path))
        if name == "below/b.jsonl":
            first = known
        assert known == first
        assert known[0] == [shown]
    shown.unlink()
    with pytest.raises(DataError, match="hidden ones are not read"):
        files_in(str(tmp_path))
    (said,) = files(tmp_path.parent, DataParams(files=(tmp_path.name,), eval_prompts=()))
    assert said.verdict == "broken"
