"""The first pass over all sources: every item is kept or refused, counted, and tallied for what comes later.

Text is never gathered in memory. Kept records go to a spool file, refused rows to the quarantine; what is
held are digests and counts, a fixed amount a row however long the row is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pydantic import JsonValue

from data.agreement import Judgements
from data.checks import EXCLUSIONS, Record, Refusal
from data.config import DataParams
from data.errors import DataError
from data.readers import Notice, Purpose, label_of, read_source
from data.records import (
    Demonstration,
    Feedback,
    Preference,
    Prompt,
    StepLabels,
    canonical_json,
    digest,
    prompt_text,
    to_line,
)

KINDS: dict[str, type[Record]] = {
    "preference": Preference,
    "demonstration": Demonstration,
    "feedback": Feedback,
    "steplabels": StepLabels,
    "prompt": Prompt,
}
_EXAMPLES = 5
_LINES = 15
_REPORT_ROWS = 2000

Report = Callable[[int, int, str], None]
"""Hears how far the work is: step, total (0: unknown), unit."""


@dataclass
class SourceCount:
    """What became of the items of one file."""

    rows: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)

    @property
    def refused(self) -> int:
        return self.reasons.total()

    @property
    def faults(self) -> int:
        return sum(count for reason, count in self.reasons.items() if reason not in EXCLUSIONS)

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "rows_in": self.rows,
            "rows_kept": self.kept.total(),
            "rows_refused": self.refused,
            "kept": dict(sorted(self.kept.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "formats": dict(sorted(self.formats.items())),
        }


@dataclass
class NoticeCount:
    """In how many rows something odd was seen, and the lines of the first few."""

    rows: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        self.rows += 1
        if len(self.lines) < _LINES:
            self.lines.append(line)


@dataclass
class Quarantine:
    """Writes refused rows with their reasons and counts them."""

    counts: dict[str, SourceCount]
    examples: dict[str, list[Refusal]] = field(default_factory=dict)
    """The first few rows of each reason, for people."""
    _stream: TextIO | None = None

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Open the quarantine file for the time of the passes."""
        with path.open("w", encoding="utf-8", newline="\n") as self._stream:
            yield

    def add(self, refusal: Refusal) -> None:
        assert self._stream is not None, "opened by writing()"
        self._stream.write(canonical_json(refusal.to_json()) + "\n")
        self.counts.setdefault(refusal.file, SourceCount()).reasons[refusal.reason] += 1
        shown = self.examples.setdefault(refusal.reason, [])
        if len(shown) < _EXAMPLES:
            shown.append(refusal)


@dataclass
class Intake:
    """What the first pass leaves behind."""

    spool: Path
    counts: dict[str, SourceCount] = field(default_factory=dict)
    pair_groups: Counter[str] = field(default_factory=Counter)
    """Pairs of each prompt group that has any."""
    step_groups: set[str] = field(default_factory=set)
    """Groups of the prompts whose answers have labelled steps."""
    eval_groups: set[str] = field(default_factory=set)
    """Groups of the prompts from data.eval_prompts."""
    prompt_ids: set[str] = field(default_factory=set)
    """Ids of the prompts that stand in the data on their own, outside data.eval_prompts."""
    judgements: Judgements = field(default_factory=Judgements)
    answers: Counter[str] = field(default_factory=Counter)
    """Votes for minus votes against an answer, by `answer_key`."""
    notices: dict[tuple[str, str], NoticeCount] = field(default_factory=dict)
    """Odd things in kept rows, by file and message."""
    _seen: set[int] = field(default_factory=set)

    def read(
        self,
        params: DataParams,
        quarantine: Quarantine,
        report: Report = lambda step, total, unit: None,
    ) -> None:
        """Read all sources; `report` hears of each before it is read, and now and then of the rows."""
        wanted = sources(params)
        with self.spool.open("w", encoding="utf-8", newline="\n") as spool:
            for number, (purpose, source) in enumerate(wanted):
                report(number, len(wanted), "sources")
                seen = 0
                for shape, item in read_source(source, params, purpose):
                    seen += self._add(shape, item, purpose, spool, quarantine)
                    if seen and seen % _REPORT_ROWS == 0:
                        report(seen, 0, f"rows of {label_of(Path(source))}")
                if not seen:
                    raise DataError(
                        f"data.{purpose}: {source} has no rows, and nothing would pass every later check, "
                        "so it stops here: give a file with rows or take it out of the list"
                    )

    def _add(
        self, shape: str, item: Record | Refusal | Notice, purpose: Purpose, spool: TextIO, out: Quarantine
    ) -> bool:
        """Whether it was a row."""
        if isinstance(item, Notice):
            self.notices.setdefault((item.file, item.message), NoticeCount()).add(item.line)
            return False
        file = item.file if isinstance(item, Refusal) else item.source.rpartition(":")[0]
        count = self.counts.setdefault(file, SourceCount())
        count.rows += 1
        if shape:
            count.formats[shape] += 1
        if isinstance(item, Refusal):
            out.add(item)
            return True
        key = int(digest(purpose if purpose == "eval_prompts" else "", item.id), 16)
        if key in self._seen:
            message = f"the same {name_of(item)} was read before; one copy is kept"
            out.add(refusal_of(item, "duplicate", message))
            return True
        self._seen.add(key)
        count.kept[name_of(item)] += 1
        self._tally(item, purpose)
        spool.write(f"{purpose}\t{name_of(item)}\t{to_line(item)}")
        return True

    def _tally(self, record: Record, purpose: Purpose) -> None:
        if isinstance(record, Preference):
            self.pair_groups[record.group] += 1
            self.judgements.add(record)
            given, against = record.votes or (1, 0)
            self.answers[answer_key(record, record.chosen)] += given - against
            self.answers[answer_key(record, record.rejected)] -= given - against
        elif purpose == "eval_prompts":
            self.eval_groups.add(record.group)
        elif isinstance(record, Prompt):
            self.prompt_ids.add(record.id)
        elif isinstance(record, StepLabels):
            self.step_groups.add(record.group)

    def records(self) -> Iterator[tuple[Purpose, Record]]:
        """The kept records again, in the order in which they were read."""
        with self.spool.open(encoding="utf-8", newline="\n") as spool:
            for line in spool:
                purpose, kind, text = line.split("\t", 2)
                yield _purpose(purpose), KINDS[kind].model_validate_json(text)

    def totals(self) -> SourceCount:
        """The sum over all files."""
        total = SourceCount()
        for count in self.counts.values():
            total.rows += count.rows
            total.kept.update(count.kept)
            total.reasons.update(count.reasons)
        return total


def sources(params: DataParams) -> list[tuple[Purpose, str]]:
    """All sources of the parameters, each with what it is for."""
    return [
        *(("files", source) for source in params.files),
        *(("prompts", source) for source in params.prompts),
        *(("eval_prompts", source) for source in params.eval_prompts),
    ]


def name_of(record: Record) -> str:
    """The kind of a record, as files and counts name it."""
    return type(record).__name__.lower()


def answer_key(record: Preference, answer: str) -> str:
    """Key of an answer under its prompt."""
    return digest(prompt_text(record.prompt), answer)


def refusal_of(record: Record, reason: str, message: str) -> Refusal:
    """A refusal of a record that had been read without fault."""
    file, _, line = record.source.rpartition(":")
    last = record.prompt[-1].content
    return Refusal(file, int(line), "prompt", reason, message, json.dumps(last[:80], ensure_ascii=False))


def _purpose(name: str) -> Purpose:
    assert name in ("files", "prompts", "eval_prompts")
    return name  # type: ignore[return-value]
