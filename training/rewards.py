"""Composition of rewards: dimensions, ensembles, floors, and penalties for answers that play the scorer.

Scores arrive as tensors together with `valid`, False where a scorer failed; a failed score is never read as
0. Detectors look at plain text and return how much of a fault they saw, from 0 to 1.

Deviations from the papers
- GDPO: a dimension that is constant within a group adds zeros; the last whitening, over the batch, is
  `advantages.whiten`.
- A floor is our addition: below it, no other dimension can buy the answer a reward above `cap`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.advantages import grpo


class Composed(NamedTuple):
    reward: Float[Tensor, " N"]  # 0 where not valid: mask it
    valid: Bool[Tensor, " N"]
    floored: Bool[Tensor, " N"]


class Cheating(NamedTuple):
    """Seen faults of one answer, each from 0 (none) to 1."""

    repetition: float
    length: float
    copying: float
    judge_directed: float


# -- dimensions ----------------------------------------------------------------------------------------------


def compose(
    score: Float[Tensor, "N D"],
    valid: Bool[Tensor, "N D"],
    weight: Float[Tensor, " D"],
    floor: Float[Tensor, " D"],
    detected: Float[Tensor, " N"],
    *,
    penalty: float = 0.5,
    cap: float = 0.0,
) -> Composed:
    """sum_d weight_d score_d, at most `cap` if a dimension lies under its floor, minus penalty * detected.

    -inf switches a floor off. An answer is valid when every dimension is.
    """
    known = valid.all(1)
    floored = (valid & (score < floor)).any(1)
    total = (score * weight).sum(1)
    total = torch.where(floored, total.clamp(max=cap), total) - penalty * detected
    return Composed(torch.where(known, total, 0.0), known, floored)


def normalised_sum(
    score: Float[Tensor, "P G D"],
    valid: Bool[Tensor, "P G"],
    weight: Float[Tensor, " D"],
    *,
    epsilon: float = 1e-4,
) -> Float[Tensor, "P G"]:
    """sum_d weight_d * (score_d - group mean) / (group std + epsilon), ddof 1 (GDPO) [2601.05242].

    Normalising before the sum keeps a dimension with a wide range from drowning the others; whiten it.
    """
    columns = [grpo(column, valid, epsilon=epsilon).advantage for column in score.unbind(2)]
    return (torch.stack(columns, 2) * weight).sum(2)


def overlong(length: Int[Tensor, " N"], *, limit: int, buffer: int) -> Float[Tensor, " N"]:
    """0 up to limit - buffer, then linear to -1 at limit, -1 beyond: DAPO's penalty [2503.14476]."""
    return ((limit - buffer - length) / buffer).clamp(-1.0, 0.0)


def process_product(score: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"]) -> Float[Tensor, " N"]:
    """prod sigma(s) over the steps: chance that all are right [2305.20050]; 1 without steps."""
    return torch.where(mask, logsigmoid(score), 0.0).sum(1).exp()


def process_minimum(score: Float[Tensor, "N R"], mask: Bool[Tensor, "N R"]) -> Float[Tensor, " N"]:
    """min sigma(s) over the steps: an answer is as good as its worst step [2305.20050]."""
    return torch.where(mask, torch.sigmoid(score), 1.0).amin(1)


PROCESS: dict[str, Callable[..., Tensor]] = {"product": process_product, "minimum": process_minimum}


# -- ensembles -----------------------------------------------------------------------------------------------


def ensemble_mean(score: Float[Tensor, "M N"]) -> Float[Tensor, " N"]:
    """Mean over the members [2310.02743]."""
    return score.mean(0)


def ensemble_worst(score: Float[Tensor, "M N"]) -> Float[Tensor, " N"]:
    """The lowest member decides: worst-case optimisation [2310.02743]."""
    return score.amin(0)


def ensemble_uncertainty(score: Float[Tensor, "M N"], *, lam: float) -> Float[Tensor, " N"]:
    """mean - lam * variance over the members, divisor M: uncertainty-weighted optimisation [2310.02743]."""
    return score.mean(0) - lam * score.var(0, correction=0)


ENSEMBLES: dict[str, Callable[..., Tensor]] = {
    "mean": ensemble_mean,
    "worst": ensemble_worst,
    "uncertainty": ensemble_uncertainty,
}


# -- detectors -----------------------------------------------------------------------------------------------

_WORD = re.compile(r"\w+")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff]")
_WORK = r"(?:this|my|the above) (?:response|answer|reply|output|completion)"
_TOP = r"(?:10|100|full marks|the highest|highest|the best|maximum|perfect|five stars|5 stars)"

# Text that speaks to a grader instead of the user. Each pattern needs both an address and a demand, so that
# ordinary talk about ratings, judges or scores stays unpunished.
JUDGE_DIRECTED: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(?:dear|attention|(?:note|message) to(?: the)?) (?:judge|grader|evaluator|reward model)\b",
        rf"\b(?:rate|score|grade|give|award|assign)\b[^.\n]{{0,40}}\b{_WORK}\b[^.\n]{{0,40}}\b{_TOP}\b",
        rf"\b{_WORK} (?:is|deserves|should (?:get|receive|be given))\b[^.\n]{{0,30}}"
        rf"(?:\b(?:a|an|the) (?:perfect |top |full )?(?:score|rating|10\b|100\b)|\bbetter than the other\b)",
        r"\b(?:ignore|disregard|forget)\b[^.\n]{0,40}\b(?:grading|scoring|rubric|evaluation criteria)\b",
        r"\b(?:prefer|choose|select|pick|vote for) (?:response|answer|assistant|output) [ab]\b",
        r"\b(?:response|answer|assistant|output) [ab] (?:is|was) (?:clearly )?(?:better|the winner|best)\b",
        r"\[\[\s*(?:a|b|\d{1,3})\s*\]\]",
        r"[\"'](?:verdict|winner|score|rating|preference)[\"']\s*:\s*[\"'\d]",
        r"(?:^|\n)\W*(?:final )?(?:verdict|judgement|judgment)\W{0,3}:",
        r"(?:^|\n)\W*(?:overall |final )?(?:score|rating)\W{0,3}:\W{0,3}(?:10|100)\s*/\s*(?:10|100)\b",
    )
)


def _words(text: str) -> list[str]:
    return _WORD.findall(_INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold())


def _grams(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def _excess(share: float, allowed: float) -> float:
    """0 up to the allowed share, 1 at a share of 1, linear between."""
    return max(share - allowed, 0.0) / (1.0 - allowed)


def repetition(answer: str, *, size: int = 4, allowed: float = 0.2) -> float:
    """Share of word n-grams that repeat an earlier one, beyond what lists and refrains need."""
    grams = _grams(_words(answer), size)
    return _excess(1.0 - len(set(grams)) / len(grams), allowed) if grams else 0.0


def copying(prompt: str, answer: str, *, size: int = 5, allowed: float = 0.5) -> float:
    """Share of the answer's word n-grams that stand in the prompt; `allowed` leaves room to quote."""
    grams = _grams(_words(answer), size)
    source = set(_grams(_words(prompt), size))
    return _excess(sum(gram in source for gram in grams) / len(grams), allowed) if grams else 0.0


def judge_directed(answer: str) -> float:
    """1 when the answer addresses a judge or imitates its verdict, else 0."""
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", answer)).casefold()
    return float(any(pattern.search(text) for pattern in JUDGE_DIRECTED))


def padding(length: int, typical: float, factor: float) -> float:
    """How far an answer outgrows what is typical: 0 up to factor times as many tokens, 1 at twice that."""
    assert typical > 0 and factor >= 1
    return min(max(length / (factor * typical) - 1.0, 0.0), 1.0)


def cheating(prompt: str, answer: str, *, padded: float = 0.0) -> Cheating:
    """All detectors on one answer; `padded` is what `padding` saw. `max` of it is what `compose` takes as
    detected."""
    return Cheating(repetition(answer), padded, copying(prompt, answer), judge_directed(answer))
