"""Rewards for tests; nothing is imported, so that their processes start at once."""

from __future__ import annotations

from typing import Any


def vowels(prompt: Any, answer: str, reference: Any, extra: Any) -> float:
    """Vowels of an answer, and a little for each letter."""
    return sum(letter in "aeiou" for letter in answer) + len(answer) / 100


class Failing:
    """Scores an answer by its letters; from the ninth call on it has nothing to say but an error."""

    calls = 0

    def __call__(
        self, prompt: list[dict[str, str]], answer: str, reference: str | None, extra: dict[str, Any]
    ) -> float:
        self.calls += 1
        if extra.get("fails") and self.calls > 8:
            raise RuntimeError("the scorer is gone")
        return sum(letter in "aeiou" for letter in answer) + len(answer) / 100
