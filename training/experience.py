"""From prompts to rewards: the answers of a step with everything that is known of them before a gradient.

Answers of a rank lie in order of prompts, samples in order, as [N, R] with N = prompts * group; score columns
are [N, D], one a dimension. A group never parts over ranks, so group statistics are local; what is taken over
the whole batch goes through `total`, the sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.errors import ConfigurationError
from data.records import Prompt
from training import advantages, rewards
from training.batches import Tree
from training.chat import decode_answer
from training.config_rewards import RewardsParams, ScorerParams
from training.generate import Rollout
from training.score import ScoreModel
from training.scorers import Answered, FunctionScorer, HttpScorer, LearnedScorer, Outcome, Scorer

Total = Callable[[Sequence[float]], list[float]]


@dataclass
class Experience:
    """One rank's answers of one step."""

    prompts: list[Prompt]
    trees: list[Tree]
    answers: list[Answered]
    mask: Bool[Tensor, "N R"]
    rollout_logp: Float[Tensor, "N R"]
    scored: Scored
    group: int
    states: list[Tensor] | None = None
    """Hidden states below the trained layers, a tree (training/trunk.py)."""

    def grouped(self, value: Tensor) -> Tensor:
        """[N] as [P, G]."""
        return value.view(len(self.trees), self.group)


class Scored(NamedTuple):
    """Scores and what became of them."""

    dimensions: tuple[str, ...]
    score: Float[Tensor, "N D"]
    valid: Bool[Tensor, "N D"]
    reward: Float[Tensor, " N"]  # without KL; 0 where unknown
    known: Bool[Tensor, " N"]
    detected: Float[Tensor, " N"]
    repetition: Float[Tensor, " N"]
    judge_directed: Float[Tensor, " N"]
    errors: int
    calls: int
    unknown: int  # answers without a reward
    asked: int  # answers for which one was asked; in dynamic sampling of all groups, the dropped ones too
    first_error: str


FEW_TOKENS = 16.0
"""Where answers are shorter at the start, this counts as typical: a sentence is not padding."""
PER_ANSWER = ("score", "valid", "reward", "known", "detected", "repetition", "judge_directed")
COUNTS = ("errors", "calls", "unknown", "asked")


def summed(parts: Iterable[Scored]) -> dict[str, Any]:
    """The counts of several together."""
    whole = list(parts)
    return {name: sum(getattr(part, name) for part in whole) for name in COUNTS}


@dataclass
class Scoring:
    """The scorers of a run and how their scores become one reward."""

    scorers: list[Scorer]
    params: RewardsParams
    limit: int
    """max_new_tokens: where an answer is cut."""
    total: Total
    typical: float | None = None
    """Mean tokens of an answer in the run's first step; None while that is not known."""
    first_error: str = field(default="")

    def __call__(self, answers: Sequence[Answered], group: int) -> Scored:
        """Scores of some groups of answers, and their rewards."""
        columns: dict[str, list[list[Outcome]]] = {}
        for scorer in self.scorers:
            outcomes = scorer.score(answers)
            for place, dimension in enumerate(scorer.dimensions):
                columns.setdefault(dimension, []).append([row[place] for row in outcomes])
        names = tuple(columns)
        tables = [column_of(columns[name]) for name in names]
        score = torch.stack([table[0] for table in tables], 1)
        valid = torch.stack([table[1] for table in tables], 1)
        flat = [outcome for column in columns.values() for part in column for outcome in part]
        failed = [outcome for outcome in flat if outcome.kind == "error"]
        self.first_error = self.first_error or next((outcome.message for outcome in failed), "")
        faults = [self._faults(answer) for answer in answers]
        detected = torch.tensor([max(fault) for fault in faults])
        reward, known = self._compose(names, score, valid, detected, group)
        reward = self._adjust(answers, reward, known, group)
        repetition = torch.tensor([fault.repetition for fault in faults])
        directed = torch.tensor([fault.judge_directed for fault in faults])
        return Scored(
            names, score, valid, reward, known, detected, repetition, directed, len(failed), len(flat),
            int((~known).sum()), len(answers), self.first_error,
        )  # fmt: skip

    def _faults(self, answer: Answered) -> rewards.Cheating:
        prompt = "\n".join(message.content for message in answer.prompt.prompt)
        factor = self.params.padded_from
        padded = 0.0
        if factor and self.typical is not None:
            padded = rewards.padding(answer.length, max(self.typical, FEW_TOKENS), factor)
        return rewards.cheating(prompt, answer.text, padded=padded)

    def _compose(
        self, names: Sequence[str], score: Tensor, valid: Tensor, detected: Tensor, group: int
    ) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
        weight = torch.tensor(dimension_weights(names, self.params.weights))
        # Of several scorers of one dimension the strictest floor holds.
        floors = dict.fromkeys(names, -math.inf)
        for scorer in self.params.scorers:
            if scorer.floor is not None and scorer.dimension in floors:
                floors[scorer.dimension] = max(floors[scorer.dimension], scorer.floor)
        floor = torch.tensor([floors[name] for name in names])
        known = valid.all(1)
        if self.params.normalise == "group":
            grid = score.view(-1, group, len(names))
            summed = rewards.normalised_sum(grid, known.view(-1, group), weight).flatten()
            return self._whiten(summed, known) - self.params.penalty * detected, known
        if self.params.normalise == "batch":
            score = torch.stack([self._whiten(column, known) for column in score.unbind(1)], 1)
        composed = rewards.compose(
            score, valid, weight, floor, detected, penalty=self.params.penalty, cap=self.params.cap
        )
        return composed.reward, composed.valid

    def _whiten(self, value: Tensor, known: Tensor) -> Tensor:
        summed = advantages.Moments(*self.total(advantages.moments(value, known)))
        mean, std = advantages.mean_std(summed)
        return advantages.whiten(value, known, mean=mean, std=std)

    def _adjust(self, answers: Sequence[Answered], reward: Tensor, known: Tensor, group: int) -> Tensor:
        """Cut answers and long ones pay; an empty answer is never better than the worst of its group."""
        cut = torch.tensor([not answer.finished for answer in answers])
        reward = reward - self.params.missing_eos * cut
        if self.params.overlong_buffer:
            lengths = torch.tensor([answer.length for answer in answers])
            reward = reward + rewards.overlong(lengths, limit=self.limit, buffer=self.params.overlong_buffer)
        empty = torch.tensor([not answer.text.strip() for answer in answers])
        full = torch.where(empty | ~known, math.inf, reward).view(-1, group)
        worst = full.amin(1, keepdim=True).expand_as(full).flatten()
        reward = torch.where(empty, torch.minimum(reward, worst), reward)
        return torch.where(known, reward, 0.0)


def column_of(parts: Sequence[Sequence[Outcome]]) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """One dimension's scores: the mean of its scorers, valid where all of them gave a score."""
    values = torch.tensor([[outcome.value for outcome in part] for part in parts])
    valid = torch.tensor([[outcome.kind == "score" for outcome in part] for part in parts])
    return values.mean(0), valid.all(0)


def dimension_weights(names: Sequence[str], weights: dict[str, float]) -> list[float]:
    """Weights of the dimensions in use, summing to 1; a dimension without one is an error."""
    missing = [name for name in names if name not in weights]
    if missing:
        raise ConfigurationError(
            f"rewards.weights has no weight for {missing}; it has {sorted(weights)}: add one, or name the "
            "scorer's dimension otherwise"
        )
    whole = sum(weights[name] for name in names)
    if whole <= 0:
        raise ConfigurationError(f"rewards.weights of {list(names)} sum to {whole}; expected more than 0")
    return [weights[name] / whole for name in names]


def build_scorers(params: RewardsParams, reward: Path | None) -> list[Scorer]:
    """The scorers that the parameters name; `reward`: the reward stage's model."""
    built = [_scorer(scorer, params, reward) for scorer in params.scorers]
    for scorer, made in zip(params.scorers, built, strict=True):
        if scorer.floor is not None and scorer.dimension not in made.dimensions:
            for each in built:
                each.close()
            raise ConfigurationError(
                f"rewards.scorers: {scorer.name}: its floor is on dimension {scorer.dimension!r}, which is "
                f"none of its model's heads ({', '.join(made.dimensions)}); set dimension to the head that "
                "the floor is for"
            )
    return built


def _scorer(scorer: ScorerParams, params: RewardsParams, reward: Path | None) -> Scorer:
    if scorer.kind == "function":
        return FunctionScorer(scorer.name, scorer.dimension, scorer.path, params.timeout, params.error_limit)
    if scorer.kind == "http":
        return HttpScorer(scorer.name, scorer.dimension, scorer.path, params.timeout, params.error_limit)
    folder = Path(scorer.path) if scorer.path else reward
    if folder is None:
        raise ConfigurationError(
            f"rewards.scorers: {scorer.name}: no path and no inputs.reward; give the model's folder"
        )
    ensemble = rewards.ENSEMBLES[params.ensemble]
    extra = {"lam": params.ensemble_lam} if params.ensemble == "uncertainty" else {}
    return LearnedScorer(
        scorer.name, scorer.dimension, ScoreModel.load(folder),
        lambda members: ensemble(members, **extra), params.error_limit,
    )  # fmt: skip


def answered(tok: PreTrainedTokenizerBase, prompts: Sequence[Prompt], rollout: Rollout) -> list[Answered]:
    """Texts of a rollout's answers, in order of prompts and samples."""
    return [
        Answered(prompt, decode_answer(tok, ids), len(ids), finished)
        for prompt, samples, ends in zip(prompts, rollout.answers, rollout.finished, strict=True)
        for ids, finished in zip(samples, ends, strict=True)
    ]


def gather(
    tok: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    rollout: Rollout,
    scoring: Scoring,
) -> Experience:
    """Rollout, texts and scores as one experience."""
    answers = answered(tok, prompts, rollout)
    group = len(rollout.answers[0])
    trees = [
        Tree(prompt.id, ids, samples)
        for prompt, ids, samples in zip(prompts, encoded, rollout.answers, strict=True)
    ]
    logps = [logp for samples in rollout.logp for logp in samples]
    longest = max(map(len, logps))
    logp = torch.tensor([row + [0.0] * (longest - len(row)) for row in logps])
    mask = torch.arange(longest) < torch.tensor([len(row) for row in logps])[:, None]
    scored = scoring(answers, group)
    mask &= scored.known[:, None]
    return Experience(list(prompts), trees, answers, mask, logp, scored, group, rollout.states)


def join(parts: Sequence[Experience]) -> Experience:
    """Several experiences as one (dynamic sampling)."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.mask.shape[1] for part in parts)

    def wide(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, longest - value.shape[1]))

    last = parts[-1].scored
    whole: dict[str, Any] = {
        name: torch.cat([getattr(part.scored, name) for part in parts]) for name in PER_ANSWER
    }
    scored = last._replace(**whole, **summed(part.scored for part in parts))
    known = [part.states for part in parts if part.states is not None]
    return Experience(
        [prompt for part in parts for prompt in part.prompts],
        [tree for part in parts for tree in part.trees],
        [answer for part in parts for answer in part.answers],
        torch.cat([wide(part.mask) for part in parts]),
        torch.cat([wide(part.rollout_logp) for part in parts]),
        scored,
        parts[0].group,
        [state for states in known for state in states] if len(known) == len(parts) else None,
    )


def select(part: Experience, keep: Sequence[int]) -> Experience:
    """Some prompts of an experience, with their groups."""
    rows = torch.tensor([index * part.group + sample for index in keep for sample in range(part.group)])
    rows = rows.long()
    kept: dict[str, Any] = {name: getattr(part.scored, name)[rows] for name in PER_ANSWER}
    scored = part.scored._replace(**kept)
    return Experience(
        [part.prompts[index] for index in keep],
        [part.trees[index] for index in keep],
        [part.answers[int(row)] for row in rows],
        part.mask[rows],
        part.rollout_logp[rows],
        scored,
        part.group,
        None if part.states is None else [part.states[index] for index in keep],
    )
