"""How far annotators agree, and how far length alone predicts their choice.

Both are counted while records stream by; what is held are digests and counts, no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import JsonValue

from data.records import Preference, digest, prompt_text


@dataclass
class Judgements:
    """Votes on each unordered pair of answers to one prompt, from rows and from their `votes`."""

    votes: dict[str, list[int]] = field(default_factory=dict)
    """[for the answer with the smaller digest, for the other] by the pair's digest."""

    def add(self, pair: Preference) -> None:
        key, first = _orientation(pair)
        count = self.votes.setdefault(key, [0, 0])
        given, against = pair.votes or (1, 0)
        count[not first] += given
        count[first] += against

    def of(self, pair: Preference) -> tuple[int, int]:
        """Judgements (for, against) the pair as it stands, from all rows."""
        key, first = _orientation(pair)
        count = self.votes[key]
        return count[not first], count[first]

    def summary(self) -> dict[str, JsonValue]:
        """Counts, the mean share of judgements that agree two by two, and alpha.

        Krippendorff's alpha = 1 - Do / De for two values, over units with at least two judgements: with a and
        b votes in a unit of m, Do = sum 2ab / (m - 1) / n and De = 2AB / (n (n - 1)), where A, B, n are the
        totals. The answers of a unit stand in the order of their digests: neither value is the preferred one.
        (K. Krippendorff, Content Analysis, chapter 12.)
        """
        units = [(a, b) for a, b in self.votes.values() if a + b >= 2]
        result: dict[str, JsonValue] = {
            "pairs_judged_more_than_once": len(units),
            "contradicted_pairs": sum(a > 0 and b > 0 for a, b in units),
            "mean": None,
            "alpha": None,
        }
        if units:
            agreeing = [1 - 2 * a * b / ((a + b) * (a + b - 1)) for a, b in units]
            result["mean"] = round(sum(agreeing) / len(units), 6)
            n, first = sum(a + b for a, b in units), sum(a for a, _ in units)
            expected = 2 * first * (n - first) / (n * (n - 1))
            observed = sum(2 * a * b / (a + b - 1) for a, b in units) / n
            result["alpha"] = round(1 - observed / expected, 6) if expected else None
        return result


def _orientation(pair: Preference) -> tuple[str, bool]:
    """Digest of the unordered pair, and whether the chosen answer comes first in it."""
    chosen, rejected = digest(pair.chosen), digest(pair.rejected)
    first, second = sorted((chosen, rejected))
    return digest(prompt_text(pair.prompt), first, second), chosen == first


@dataclass
class LengthBaseline:
    """What choosing by length alone would score; ties count half."""

    longer: int = 0
    shorter: int = 0
    equal: int = 0

    def add(self, chosen: int, rejected: int) -> None:
        if chosen > rejected:
            self.longer += 1
        elif chosen < rejected:
            self.shorter += 1
        else:
            self.equal += 1

    def summary(self) -> dict[str, JsonValue]:
        """The better of the two rules, its accuracy, and the share in which the longer answer is chosen."""
        n = self.longer + self.shorter + self.equal
        if not n:
            return {"n": 0, "rule": None, "accuracy": None, "longer_chosen": None}
        share = (self.longer + self.equal / 2) / n
        return {
            "n": n,
            "rule": "longer" if share >= 0.5 else "shorter",
            "accuracy": round(max(share, 1 - share), 6),
            "longer_chosen": round(self.longer / n, 6),
        }
