"""One report of a pipeline run: a self-contained HTML page, the same as Markdown for change requests, rows
for a terminal.

Everything is read from the stages' published outputs, so the report can be made again at any time, also for a
run that a gate ended early. Plots are inlined; nothing is loaded from a network.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.errors import PlumblineError
from tasks.diagnosis import causes, walk
from tasks.evidence import gather, read_lines
from tasks.params import FILE, load
from tasks.places import Json, home, stage_folder, write_text
from tasks.plots import Plot, draw_all
from tasks.registry import peek
from tasks.results import ORDER, document, results
from tasks.status import masked


@dataclass(frozen=True)
class Row:
    """A line of the summary: what, how much, and what it is based on."""

    label: str
    value: str
    detail: str = ""


def summary(project: Path, version: str | None = None) -> list[Row]:
    """The rows that a command ends with."""
    r = results(project)
    rows = [
        Row("rows kept", _n(r["validate"], "rows_kept"), _refused(r["validate"])),
        Row(
            "pairs",
            _parts(r["validate"].get("pairs")),
            "proxy / judge / test of the proxy / test of the judge",
        ),
        _accuracy("reward model accuracy", r["reward"]),
        _accuracy("judge accuracy", r["judge"]),
        Row("reward before and after", _before_after(r["optimize"]), _why(r["optimize"])),
        Row(
            "KL in training",
            _n(r["optimize"], "kl"),
            f"target {_n(r['optimize'], 'kl_target')} nats an answer",
        ),
        Row("win rate", _rate(r["evaluate"]), _counts(r["evaluate"])),
        Row("win rate at equal length", _rate(_part(r["evaluate"], "length_controlled"), "estimate"), ""),
        Row("KL to the SFT model", _n(r["evaluate"], "kl"), "nats an answer"),
    ]
    gates = r["promote"].get("gates")
    for gate in gates if isinstance(gates, list) else []:
        rows.append(
            Row(f"gate: {gate['name']}", "passed" if gate["passed"] else "FAILED", gate_evidence(gate))
        )
    rows.append(Row("decision", *_decision(r)))
    alias = r["register"].get("alias")
    known = version if r["register"] else None
    rows.append(Row("registered version", known or "none", f"alias {alias}" if alias else ""))
    return rows


def gate_evidence(gate: Mapping[str, object]) -> str:
    """Estimate, interval, n and threshold of a gate as one text."""
    parts = []
    if gate.get("estimate") is not None:
        value = gate["estimate"]
        parts.append(f"{value:.0f}" if isinstance(value, float) and value.is_integer() else _number(value))
    ends = gate.get("interval")
    if isinstance(ends, Sequence) and len(ends) == 2:
        parts.append(f"[{_number(ends[0])}, {_number(ends[1])}]")
    if gate.get("n") is not None:
        parts.append(f"n = {gate['n']}")
    if gate.get("threshold") is not None:
        parts.append(f"bound {_number(gate['threshold'])}")
    return "; ".join([*parts, str(gate.get("reason", ""))])


def build(project: Path) -> Path:
    """Write report.html and report.md; returns the page."""
    folder = home(project) / "reports"
    rows = summary(project, registered_version(project))
    said = headline(project)
    tables = _tables(project)
    plots = draw_all(project)
    page = folder / "report.html"
    write_text(page, masked(_html(said, rows, tables, plots)))
    write_text(folder / "report.md", masked(markdown(said, rows, tables)))
    return page


def headline(project: Path) -> list[str]:
    """What came out, in a sentence; where nothing was promoted, the causes found and what to try next."""
    r = results(project)
    decision, reason = _decision(r)
    first = (
        f"{decision[0].upper()}{decision[1:]}: {reason}"
        if decision != "none"
        else f"No decision yet: {reason}"
    )
    if decision == "promoted":
        return [first]
    try:
        found = causes(walk(gather(project)))
    except PlumblineError:  # nothing has run
        return [first]
    lines = [first]
    for answer in found[:3]:
        remedy = f" Try: {answer.remedy.what} ({answer.remedy.command})" if answer.remedy else ""
        lines.append(f"{answer.node.means}: {answer.branch}, {answer.seen}.{remedy}")
    return lines


def registered_version(project: Path) -> str | None:
    """The registry's number for the candidate of the published outputs."""
    candidate = results(project)["register"].get("candidate")
    name = load(project).registry.name if (project / FILE).is_file() else None
    versions = peek(project, name) if name and candidate else []
    return next((version.version for version in versions if version.digest == candidate), None)


def newest(project: Path) -> Path:
    """The report, made again only when an output is younger (register writes its own at every run)."""
    page = home(project) / "reports" / "report.html"
    files = [document(project, stage) for stage in ORDER[:-1]]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return page if page.is_file() and page.stat().st_mtime >= max(times, default=0) else build(project)


@dataclass(frozen=True)
class Table:
    """A titled table of texts."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def _tables(project: Path) -> list[Table]:
    r = results(project)
    tables: list[Table] = []
    slices = r["evaluate"].get("slices")
    if isinstance(slices, list) and slices:
        body = [[str(s["slice"]), str(s["n"]), _rate(s), "worse" if s["worse"] else ""] for s in slices]
        tables.append(Table("Win rate by slice", ("slice", "n", "win rate", ""), body))
    rules = r["evaluate"].get("rules")
    if isinstance(rules, dict):
        body = [
            [rule, _number(share["candidate"]), _number(share["champion"]), str(share["n"])]
            for rule, share in rules.items()
            if isinstance(share, dict)
        ]
        tables.append(Table("Answers that break a rule", ("rule", "candidate", "champion", "n"), body))
    reasons = r["validate"].get("reasons")
    if isinstance(reasons, dict) and reasons:
        body = [[str(reason), str(count)] for reason, count in sorted(reasons.items())]
        tables.append(Table("Refused rows", ("reason", "rows"), body))
    calibrated = [
        [s, _n(r[s], "accuracy"), _n(_part(r[s], "calibration"), "confidence_mean"), _ece(r[s])]
        for s in ("reward", "judge")
        if r[s].get("calibration")
    ]
    if calibrated:
        head = ("", "accuracy", "mean confidence", "expected error")
        tables.append(Table("Calibration", head, calibrated))
    digests = [[s, str(r[s].get("digest"))] for s in ORDER if r[s].get("digest")]
    tables.append(Table("Digests", ("stage", "sha256 of the model"), digests))
    return tables + (_samples(project) if r["evaluate"] else [])


def _samples(project: Path, at_most: int = 12) -> list[Table]:
    file = stage_folder(project, "evaluate") / "samples.jsonl"
    if not file.is_file():
        return []
    rows = read_lines(file)[:at_most]
    body = [
        [
            _cut(_prompt(row.get("prompt"))),
            _cut(row["candidate"].get("text")),
            _cut(row["champion"].get("text")),
            f"{_number(row['candidate'].get('score'))} / {_number(row['champion'].get('score'))}",
        ]
        for row in rows
    ]
    return [Table("Samples", ("prompt", "candidate", "champion", "judge's scores"), body)]


def markdown(said: Sequence[str], rows: Sequence[Row], tables: Sequence[Table]) -> str:
    """The report for a change request; `said` are the lines of its headline."""
    lines = ["# Pipeline report", "", f"**{_cell(said[0])}**", "", *(f"- {_cell(one)}" for one in said[1:])]
    lines += ["", "| | | |", "|---|---|---|"]
    lines += [f"| {_cell(row.label)} | {_cell(row.value)} | {_cell(row.detail)} |" for row in rows]
    for table in tables:
        lines += ["", f"## {table.title}", "", "| " + " | ".join(map(_cell, table.head)) + " |"]
        lines.append("|" + "---|" * len(table.head))
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}
td,th{border-bottom:1px solid #d7dee5;padding:.35rem .6rem;text-align:left;vertical-align:top}
td{overflow-wrap:anywhere}
h1,h2{font-weight:600}
figure{display:inline-block;margin:.5rem;max-width:31rem}
figure svg{width:100%;height:auto}
figcaption{color:#51606e}
.FAILED{color:#b3261e;font-weight:600}
.passed{color:#1b6e3c}
@media(prefers-color-scheme:dark){body{background:#12181f;color:#dbe3ea}td,th{border-color:#33414e}
figure svg{background:#fff}}
"""


def _html(said: Sequence[str], rows: Sequence[Row], tables: Sequence[Table], plots: Sequence[Plot]) -> str:
    def cell(text: str, tag: str = "td") -> str:
        mark = f' class="{text}"' if text in ("passed", "FAILED") else ""
        return f"<{tag}{mark}>{html.escape(text)}</{tag}>"

    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Pipeline report</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style><h1>Pipeline report</h1>",
        f'<p class="said"><strong>{html.escape(said[0])}</strong></p>',
        *(("<ul>", *(f"<li>{html.escape(one)}</li>" for one in said[1:]), "</ul>") if said[1:] else ()),
        "<table>",
        *(f"<tr>{cell(row.label, 'th')}{cell(row.value)}{cell(row.detail)}</tr>" for row in rows),
        "</table>",
        *(
            f"<figure>{plot.svg}<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
            for plot in plots
        ),
    ]
    for table in tables:
        parts += [
            f"<h2>{html.escape(table.title)}</h2><table><tr>",
            *(cell(text, "th") for text in table.head),
        ]
        parts += [
            "</tr>",
            *("<tr>" + "".join(cell(text) for text in row) + "</tr>" for row in table.rows),
            "</table>",
        ]
    return "\n".join([*parts, "</html>\n"])


def _decision(r: Mapping[str, Json]) -> tuple[str, str]:
    if not (r["promote"] and r["register"]):
        left = [stage for stage in ORDER if not r[stage]]
        return "none", f"the pipeline has not reached its end; to come: {', '.join(left)}"
    alias, reason = r["register"].get("alias"), str(r["register"].get("reason", ""))
    if alias == "champion":
        return "promoted", reason
    return ("challenger" if alias else "not promoted"), reason


def _refused(result: Json) -> str:
    return f"{_n(result, 'rows_refused')} refused of {_n(result, 'rows_in')}"


def _parts(pairs: object) -> str:
    if not isinstance(pairs, dict):
        return "-"
    return " / ".join(str(pairs.get(part, 0)) for part in ("train", "judge", "validation", "test"))


def _accuracy(label: str, result: Json) -> Row:
    gate = result.get("gate")
    opened = (
        f"gate {'open' if gate.get('open') else 'closed: ' + str(gate.get('reason'))}"
        if isinstance(gate, dict)
        else ""
    )
    length = result.get("length_baseline")
    detail = f"n = {_n(result, 'n')}; length alone {_number(length)}; {opened}" if result else _why(result)
    return Row(label, _rate(result, "accuracy"), detail)


def _rate(result: Json, key: str = "win_rate") -> str:
    ends = result.get("interval")
    text = _n(result, key)
    if isinstance(ends, list) and len(ends) == 2 and text != "-":
        text += f" [{_number(ends[0])}, {_number(ends[1])}]"
    return text


def _counts(result: Json) -> str:
    if "wins" not in result:
        return _why(result)
    return (
        f"n = {result.get('n')}: {result['wins']} wins, {result.get('ties')} ties, {result.get('losses')} "
        "losses, "
        f"{result.get('failures')} without a verdict"
    )


def _before_after(result: Json) -> str:
    """On the held-out prompts, or, where none were held out, in the first and the last step."""
    pairs = (("reward_before", "reward_after", ""), ("reward_first", "reward_last", " (first and last step)"))
    for before, after, where in pairs:
        if _n(result, before) != "-" and _n(result, after) != "-":
            return f"{_n(result, before)} -> {_n(result, after)}{where}"
    return "-"


def _part(result: Json, key: str) -> Json:
    value = result.get(key)
    return value if isinstance(value, dict) else {}


def _why(result: Json) -> str:
    status, reason = result.get("status"), result.get("reason")
    if status == "not_run":
        return f"not run: {reason}"
    return str(reason) if reason and status != "trained" else ""


def _ece(result: Json) -> str:
    return _n(_part(result, "calibration"), "ece")


def _n(result: Mapping[str, object], key: str) -> str:
    return _number(result.get(key))


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _prompt(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(
            f"{turn.get('role')}: {turn.get('content')}" for turn in value if isinstance(turn, dict)
        )
    return str(value)


def _cut(value: object, limit: int = 400) -> str:
    text = str(value or "")
    return text if len(text) <= limit else text[:limit] + " ..."


def _cell(text: str) -> str:
    return (
        text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>").replace("<script", "&lt;script")
    )
