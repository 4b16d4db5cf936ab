"""Second witnesses: every formula once more, in NumPy and plain loops, written without a look at the tensors'
code.

Rows are sequences of floats with a mask beside them. Nothing is vectorised, so that a mistake in an axis, a
divisor or a mask cannot be made twice in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def counted(row: Array, mask: Array) -> list[float]:
    return [float(value) for value, counts in zip(row, mask, strict=True) if counts]


def row_sums(values: Array, mask: Array) -> list[float]:
    return [math.fsum(counted(row, keep)) for row, keep in zip(values, mask, strict=True)]


def row_means(values: Array, mask: Array) -> list[float]:
    return [
        math.fsum(counted(row, keep)) / max(len(counted(row, keep)), 1)
        for row, keep in zip(values, mask, strict=True)
    ]


# -- supervised and reward models ----------------------------------------------------------------------------


def cross_entropy(logp: Array, mask: Array, count: float) -> float:
    return -sum(row_sums(logp, mask)) / count


def bradley_terry(
    chosen: Array,
    rejected: Array,
    margin: Array,
    weight: Array,
    centring: float,
    smoothing: float,
    count: float,
) -> float:
    total = 0.0
    for c, r, m, w in zip(chosen.flat, rejected.flat, margin.flat, weight.flat, strict=True):
        right = 1 / (1 + math.exp(-(c - r - m)))
        term = -(1 - smoothing) * math.log(right) - smoothing * math.log(1 - right)
        total += w * (term + centring * (c + r) ** 2)
    return total / count


def process_reward(score: Array, label: Array, mask: Array, count: float) -> float:
    total = 0.0
    for row_s, row_y, row_m in zip(score, label, mask, strict=True):
        for s, y, m in zip(row_s, row_y, row_m, strict=True):
            if m:
                p = 1 / (1 + math.exp(-s))
                total -= y * math.log(p) + (1 - y) * math.log(1 - p)
    return total / count


# -- preferences: logp, ref_logp, mask, weight -> loss -------------------------------------------------------


def preference(
    name: str, logp: Array, ref_logp: Array, mask: Array, weight: Array, count: float, **setting: float
) -> float:
    total = 0.0
    sums, ref_sums = row_sums(logp, mask), row_sums(ref_logp, mask)
    means, ref_means = row_means(logp, mask), row_means(ref_logp, mask)
    for pair in range(len(weight)):
        c, r = 2 * pair, 2 * pair + 1
        h = (sums[c] - ref_sums[c]) - (sums[r] - ref_sums[r])
        h_mean = (means[c] - ref_means[c]) - (means[r] - ref_means[r])
        if name in ("dpo", "online_dpo"):
            term = -log_sigmoid(setting["beta"] * h)
        elif name == "cdpo":
            e = setting["smoothing"]
            term = -(1 - e) * log_sigmoid(setting["beta"] * h) - e * log_sigmoid(-setting["beta"] * h)
        elif name == "robust_dpo":
            e = setting["smoothing"]
            true, flipped = -log_sigmoid(setting["beta"] * h), -log_sigmoid(-setting["beta"] * h)
            term = ((1 - e) * true - e * flipped) / (1 - 2 * e)
        elif name == "ipo":
            term = (h - 1 / (2 * setting["beta"])) ** 2
        elif name == "ipo_average":
            term = (h_mean - 1 / (2 * setting["beta"])) ** 2
        elif name == "hinge":
            term = max(0.0, 1 - setting["beta"] * h)
        elif name == "kto":
            z = max(0.0, setting["kl"])
            win = 1 - 1 / (1 + math.exp(-setting["beta"] * (sums[c] - ref_sums[c] - z)))
            lose = 1 - 1 / (1 + math.exp(-setting["beta"] * (z - sums[r] + ref_sums[r])))
            term = (setting["desirable"] * win + setting["undesirable"] * lose) / 2
        elif name == "orpo":
            odds = [math.exp(min(a, -1e-6)) / (1 - math.exp(min(a, -1e-6))) for a in (means[c], means[r])]
            term = -means[c] - setting["lam"] * log_sigmoid(math.log(odds[0] / odds[1]))
        elif name == "simpo":
            term = -log_sigmoid(setting["beta"] * (means[c] - means[r]) - setting["gamma"])
        else:
            raise KeyError(name)
        total += weight[pair] * term
    return total / count


# -- policy: token losses and how they are added up ----------------------------------------------------------


def clipped_token(ratio: float, advantage: float, low: float, high: float, dual: float) -> float:
    inside = min(max(ratio, 1 - low), 1 + high)
    gain = min(ratio * advantage, inside * advantage)
    if advantage < 0:
        gain = max(gain, dual * advantage)
    return -gain


def policy_tokens(
    name: str,
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    low: float,
    high: float,
    dual: float,
) -> Array:
    out = np.zeros(logp.shape)
    for n in range(logp.shape[0]):
        places = [t for t in range(logp.shape[1]) if mask[n, t]]
        differences = [logp[n, t] - old_logp[n, t] for t in places]
        for t, difference in zip(places, differences, strict=True):
            a = advantage[n, t] if advantage.shape[1] > 1 else advantage[n, 0]
            if name == "gspo":
                out[n, t] = clipped_token(
                    math.exp(sum(differences) / len(differences)), a, low, high, math.inf
                )
            elif name == "cispo":
                out[n, t] = -min(max(math.exp(difference), 1 - low), 1 + high) * a * logp[n, t]
            else:
                out[n, t] = clipped_token(math.exp(difference), a, low, high, dual)
    return out


def aggregate(name: str, losses: Array, mask: Array, length: int) -> float:
    rows = [counted(row, keep) for row, keep in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if name == "token_mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if name == "sequence_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if name == "sequence_sum":
        return sum(sum(row) for row in rows) / len(rows)
    if name == "fixed_length":
        return sum(sum(row) / length for row in rows) / len(rows)
    raise KeyError(name)


def value_loss(
    value: Array, old: Array, returns: Array, mask: Array, weight: Array, clip: float, count: float
) -> float:
    total = 0.0
    for n in range(value.shape[0]):
        for t in range(value.shape[1]):
            if mask[n, t]:
                near = min(max(value[n, t], old[n, t] - clip), old[n, t] + clip)
                worse = max((value[n, t] - returns[n, t]) ** 2, (near - returns[n, t]) ** 2)
                total += weight[n, t] * worse / 2
    return total / count


# -- advantages ----------------------------------------------------------------------------------------------


def group_advantage(name: str, scores: Sequence[float], valid: Sequence[bool], epsilon: float) -> list[float]:
    kept = [s for s, ok in zip(scores, valid, strict=True) if ok]
    out = []
    for i, score in enumerate(scores):
        if not valid[i] or len(set(kept)) < 2:
            out.append(0.0)
            continue
        mean = sum(kept) / len(kept)
        if name == "rloo":
            others = [s for j, s in enumerate(scores) if j != i and valid[j]]
            out.append(score - sum(others) / len(others))
        elif name == "dr_grpo":
            out.append(score - mean)
        else:
            variance = sum((s - mean) ** 2 for s in kept) / (len(kept) - 1)
            out.append((score - mean) / (math.sqrt(variance) + epsilon))
    return out


def gae(reward: Array, value: Array, mask: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """By the definition: A_t = sum_k (gamma lam)^k delta_{t+k} over the counted tokens."""
    advantage, returns = np.zeros(reward.shape), np.zeros(reward.shape)
    for n in range(reward.shape[0]):
        places = [t for t in range(reward.shape[1]) if mask[n, t]]
        deltas = []
        for i, t in enumerate(places):
            following = value[n, places[i + 1]] if i + 1 < len(places) else 0.0
            deltas.append(reward[n, t] + gamma * following - value[n, t])
        for i, t in enumerate(places):
            advantage[n, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
            returns[n, t] = advantage[n, t] + value[n, t]
    return advantage, returns


def whiten(values: Array, mask: Array, ddof: int) -> Array:
    kept = [float(v) for v, m in zip(values.flat, mask.flat, strict=True) if m]
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - ddof))
    out = np.zeros(values.shape)
    for place in np.ndindex(values.shape):
        if mask[place]:
            out[place] = (values[place] - mean) / std
    return out


# -- KL ------------------------------------------------------------------------------------------------------


def kl(name: str, logp: float, ref_logp: float) -> float:
    r = math.exp(ref_logp - logp)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[name]


def token_reward(score: float, kls: Sequence[float], mask: Sequence[bool], beta: float) -> list[float]:
    last = max((t for t, m in enumerate(mask) if m), default=-1)
    return [
        (-beta * k if m else 0.0) + (score if t == last else 0.0)
        for t, (k, m) in enumerate(zip(kls, mask, strict=True))
    ]


# -- reward composition --------------------------------------------------------------------------------------


def compose(
    score: Array,
    valid: Array,
    weight: Sequence[float],
    floor: Sequence[float],
    detected: Sequence[float],
    penalty: float,
    cap: float,
) -> list[float]:
    out = []
    for row, ok, found in zip(score, valid, detected, strict=True):
        if not ok.all():
            out.append(0.0)
            continue
        total = sum(w * s for w, s in zip(weight, row, strict=True))
        if any(s < f for s, f in zip(row, floor, strict=True)):
            total = min(total, cap)
        out.append(total - penalty * found)
    return out
