"""What a person reads while stages run, where there is no terminal to draw bars on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.screen import Screen, described


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ({"step": 3, "total": 8, "unit": "step"}, "step 3 of 8"),
        ({"step": 4000, "total": 0, "unit": "rows of a.jsonl"}, "4000 rows of a.jsonl"),
        ({"step": 0, "total": 0, "unit": "step"}, "working"),
        (None, "working"),
    ],
)
def test_progress_in_words(progress: object, words: str) -> None:
    assert described({"progress": progress, "metrics": {}})[2] == words


def test_no_line_is_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("flows.screen.time.monotonic", lambda: now[0])
    page = io.StringIO()
    with Screen(Console(file=page, width=80)) as screen:
        screen.started("sft")
        for _ in range(90):
            now[0] += 1.0
            screen.status("sft", {"progress": {"step": 3, "total": 8, "unit": "step"}})
    said = page.getvalue().splitlines()
    assert said == [
        "sft: started",
        "sft: step 3 of 8 (1 s)",
        "sft: step 3 of 8 (32 s)",
        "sft: step 3 of 8 (63 s)",
    ]
