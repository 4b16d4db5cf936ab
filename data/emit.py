"""The second pass: kept records become the files of the stage, each in the part of its prompt group.

No prompt group of a held-out part (judge, validation, test, evaluation) reaches a file that a policy learns
from; a record that would carry one there is refused with its reason, and counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from data.agreement import LengthBaseline
from data.checks import Record
from data.config import PARTS, DataParams, Part
from data.intake import Intake, Quarantine, answer_key, name_of, refusal_of
from data.records import (
    Demonstration,
    Feedback,
    Preference,
    Prompt,
    StepLabels,
    digest,
    prompt_text,
    to_line,
)
from data.splits import assign, position, train_or_validation

PAIRS: dict[Part, str] = {part: f"pairs_{part}.jsonl" for part in PARTS}
DEMONSTRATIONS, FEEDBACK = "demonstrations.jsonl", "feedback.jsonl"
STEPS: dict[Part, str] = {"train": "steps_train.jsonl", "validation": "steps_validation.jsonl"}
PROMPTS_TRAIN, PROMPTS_EVAL = "prompts_train.jsonl", "prompts_eval.jsonl"
RECORD_FILES = (*PAIRS.values(), *STEPS.values(), DEMONSTRATIONS, FEEDBACK, PROMPTS_TRAIN, PROMPTS_EVAL)
LABELS = ("annotator", "style", "dimension", "error_type", "topic")


@dataclass
class Emitted:
    """What was written."""

    rows: Counter[str] = field(default_factory=Counter)
    """Records in each file."""
    prompts: dict[Part, set[int]] = field(default_factory=lambda: {part: set() for part in PARTS})
    """Ids of the distinct prompts of the pairs in each part."""
    slices: Counter[str] = field(default_factory=Counter)
    """Evaluation prompts by slice."""
    demonstrations_from: str = "demonstrations"
    """Where they come from: demonstrations, chosen answers, or approved feedback."""
    characters: LengthBaseline = field(default_factory=LengthBaseline)
    words: LengthBaseline = field(default_factory=LengthBaseline)
    labels: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in LABELS})
    """Pairs by value of each label that rows may carry."""
    disputed: int = 0
    multi_turn: int = 0


class Emitter:
    """Writes RECORD_FILES from an intake."""

    def __init__(self, intake: Intake, params: DataParams, seed: int, quarantine: Quarantine) -> None:
        self.intake = intake
        self.params = params
        self.seed = seed
        self.quarantine = quarantine
        self.parts = assign(intake.pair_groups, params, seed)
        self.paired = bool(self.parts)
        # A process reward model has no judge's part: steps without pairs only train it and test it.
        self.parts |= train_or_validation(intake.step_groups - set(self.parts), params, seed)
        self.eval_groups = intake.eval_groups - set(self.parts)
        self.result = Emitted()
        self.written: dict[str, set[int]] = {name: set() for name in RECORD_FILES}
        self.streams: dict[str, TextIO] = {}
        if intake.totals().kept["demonstration"] == 0:
            self.result.demonstrations_from = "chosen" if self.paired else "feedback"
        self.best = self._best_pairs() if self.result.demonstrations_from == "chosen" else set()

    def write(self, out: Path) -> Emitted:
        with ExitStack() as stack:
            for name in RECORD_FILES:
                stream = (out / name).open("w", encoding="utf-8", newline="\n")
                self.streams[name] = stack.enter_context(stream)
            for purpose, record in self.intake.records():
                if purpose == "eval_prompts":
                    assert isinstance(record, Prompt)
                    self._evaluation(record)
                elif isinstance(record, Preference):
                    self._pair(record)
                elif isinstance(record, StepLabels):
                    self._steps(record)
                else:
                    self._other(record)
        return self.result

    def _evaluation(self, prompt: Prompt) -> None:
        part = self.parts.get(prompt.group)
        if part is not None:
            self._refuse(
                prompt,
                f"the evaluation prompt's group has pairs or steps in the {part} part; ask something else",
            )
            return
        self._put(PROMPTS_EVAL, prompt)

    def _pair(self, pair: Preference) -> None:
        part = self.parts[pair.group]
        given, against = self.intake.judgements.of(pair)
        shared = given / (given + against) if given + against > 1 else None
        disputed = pair.disputed or (given > 0 and against > 0)
        pair = pair.model_copy(update={"agreement": shared, "disputed": disputed})
        self._put(PAIRS[part], pair)
        self._measure(pair)
        self.result.prompts[part].add(int(_prompt_id(pair), 16))
        if part == "train":
            self._put_prompt(PROMPTS_TRAIN, pair)
            if pair.id in self.best:
                self._put(DEMONSTRATIONS, _demonstration(pair, pair.chosen))
        elif part == "test" and not self.params.eval_prompts:
            self._put_prompt(PROMPTS_EVAL, pair)

    def _steps(self, record: StepLabels) -> None:
        part = self.parts[record.group]
        if part not in STEPS:
            self._refuse(record, f"the prompt's group has pairs in the held-out {part} part")
            return
        self._put(STEPS[part], record)
        if part == "train":
            self._put_prompt(PROMPTS_TRAIN, record)

    def _other(self, record: Demonstration | Feedback | Prompt) -> None:
        part = self.parts.get(record.group)
        if record.group in self.eval_groups:
            self._refuse(record, "the prompt's group is among the evaluation prompts")
        elif part not in (None, "train"):
            self._refuse(record, f"the prompt's group has pairs or steps in the held-out {part} part")
        elif self._is_held_out(record.group):
            self._put_prompt(PROMPTS_EVAL, record)
        else:
            self._train(record)

    def _train(self, record: Demonstration | Feedback | Prompt) -> None:
        if isinstance(record, Prompt):
            self._put(PROMPTS_TRAIN, record)
            return
        if not self.paired:  # With pairs, rollouts start from the prompts that the reward model knows.
            self._put_prompt(PROMPTS_TRAIN, record)
        if isinstance(record, Demonstration):
            self._put(DEMONSTRATIONS, record)
            return
        self._put(FEEDBACK, record)
        if record.label and self.result.demonstrations_from == "feedback":
            self._put(DEMONSTRATIONS, _demonstration(record, record.answer))

    def _is_held_out(self, group: str) -> bool:
        """Without pairs and without evaluation prompts, the test share of all groups is the evaluation."""
        if self.paired or self.params.eval_prompts:
            return False
        return position(group, self.seed) >= 1.0 - self.params.splits.test

    def _put(self, name: str, record: Record) -> None:
        """Write a record once: several rows may share a prompt or an answer."""
        key = int(record.id, 16)
        if key in self.written[name]:
            return
        self.written[name].add(key)
        self.streams[name].write(to_line(record))
        self.result.rows[name] += 1
        if name == PROMPTS_EVAL and isinstance(record, Prompt):
            self.result.slices[record.slice] += 1

    def _put_prompt(self, name: str, record: Record) -> None:
        """Write the prompt of a record, unless the data has it as a record of its own, with more to say."""
        if isinstance(record, Prompt):
            self._put(name, record)
            return
        prompt_id = _prompt_id(record)
        if prompt_id not in self.intake.prompt_ids:
            reference = record.reference if isinstance(record, Demonstration) else None
            part = (record.dimension if isinstance(record, Preference) else None) or "all"
            prompt = Prompt(
                prompt=record.prompt,
                id=prompt_id,
                group=record.group,
                source=record.source,
                slice=part,
                reference=reference,
            )
            self._put(name, prompt)

    def _measure(self, pair: Preference) -> None:
        self.result.characters.add(len(pair.chosen), len(pair.rejected))
        self.result.words.add(len(pair.chosen.split()), len(pair.rejected.split()))
        self.result.disputed += pair.disputed
        self.result.multi_turn += len([turn for turn in pair.prompt if turn.role == "user"]) > 1
        for name in LABELS:
            value = getattr(pair, name)
            if value is not None:
                self.result.labels[name][value] += 1

    def _refuse(self, record: Record, message: str) -> None:
        refusal = refusal_of(record, "overlap", message)
        self.intake.counts[refusal.file].kept[name_of(record)] -= 1
        self.quarantine.add(refusal)

    def _best_pairs(self) -> set[str]:
        """Ids of the train pairs whose chosen answers become demonstrations.

        The answers of a prompt are ordered by votes for them minus votes against them over all pairs, then by
        their place in the data; an answer with more votes against than for is none to imitate.
        """
        ranked: dict[str, dict[str, tuple[int, int, str]]] = {}
        for index, (_, record) in enumerate(self.intake.records()):
            if isinstance(record, Preference) and self.parts[record.group] == "train":
                key = answer_key(record, record.chosen)
                net = self.intake.answers[key]
                if net >= 0:
                    ranked.setdefault(_prompt_id(record), {}).setdefault(key, (-net, index, record.id))
        limit = self.params.demonstrations_per_prompt or None
        return {pair for answers in ranked.values() for _, _, pair in sorted(answers.values())[:limit]}


def _prompt_id(record: Record) -> str:
    return digest("prompt", prompt_text(record.prompt))


def _demonstration(record: Preference | Feedback, answer: str) -> Demonstration:
    return Demonstration(
        prompt=record.prompt,
        id=digest("demonstration", prompt_text(record.prompt), answer),
        group=record.group,
        source=record.source,
        answer=answer,
    )
