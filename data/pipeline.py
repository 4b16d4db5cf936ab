"""The validate stage as one function: sources in, canonical files and a result out, or a DataError.

Two passes over the data (intake, emit), then the checks of the data set as a whole. The page of the data docs
is written in every case, so that a refusal of the whole can be read row by row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from data.card import render_card
from data.checks import Refusal
from data.config import PARTS, DataParams
from data.docs import render_docs
from data.emit import (
    DEMONSTRATIONS,
    FEEDBACK,
    PAIRS,
    PROMPTS_EVAL,
    PROMPTS_TRAIN,
    RECORD_FILES,
    STEPS,
    Emitted,
    Emitter,
)
from data.errors import DataError
from data.expectations import Check, check_files
from data.intake import Intake, Quarantine, Report, SourceCount, sources
from data.readers import label_of, source_digest

QUARANTINE, CARD = "quarantine.jsonl", "card.md"
OUTPUTS = (*RECORD_FILES, QUARANTINE, CARD)
"""All files that the stage publishes beside result.json."""


def run(
    params: DataParams, seed: int, out: Path, docs: Path, report: Report = lambda step, total, unit: None
) -> dict[str, JsonValue]:
    """Validate the sources of `params` into OUTPUTS in `out`; returns what result.json holds.

    `docs` gets index.html and a copy of the quarantine, on failure too. `report` hears of the sources read.
    """
    out.mkdir(parents=True, exist_ok=True)
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "index.html").unlink(missing_ok=True)
    intake = Intake(out / "spool.partial")
    quarantine = Quarantine(intake.counts)
    emitted = Emitted()
    checks: list[Check] = []
    failure: str | None = "the stage was interrupted"
    try:
        with quarantine.writing(out / QUARANTINE):
            intake.read(params, quarantine, report)
            _gate_intake(intake, params, quarantine)
            emitted = Emitter(intake, params, seed, quarantine).write(out)
            _gate_evaluation(intake, emitted, params)
            total = len(sources(params))
            report(total, total, "sources")
        checks = check_files(out, params)
        _gate_checks(checks)
        failure = None
    except DataError as error:
        failure = f"{error} (rows and reasons: {docs / 'index.html'})"
        raise DataError(failure) from error
    finally:
        intake.spool.unlink(missing_ok=True)
        parts = {name.removesuffix(".jsonl"): emitted.rows[name] for name in RECORD_FILES}
        page = render_docs("Plumbline: data", failure, intake.counts, quarantine.examples, parts, checks)
        (docs / "index.html").write_text(page, encoding="utf-8", newline="\n")
        (docs / QUARANTINE).write_bytes((out / QUARANTINE).read_bytes())
    inputs = {label_of(Path(source)): source_digest(source) for _, source in sources(params)}
    card = render_card(params, seed, intake, emitted, checks, inputs)
    (out / CARD).write_text(card, encoding="utf-8", newline="\n")
    return _result(intake, emitted, checks, inputs, out)


def _gate_intake(intake: Intake, params: DataParams, quarantine: Quarantine) -> None:
    """Stop on too many faults, too few pairs, or annotators who disagree too much."""
    total = intake.totals()
    worst = "; ".join(str(row) for row in _commonest(quarantine, total)[:3])
    share = total.faults / total.rows
    if share > params.max_quarantine_share:
        raise DataError(
            f"{total.faults} of {total.rows} rows are faulty ({share:.1%}), at most "
            f"{params.max_quarantine_share:.1%} may be (data.max_quarantine_share). {worst}. "
            "Repair the rows, name the columns in data.columns, or raise the bound"
        )
    pairs = intake.pair_groups.total()
    if pairs < params.min_pairs:
        why = f" Refused, for example: {worst}." if worst else ""
        others = ", ".join(f"{n} {kind}" for kind, n in sorted(total.kept.items()) if kind != "preference")
        why += f" Kept were besides: {others}." if others else ""
        if intake.notices:
            (file, message), seen = max(intake.notices.items(), key=lambda item: item[1].rows)
            why += f" Noticed in {file}, {seen.rows} times: {message}."
        raise DataError(
            f"{pairs} preference pairs were kept, the floor is {params.min_pairs} (data.min_pairs).{why} "
            "Give more pairs, or lower the bound (0 admits data without pairs)"
        )
    if not total.kept.total():
        raise DataError(f"none of {total.rows} rows was kept. {worst}. Give rows of a known format")
    wanted = params.min_annotator_agreement
    if wanted is not None:
        mean = intake.judgements.summary()["mean"]
        if not isinstance(mean, float) or mean < wanted:
            found = "no pair was judged more than once" if mean is None else f"it is {mean}"
            raise DataError(
                f"data.min_annotator_agreement: the mean agreement must be at least {wanted}, but "
                f"{found}; have the disputed pairs judged again, or lower the bound (null: no bound)"
            )


def _gate_evaluation(intake: Intake, emitted: Emitted, params: DataParams) -> None:
    """Stop when prompts for the evaluation were named and every one of them is trained on."""
    if params.eval_prompts and not emitted.rows[PROMPTS_EVAL]:
        raise DataError(
            f"data.eval_prompts: none of {len(intake.eval_groups)} prompt groups is left, as all of them "
            "have pairs or steps too; name prompts that the pairs do not have, or set data.eval_prompts to "
            "[] (then the test part's prompts are asked)"
        )


def _gate_checks(checks: Sequence[Check]) -> None:
    if not checks:
        raise DataError(
            "no check of the data set was evaluated, so nothing is known of it; report this as a fault"
        )
    failed = [check for check in checks if not check.passed]
    if failed:
        names = "; ".join(
            f"{check.table}: {check.what} ({check.column or 'rows'}: found {check.error or check.observed}, "
            f"bound {check.bound})"
            for check in failed
        )
        raise DataError(f"{len(failed)} of {len(checks)} checks of the data set failed: {names}")


def _commonest(quarantine: Quarantine, total: SourceCount) -> list[Refusal]:
    """One refused row of each reason, the most frequent reason first."""
    ordered = sorted(quarantine.examples, key=lambda reason: (-total.reasons[reason], reason))
    return [quarantine.examples[reason][0] for reason in ordered]


def _result(
    intake: Intake, emitted: Emitted, checks: Sequence[Check], inputs: dict[str, str | None], out: Path
) -> dict[str, JsonValue]:
    total = intake.totals()
    pairs: dict[str, JsonValue] = {part: emitted.rows[PAIRS[part]] for part in PARTS}
    prompts: dict[str, JsonValue] = {part: len(emitted.prompts[part]) for part in PARTS}
    prompts |= {"optimize": emitted.rows[PROMPTS_TRAIN], "evaluate": emitted.rows[PROMPTS_EVAL]}
    failed = sum(not check.passed for check in checks)
    return {
        "status": "validated",
        "rows_in": total.rows,
        "rows_kept": total.kept.total(),
        "rows_refused": total.refused,
        "reasons": dict(sorted(total.reasons.items())),
        "files": {file: count.to_json() for file, count in sorted(intake.counts.items())},
        "inputs": dict(sorted(inputs.items())),
        "notices": [
            {"file": file, "message": message, "rows": seen.rows, "lines": list(seen.lines)}
            for (file, message), seen in sorted(intake.notices.items())
        ],
        "pairs": pairs,
        "prompts": prompts,
        "slices": dict(sorted(emitted.slices.items())),
        "demonstrations": emitted.rows[DEMONSTRATIONS],
        "demonstrations_from": emitted.demonstrations_from,
        "feedback": emitted.rows[FEEDBACK],
        "step_labels": {part: emitted.rows[name] for part, name in STEPS.items()},
        "disputed": emitted.disputed,
        "multi_turn": emitted.multi_turn,
        "length_baseline": {
            **emitted.characters.summary(),
            "words": emitted.words.summary(),
        },
        "agreement": intake.judgements.summary(),
        "checks": {"evaluated": len(checks), "failed": failed},
        "digests": {name: _sha256(out / name) for name in OUTPUTS},
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
