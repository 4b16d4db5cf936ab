"""Data docs: one HTML page that shows the validation, complete in itself (nothing is loaded from elsewhere).

The library's own pages load their style sheets from content networks and are bare without them, so the
results of its expectations are rendered here, beside the rows that were refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from data.checks import REASONS, Refusal
from data.expectations import Check
from data.intake import SourceCount

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733 }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #d8dee6 }
td { overflow-wrap: anywhere } td.number { text-align: right; font-variant-numeric: tabular-nums }
.passed { color: #176639 } .failed { color: #a61b1b; font-weight: 600 }
.bar { background: #4a78b5; height: .7rem; display: inline-block } code { font-size: .9em }
@media (prefers-color-scheme: dark) {
  body { background: #14191f; color: #d9e0e8 } th, td { border-color: #37424e }
  .passed { color: #6fcf97 } .failed { color: #ff8a80 }
}
"""


def render_docs(
    title: str,
    failure: str | None,
    counts: Mapping[str, SourceCount],
    examples: Mapping[str, Sequence[Refusal]],
    parts: Mapping[str, int],
    checks: Sequence[Check],
) -> str:
    """The page. `failure` is why the stage stopped, None when it did not."""
    verdict = (
        f'<p class="failed">Stopped: {escape(failure)}</p>'
        if failure
        else "<p>The data set was accepted.</p>"
    )
    body = [
        f"<h1>{escape(title)}</h1>",
        verdict,
        "<h2>Sources</h2>",
        _table(
            ("file", "rows", "kept", "refused", "formats"),
            (
                (file, count.rows, count.kept.total(), count.refused, ", ".join(sorted(count.formats)))
                for file, count in sorted(counts.items())
            ),
        ),
        "<h2>Parts</h2>",
        _bars(parts),
        "<h2>Checks</h2>",
        f"<p>{len(checks)} evaluated, {sum(not check.passed for check in checks)} failed.</p>",
        _checks(checks),
        "<h2>Refused rows</h2>",
        *_refused(counts, examples),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _checks(checks: Sequence[Check]) -> str:
    rows = []
    for check in checks:
        word = "passed" if check.passed else "failed"
        cells = (check.table, check.what, check.column, check.expectation, check.bound)
        found = f"{check.observed} {check.error}".strip()
        inner = "".join(f"<td>{escape(cell)}</td>" for cell in (*cells, found))
        rows.append(f'<tr><td class="{word}">{word}</td>{inner}</tr>')
    head = ("", "table", "what it means", "column", "expectation", "bound", "found")
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(rows)}</table>"


def _refused(counts: Mapping[str, SourceCount], examples: Mapping[str, Sequence[Refusal]]) -> Iterable[str]:
    if not examples:
        yield "<p>None.</p>"
    for reason, rows in sorted(examples.items()):
        total = sum(count.reasons[reason] for count in counts.values())
        yield f"<h3><code>{escape(reason)}</code>: {total} rows</h3><p>{escape(REASONS[reason])}</p>"
        yield _table(
            ("file", "line", "field", "message", "value"),
            ((row.file, row.line, row.field, row.message, row.value) for row in rows),
        )


def _bars(parts: Mapping[str, int]) -> str:
    most = max([*parts.values(), 1])
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{n}</td>'
        f'<td><span class="bar" style="width:{20 * n / most:.2f}rem"></span></td></tr>'
        for name, n in parts.items()
    )
    return f"<table>{rows}</table>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"]
    for row in rows:
        cells = (
            f'<td class="number">{cell}</td>' if isinstance(cell, int) else f"<td>{escape(str(cell))}</td>"
            for cell in row
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"
