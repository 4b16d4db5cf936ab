"""One line of the doctor's examination before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data.errors import Kind

State = Literal["fine", "look", "broken"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, what was seen, and what to do."""

    what: str
    verdict: State
    seen: str
    remedy: str = ""
    kind: Kind = "configuration"
