"""A reward that a random model can climb; it imports nothing, so that its process starts at once."""

from __future__ import annotations

from typing import Any


def vowels(prompt: Any, answer: str, reference: Any, extra: Any) -> float:
    """Vowels of an answer, and a little for each letter."""
    return sum(letter in "aeiou" for letter in answer) + len(answer) / 100
