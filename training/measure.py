"""What a step's answers are like: the numbers that guards, curves and people read, over all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from training import advantages, kl
from training.experience import Experience
from training.score import ScoreModel

Total = Callable[[Sequence[float]], list[float]]


def repeated_tokens(ids: Sequence[int], size: int = 4) -> float:
    """Share of the token n-grams that repeat an earlier one: also where there are no words to compare."""
    grams = _grams(ids, size)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def copied_tokens(prompt: Sequence[int], ids: Sequence[int], size: int = 4) -> float:
    """Share of the answer's tokens that lie in an n-gram of its prompt."""
    source = set(_grams(prompt, size))
    starts = [start for start, gram in enumerate(_grams(ids, size)) if gram in source]
    return len({start + at for start in starts for at in range(size)}) / max(len(ids), 1)


def shared_phrase(answers: Sequence[Sequence[int]], size: int = 3) -> float:
    """Largest share of the answers, to whatever prompts, in which the same token n-gram stands."""
    seen = Counter(gram for ids in answers for gram in set(_grams(ids, size)))
    return max(seen.values(), default=0) / len(answers)


def _grams(ids: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]


def measure(found: Experience, ref_logp: Float[Tensor, "N R"], total: Total) -> dict[str, float]:
    """Reward, KL, entropy, length, shares of what may go wrong; `total` sums over ranks."""
    scored = found.scored
    known, lengths = scored.known, torch.tensor([float(answer.length) for answer in found.answers])
    log_ratios = kl.log_ratio(found.rollout_logp, ref_logp, found.mask)
    reward, length = scored.reward[known].double(), lengths[known].double()
    constant = advantages.constant_groups(found.grouped(scored.reward), found.grouped(known))
    # A sample alone (ppo, reinforce_pp) is compared with those of the other prompts: the step is its group.
    constant &= found.group > 1
    # Without the token that ends an answer: two of them may close alike.
    prompts = [tree.prompt for tree in found.trees for _ in tree.answers]
    made = [ids for tree in found.trees for ids in tree.answers]
    texts = [ids[: len(ids) - answer.finished] for ids, answer in zip(made, found.answers, strict=True)]
    n, groups, answers, tokens, failed, calls, unknown, asked, *sums = total([
        float(known.sum()), len(found.trees), len(found.answers), float(found.mask.sum()),
        scored.errors, scored.calls, scored.unknown, scored.asked,
        float(kl.k1(log_ratios).sum()), float(kl.k3(log_ratios).sum()),
        -float(torch.where(found.mask, found.rollout_logp, 0.0).sum()),
        float(lengths.sum()), sum(not answer.finished for answer in found.answers),
        sum(not answer.text.strip() for answer in found.answers), float(constant.sum()),
        float(scored.repetition.sum()), float(scored.detected.sum()),
        float(scored.judge_directed.sum()), sum(map(repeated_tokens, texts)),
        sum(map(copied_tokens, prompts, texts)),
        # The mean of the ranks' largest shares: not below the largest share of all.
        shared_phrase(texts) * len(texts),
        float(reward.sum()), float(reward.square().sum()), float(length.sum()),
        float(length.square().sum()), float((reward * length).sum()),
    ])  # fmt: skip
    k1, k3, surprise, long, cut, empty, same, repeated, cheated, *more, r, rr, ln, ll, rl = sums
    judge_directed, tokens_again, copied, phrase = (value / answers for value in more)
    n, tokens = max(n, 1.0), max(tokens, 1.0)
    if found.group == 1 and rr - r * r / n <= 1e-12 * rr:
        same = groups
    values = {
        "reward": r / n, "reward_std": math.sqrt(max(rr / n - (r / n) ** 2, 0.0)),
        "kl": k1 / n, "kl_k3": k3 / n, "entropy": surprise / tokens, "length": long / answers,
        "clipped": cut / answers, "stop_share": 1 - cut / answers, "empty": empty / answers,
        "zero_variance": same / groups, "repetition": repeated / answers, "cheating": cheated / answers,
        "length_corr": _correlation(n, r, rr, ln, ll, rl), "scorer_errors": failed / max(calls, 1.0),
        "scorer_invalid": unknown / asked, "answers": answers, "judge_directed": judge_directed,
        "repeated_tokens": tokens_again, "copied": copied, "phrase": phrase,
    }  # fmt: skip
    for place, name in enumerate(scored.dimensions):
        good = scored.valid[:, place]
        whole, of = total([float(scored.score[good, place].sum()), float(good.sum())])
        values[f"score_{name}"] = whole / max(of, 1.0)
    return values


def _correlation(n: float, x: float, xx: float, y: float, yy: float, xy: float) -> float:
    """Pearson's r from sums; 0 where one of the two does not vary."""
    spread = (xx - x * x / n) * (yy - y * y / n)
    return (xy - x * y / n) / math.sqrt(spread) if spread > 1e-12 * max(xx * yy, 1e-300) else 0.0


def second_opinion(found: Experience, judge: ScoreModel, total: Total) -> dict[str, float]:
    """Mean and deviation of the reward and of the judge's scores on the same answers."""
    scores = judge.score_members([(a.prompt.prompt, a.text) for a in found.answers]).mean((0, 2))
    opinions = {"proxy": found.scored.reward[found.scored.known], "judge": scores[found.scored.known]}
    values = {}
    for name, opinion in opinions.items():
        everything = torch.ones_like(opinion, dtype=torch.bool)
        summed = advantages.Moments(*total(advantages.moments(opinion, everything)))
        values[name], values[f"{name}_std"] = advantages.mean_std(summed)
    return values
