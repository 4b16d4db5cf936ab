"""Which prompt group goes to which part: train, judge, validation or test.

A group's place is its own: the hash of seed and group key, a number in [0, 1), falls into a part's interval.
So a data set that grows does not move its old groups, and row order does not matter. When chance gives a
part fewer pairs than its minimum, which happens in small data, the groups whose numbers lie nearest to its
interval move there from parts that can spare them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from data.config import PARTS, DataParams, Part, SplitParams
from data.errors import DataError


def position(group: str, seed: int) -> float:
    """Where the group stands in [0, 1): the first 52 bits of SHA-256("seed:group")."""
    first = hashlib.sha256(f"{seed}:{group}".encode()).hexdigest()[:13]
    return int(first, 16) / 16**13


def intervals(shares: SplitParams) -> dict[Part, tuple[float, float]]:
    """The part's stretch of [0, 1), for parts with a share above 0."""
    found: dict[Part, tuple[float, float]] = {}
    start = 0.0
    for part in PARTS:
        share = float(getattr(shares, part))
        if share > 0:
            found[part] = (start, start + share)
            start += share
    last = list(found)[-1]
    found[last] = found[last][0], 1.0  # The shares may sum to a hair less than 1.
    return found


def minimum_pairs(total: int, parts: int, wanted: int) -> int:
    """Pairs that every part gets: `wanted`, but at most half of an even share, and at least 1."""
    return max(1, min(wanted, total // (2 * parts)))


def assign(sizes: Mapping[str, int], params: DataParams, seed: int) -> dict[str, Part]:
    """Part of each group. `sizes`: pairs of each group, all above 0; empty gives an empty result."""
    if not sizes:
        return {}
    places = intervals(params.splits)
    if len(sizes) < len(places):
        raise DataError(
            f"data.splits: {len(sizes)} prompt groups can not fill {len(places)} parts "
            f"({', '.join(places)}); "
            "give more prompts, set data.group_by: prompt, or set a share to 0"
        )
    at = {group: position(group, seed) for group in sizes}
    parts = {group: _part_at(at[group], places) for group in sizes}
    held = dict.fromkeys(places, 0)
    for group, part in parts.items():
        held[part] += sizes[group]
    minimum = minimum_pairs(sum(sizes.values()), len(places), params.min_part)
    for part in sorted(places, key=lambda name: (held[name], name)):
        _fill(part, minimum, parts, held, sizes, {g: _distance(u, places[part]) for g, u in at.items()})
    empty = [part for part, count in held.items() if count == 0]
    if empty:
        largest = max(sizes, key=lambda group: (sizes[group], group))
        raise DataError(
            f"data.splits: no group is left for {', '.join(empty)}; the largest of {len(sizes)} groups holds "
            f"{sizes[largest]} of {sum(sizes.values())} pairs; set data.group_by: prompt or give more prompts"
        )
    return parts


def train_or_validation(groups: Collection[str], params: DataParams, seed: int) -> dict[str, Part]:
    """Part of each group that has labelled steps and no pairs, by the shares of these two parts alone."""
    shares = params.splits
    bound = shares.train / (shares.train + shares.validation)
    return {group: "train" if position(group, seed) < bound else "validation" for group in sorted(groups)}


def _part_at(u: float, places: Mapping[Part, tuple[float, float]]) -> Part:
    return next(part for part, (start, end) in places.items() if start <= u < end)


def _distance(u: float, interval: tuple[float, float]) -> float:
    start, end = interval
    return max(start - u, u - end, 0.0)


def _fill(
    part: Part,
    minimum: int,
    parts: dict[str, Part],
    held: dict[Part, int],
    sizes: Mapping[str, int],
    distance: Mapping[str, float],
) -> None:
    """Move the nearest groups into `part` until it holds `minimum`, from parts that stay at or above it."""
    for group in sorted(distance, key=lambda name: (distance[name], name)):
        if held[part] >= minimum:
            return
        donor = parts[group]
        if donor != part and held[donor] - sizes[group] >= minimum:
            parts[group] = part
            held[donor] -= sizes[group]
            held[part] += sizes[group]
