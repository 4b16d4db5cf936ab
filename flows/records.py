"""What the doctor sees of the records before a run: that the files are there and hold pairs, how many tokens
they are, and that they are tokenised as every stage expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from data.checks import Record, Refusal
from data.config import DataParams
from data.errors import ConfigurationError, DataError
from data.readers import Notice, read_source
from data.records import Preference
from flows.finding import Finding
from tasks.params import Params
from tasks.places import read_json, stage_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ITEMS = 20_000
"""Items of a source that are read; more would take a minute."""
SAMPLE = 500
"""Pairs whose tokens are counted."""
CUT = 0.05
"""Share of pairs over a limit that is worth a look."""


@dataclass
class Seen:
    """Counts of the items of data.files, and the first pairs."""

    kinds: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    first: str = ""
    pairs: list[Preference] = field(default_factory=list)
    whole: bool = True


def read(project: Path, data: DataParams) -> Seen:
    """The first ITEMS of each local source of data.files, read as the validate stage reads them."""
    seen = Seen()
    for name in data.files:
        path = project / name
        if not path.exists():
            continue
        items = read_source(str(path), data, "files")
        for _, item in islice(items, ITEMS):
            _count(seen, item)
        seen.whole = seen.whole and next(items, None) is None
    return seen


def _count(seen: Seen, item: Record | Refusal | Notice) -> None:
    if isinstance(item, Notice):
        return
    if isinstance(item, Refusal):
        seen.refused += 1
        seen.first = seen.first or f"{item.file}:{item.line}: {item.message}"
        return
    seen.kinds[type(item).__name__.lower()] += 1
    if isinstance(item, Preference) and len(seen.pairs) < SAMPLE:
        seen.pairs.append(item)


def counted(seen: Seen, data: DataParams) -> Finding:
    """Number of pairs against data.min_pairs, refused rows against data.max_quarantine_share."""
    kept = seen.kinds.total()
    pairs = seen.kinds["preference"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(seen.kinds.items())) or "nothing"
    text = f"{kinds}; {seen.refused} rows refused" + ("" if seen.whole else f" (first {ITEMS} items)")
    share = seen.refused / max(kept + seen.refused, 1)
    if seen.whole and pairs < data.min_pairs:
        remedy = f"data.min_pairs asks for {data.min_pairs} pairs; add some, or lower it"
        return Finding("records", "broken", f"{text}; {seen.first}".rstrip("; "), remedy, "data")
    if share > data.max_quarantine_share:
        remedy = f"more than data.max_quarantine_share ({data.max_quarantine_share:g}); `plumbline validate`"
        return Finding("records", "look", f"{text}; first: {seen.first}", remedy)
    return Finding("records", "fine", text)


def tokenizer_folder(project: Path, params: Params) -> Path | None:
    """Where this model's tokenizer is without making anything: the base stage's output, when it is of the
    same source, else a local model folder.
    """
    made = stage_folder(project, "base")
    if (made / "model" / "tokenizer.json").is_file() and (made / "result.json").is_file():
        try:
            same = read_json(made / "result.json").get("source") == params.model.source
        except DataError:
            same = False
        if same:
            return made / "model"
    local = project / params.model.source
    named = (local / "tokenizer.json").is_file() or (local / "tokenizer_config.json").is_file()
    return local if named and params.model.chat_template is None else None


def tokens(params: Params, tok: PreTrainedTokenizerBase, pairs: Sequence[Preference]) -> Iterator[Finding]:
    """Tokenisation as each stage expects it, and the lengths against the limits of the stages."""
    from training import chat

    for pair in pairs[:16]:
        try:
            chat.preflight(tok, pair.prompt, pair.chosen)
        except ConfigurationError as error:
            yield Finding("tokenising", "broken", str(error), "see left")
            return
    yield Finding("tokenising", "fine", f"BOS, prefix and end of turn right in {min(len(pairs), 16)} rows")
    prompts = [len(chat.encode_prompt(tok, pair.prompt)) for pair in pairs]
    answers = [len(chat.encode_answer(tok, pair.chosen)) for pair in pairs]
    wholes = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    seen = f"prompt {_middle(prompts)}, longest {max(prompts)}; "
    seen += f"answer {_middle(answers)}, longest {max(answers)}"
    over = []
    for key, limit, lengths in (
        ("sft.max_prompt", params.sft.max_prompt, prompts),
        ("sft.max_length", params.sft.max_length, wholes),
        ("optimize.max_prompt", params.optimize.max_prompt, prompts),
        ("optimize.max_new_tokens", params.optimize.max_new_tokens, answers),
        ("evaluate.max_prompt", params.evaluate.max_prompt, prompts),
    ):
        share = sum(length > limit for length in lengths) / len(lengths)
        if share > CUT:
            over.append(f"{share:.0%} over {key} {limit}")
    if over:
        yield Finding("tokens", "look", f"{seen}; {', '.join(over)}", "raise the limits, or leave it so")
    else:
        yield Finding("tokens", "fine", seen)


def _middle(lengths: Sequence[int]) -> int:
    return sorted(lengths)[len(lengths) // 2]


def templates(project: Path) -> Iterator[Finding]:
    """The chat template's hash through the stages that are done: one template, or scores mean other text."""
    hashes = {}
    for stage in ("base", "sft", "optimize"):
        file = stage_folder(project, stage) / "result.json"
        value = read_json(file).get("template_hash") if file.is_file() else None
        if value is not None:
            hashes[stage] = str(value)
    if len(set(hashes.values())) > 1:
        seen = ", ".join(f"{stage} {value}" for stage, value in hashes.items())
        yield Finding("templates", "look", seen, "differ; `plumbline run` makes the stale stages anew")
    elif hashes:
        yield Finding("templates", "fine", f"the same in {', '.join(hashes)}")
