"""Data docs and card: complete without a network, safe with any text in a row."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from data.checks import Refusal
from data.config import DataParams
from data.docs import render_docs
from data.expectations import Check
from data.intake import SourceCount
from data.pipeline import run
from tests.data.samples import pairs, write_jsonl

EVIL = "<script src='https://x.example/a.js'></script>|`\n&"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    count = SourceCount(rows=3, kept=Counter(preference=2), reasons=Counter(not_text=1))
    refusal = Refusal(EVIL, 3, EVIL, "not_text", EVIL, EVIL)
    check = Check("pairs", EVIL, "Expect", "id", False, EVIL, "3", "min 4")
    page = render_docs(EVIL, EVIL, {EVIL: count}, {"not_text": [refusal]}, {"pairs_train": 2}, [check])
    tags = _Tags()
    tags.feed(page)
    assert tags.open == [] and tags.links == []
    assert tags.seen["script"] == tags.seen["link"] == tags.seen["img"] == 0
    assert not re.search(r"url\(|@import", page)
    assert "Stopped" in page and "1 evaluated, 1 failed" in page


def test_page_and_card_of_a_run(tmp_path: Path) -> None:
    rows = [*pairs(40), {"prompt": EVIL, "chosen": True, "rejected": EVIL}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    run(DataParams(files=(str(source),), min_pairs=1), 3, tmp_path / "out", tmp_path / "docs")
    page = (tmp_path / "docs" / "index.html").read_text("utf-8")
    tags = _Tags()
    tags.feed(page)
    assert tags.seen["script"] == 0 and "accepted" in page and page.count("passed") >= 35
    card = (tmp_path / "out" / "card.md").read_text("utf-8")
    assert "41 rows were read, 40 kept and 1 refused" in card and "seed 3" in card
    assert "| rows.jsonl | 41 | 40 | 1 | preference 41 |" in card
    assert "https://x.example" not in card
