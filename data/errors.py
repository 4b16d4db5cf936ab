"""The failures that a user can meet, by kind.

PlumblineError
├── ConfigurationError   a knob is wrong: nothing was started            exit 10
├── DataError            the records are wrong: nothing was trained      exit 11
├── DivergenceError      training left the healthy region and was ended  exit 12
├── InfrastructureError  the machine, a library or a neighbour failed    exit 13 (the only retried kind)
└── Stopped              somebody asked for an end (SIGTERM, SIGINT)     exit 14

The first two are ValueErrors too. A message names file, key or row, value, bound and remedy.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Kind = Literal["configuration", "data", "divergence", "infrastructure", "stopped"]

EXIT_CODES: dict[Kind, int] = {
    "configuration": 10,
    "data": 11,
    "divergence": 12,
    "infrastructure": 13,
    "stopped": 14,
}


class PlumblineError(Exception):
    """Base of every failure that Plumbline raises on purpose; `kind` decides exit code and retry."""

    kind: ClassVar[Kind] = "infrastructure"


class ConfigurationError(PlumblineError, ValueError):
    """A parameter is unknown, of the wrong type, out of bounds or impossible in combination."""

    kind = "configuration"


class DataError(PlumblineError, ValueError):
    """Records are missing, malformed, too few or contradict each other beyond a stated bound."""

    kind = "data"


class DivergenceError(PlumblineError):
    """Training met non-finite numbers or left its bounds and was ended by a guard."""

    kind = "divergence"


class InfrastructureError(PlumblineError):
    """Disk, memory, process or service failed; the same command may succeed when run again."""

    kind = "infrastructure"


class Stopped(PlumblineError):
    """The work was asked to stop and left a complete checkpoint behind."""

    kind = "stopped"


def exit_code(error: BaseException) -> int:
    """Exit code of a stage or a training program that ended with `error`; unknown ones are infrastructure."""
    return EXIT_CODES[error.kind if isinstance(error, PlumblineError) else "infrastructure"]
