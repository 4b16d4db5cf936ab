"""The data card: what went in, what was kept, how it was split; the same Markdown for the same data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from data.checks import REASONS
from data.config import PARTS, DataParams
from data.emit import LABELS, PAIRS, Emitted
from data.expectations import Check
from data.intake import Intake

_MOST = 20


def render_card(
    params: DataParams,
    seed: int,
    intake: Intake,
    emitted: Emitted,
    checks: Sequence[Check],
    digests: Mapping[str, str | None],
) -> str:
    """The card of a validated data set."""
    total = intake.totals()
    agreement = intake.judgements.summary()
    sections = [
        "# Data card",
        f"{total.rows} rows were read, {total.kept.total()} kept and {total.refused} refused. "
        f"Splits are by prompt group (`group_by: {params.group_by}`, seed {seed}), never by row.",
        "## Sources",
        _table(
            ("file", "rows", "kept", "refused", "formats"),
            (
                (file, count.rows, count.kept.total(), count.refused, _listed(count.formats))
                for file, count in sorted(intake.counts.items())
            ),
        ),
        _table(
            ("source", "SHA-256 of its bytes"),
            ((name, value or "on the hub: see data.hub.revision") for name, value in sorted(digests.items())),
        ),
        "## Refused rows",
        _table(
            ("reason", "rows", "meaning"),
            ((reason, n, REASONS[reason]) for reason, n in _ordered(total.reasons)),
        )
        if total.refused
        else "None.",
        "Each row stands in `quarantine.jsonl` with file, line, field, reason and message.",
        "## Splits",
        _table(
            ("part", "share asked", "pairs", "prompts"),
            (
                (part, getattr(params.splits, part), emitted.rows[PAIRS[part]], len(emitted.prompts[part]))
                for part in PARTS
            ),
        ),
        _table(
            ("file", "records"),
            ((name, n) for name, n in sorted(emitted.rows.items()) if name not in PAIRS.values()),
        ),
        f"Demonstrations come from: {emitted.demonstrations_from}.",
        "## Preferences",
        f"- multi-turn prompts: {emitted.multi_turn} pairs\n"
        f"- disputed: {emitted.disputed} pairs\n"
        f"- judged more than once: {agreement['pairs_judged_more_than_once']} pairs, of which "
        f"{agreement['contradicted_pairs']} contradicted; mean agreement {agreement['mean']}, "
        f"Krippendorff's alpha {agreement['alpha']}\n"
        f"- length alone, in characters: {_length(emitted.characters.summary())}\n"
        f"- length alone, in words: {_length(emitted.words.summary())}",
    ]
    for name in LABELS:
        if emitted.labels[name]:
            rows = ((value, n) for value, n in _ordered(emitted.labels[name]))
            sections.append(_table((name.replace("_", " "), "pairs"), rows))
    sections += ["## Evaluation prompts", _table(("slice", "prompts"), sorted(emitted.slices.items()))]
    failed = sum(not check.passed for check in checks)
    sections += ["## Checks", f"{len(checks)} checks of the data set were evaluated, {failed} failed."]
    if intake.notices:
        sections += ["## Notices", _notices(intake)]
    return "\n\n".join(sections) + "\n"


def _length(summary: Mapping[str, object]) -> str:
    if not summary["n"]:
        return "no pairs"
    return (
        f"the longer answer is chosen in {summary['longer_chosen']:.1%} of {summary['n']} pairs; "
        f'"the {summary["rule"]} answer wins" scores {summary["accuracy"]:.1%}'
    )


def _notices(intake: Intake) -> str:
    lines = []
    for (file, message), seen in sorted(intake.notices.items()):
        shown = ", ".join(map(str, seen.lines)) + (", ..." if seen.rows > len(seen.lines) else "")
        where = f", in {seen.rows} rows (lines {shown})" if any(seen.lines) else ""
        lines.append(f"- {_cell(file)}: {_cell(message)}{where}")
    return "\n".join(lines)


def _ordered(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Most frequent first; the tail of a long list as one row."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) <= _MOST:
        return ordered
    return [*ordered[:_MOST], (f"{len(ordered) - _MOST} others", sum(n for _, n in ordered[_MOST:]))]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(item) for item in line) + " |" for line in lines)


def _cell(value: object) -> str:
    """A value that can not end its cell or row, nor be taken for HTML."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
