"""Where rewards come from: learned models, Python functions and HTTP services, all with typed outcomes.

An outcome is a score, `invalid` (the scorer says that it can't judge this answer), or `error` (it failed). A
failure never becomes a zero: the answer is masked, the failure counted apart from what is invalid, and too
large a share of failures (rewards.error_limit) or of answers without a reward (guards.unjudged) ends the run,
with the first traceback kept. Functions and services are called in a process of their own that is killed at
the time limit (training/worker.py).

    def my_check(prompt: list[dict[str, str]], answer: str, reference: str | None, extra: dict[str, Any])
        -> float | None: ...

`reference` and `extra` are those of the Prompt record; None says invalid. training/verify.py has such checks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from data.errors import ConfigurationError, InfrastructureError
from data.records import Message, Prompt
from training.config import is_service
from training.rewards import PROCESS
from training.steps import score_steps, split_steps
from training.worker import Failed, Worker

if TYPE_CHECKING:
    from training.score import ScoreModel

WINDOW = 256
"""Latest outcomes over which the share of errors is taken: a scorer that breaks late is noticed too."""
LARGEST = 1e15
"""Of a score: advantages square it in float32, which ends at 3e38."""
LEAST = 20
"""Outcomes below which the share is not looked at as such: one failure among four is no 25 %."""


class ScorerFailed(InfrastructureError):
    """A scorer fails more often than `rewards.error_limit` allows: `share` of its latest calls."""

    def __init__(self, message: str, share: float) -> None:
        super().__init__(message)
        self.share = share


@dataclass(frozen=True)
class Answered:
    """An answer to be scored."""

    prompt: Prompt
    text: str
    length: int
    """Tokens, EOS included."""
    finished: bool
    """False: cut at max_new_tokens."""


@dataclass(frozen=True)
class Outcome:
    """What a scorer says of one answer in one dimension."""

    kind: Literal["score", "invalid", "error"]
    value: float = 0.0
    """Meaningful for a score only."""
    message: str = ""
    """Of an error: what happened, with the traceback where there is one."""


class Scorer(Protocol):
    """A source of rewards; `dimensions` name the columns that it gives."""

    name: str
    dimensions: tuple[str, ...]
    tally: Tally

    def score(self, answers: Sequence[Answered]) -> list[tuple[Outcome, ...]]:
        """An outcome for each answer and dimension, in order; never raises for a single answer's sake."""
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...


class Tally:
    """Outcomes of one scorer so far: counted by kind, and the end of the run when too many are errors."""

    def __init__(self, name: str, error_limit: float = 1.0) -> None:
        """`error_limit`: share of the latest outcomes that may be errors; 1 is no limit."""
        self.name, self.limit = name, error_limit
        self.counts: Counter[str] = Counter(score=0, invalid=0, error=0)
        self.first_error = ""
        self._latest: deque[bool] = deque(maxlen=WINDOW)

    def add(self, outcome: Outcome) -> Outcome:
        """Counts an outcome and hands it back; raises when the errors are more than the limit allows."""
        failed = outcome.kind == "error"
        self.counts[outcome.kind] += 1
        self._latest.append(failed)
        if not failed:
            return outcome
        self.first_error = self.first_error or outcome.message
        errors, seen = sum(self._latest), len(self._latest)
        if self.limit < 1 and errors > self.limit * max(seen, LEAST):
            raise ScorerFailed(
                f"scorer {self.name}: {errors} of its last {seen} calls failed ({errors / seen:.0%}); "
                f"rewards.error_limit = {self.limit:g} allows that share (of at least {LEAST}). No failure "
                f"was taken for a score. Mend the scorer or raise the limit. The first failure:\n"
                f"{self.first_error}",
                errors / seen,
            )
        return outcome


def outcome_of(value: object) -> Outcome:
    """A returned value as an outcome: a finite number is a score, None invalid, all else an error."""
    if value is None:
        return Outcome("invalid")
    if isinstance(value, int | float) and abs(value) <= LARGEST:
        return Outcome("score", float(value))
    return Outcome("error", message=f"returned {value!r}; expected a number within +-{LARGEST:g}, or None")


class LearnedScorer:
    """A reward model: text in, with its own tokenizer; several heads are several dimensions.

    A process model's answer is worth the product or the minimum of its steps' chances of being right, as the
    model's own settings say; an answer without a step is worth 0.
    """

    def __init__(
        self,
        name: str,
        dimension: str,
        model: ScoreModel,
        reduce: Callable[[Any], Any],
        error_limit: float = 1.0,
    ) -> None:
        """`reduce`: over an ensemble's members, [M, N] to [N] (training.rewards.ENSEMBLES)."""
        self.name = name
        self.dimensions: tuple[str, ...] = model.heads or (dimension,)
        self.tally = Tally(name, error_limit)
        self._model, self._reduce = model, reduce

    def score(self, answers: Sequence[Answered]) -> list[tuple[Outcome, ...]]:
        """See `Scorer`."""
        if not answers:
            return []
        members = self._members([(answer.prompt.prompt, answer.text) for answer in answers])
        columns = [self._reduce(members[:, :, head]).tolist() for head in range(members.shape[2])]
        return [
            tuple(self.tally.add(outcome_of(value)) for value in row) for row in zip(*columns, strict=True)
        ]

    def _members(self, rows: Sequence[tuple[Sequence[Message], str]]) -> Float[Tensor, "M N heads"]:
        process = self._model.process
        if not process:
            return self._model.score_members(rows)
        steps = [(prompt, split_steps(text, process["split"])) for prompt, text in rows]
        scores, mask = score_steps(self._model, steps)
        reduced = torch.stack([PROCESS[process["reduce"]](score, mask) for score in scores])
        return torch.where(mask.any(1), reduced, 0.0)[..., None]

    def close(self) -> None:
        """Nothing runs."""


class _Called:
    """What functions and services share: one call an answer, in a process that can be killed."""

    def __init__(self, name: str, dimension: str, path: str, timeout: float, error_limit: float) -> None:
        self.name = name
        self.dimensions: tuple[str, ...] = (dimension,)
        self.tally = Tally(name, error_limit)
        self._timeout = timeout
        self._worker = Worker(path)

    def _arguments(self, answer: Answered) -> list[Any]:
        raise NotImplementedError

    def score(self, answers: Sequence[Answered]) -> list[tuple[Outcome, ...]]:
        """See `Scorer`."""
        return [(self.tally.add(self._call(answer)),) for answer in answers]

    def _call(self, answer: Answered) -> Outcome:
        try:
            return outcome_of(self._worker.call(self._arguments(answer), self._timeout))
        except Failed as error:
            return Outcome("error", message=str(error))

    def close(self) -> None:
        """Kills the process."""
        self._worker.close()


class FunctionScorer(_Called):
    """A Python callable by dotted path `module:name`; a class is instantiated once."""

    def __init__(
        self, name: str, dimension: str, path: str, timeout: float, error_limit: float = 1.0
    ) -> None:
        super().__init__(name, dimension, path, timeout, error_limit)

    def _arguments(self, answer: Answered) -> list[Any]:
        return [_turns(answer.prompt), answer.text, answer.prompt.reference, answer.prompt.extra]


class HttpScorer(_Called):
    """A service: POST {"prompt", "answer", "reference", "extra"} as JSON, answered by {"score": number or
    null}."""

    def __init__(self, name: str, dimension: str, url: str, timeout: float, error_limit: float = 1.0) -> None:
        # The address may hold a credential, so no message repeats it.
        if not is_service(url):
            raise ConfigurationError(
                f"rewards.scorers: {name}: path must be an http:// or https:// address without a user name"
            )
        super().__init__(name, dimension, "training.worker:post", timeout, error_limit)
        self._url = url

    def _arguments(self, answer: Answered) -> list[Any]:
        prompt = answer.prompt
        body = {"prompt": _turns(prompt), "answer": answer.text, "reference": prompt.reference}
        return [self._url, {**body, "extra": prompt.extra}, self._timeout]


def _turns(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in prompt.prompt]
