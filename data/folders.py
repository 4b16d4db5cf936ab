"""Which files of a folder count, one answer for all: what is read is what is digested."""

from __future__ import annotations

from pathlib import Path


def files_below(folder: Path) -> list[str]:
    """Relative names of the files under a folder in a fixed order, without byte code and hidden files."""
    names = [item.relative_to(folder).as_posix() for item in folder.rglob("*") if item.is_file()]
    return sorted(
        n for n in names if "__pycache__" not in n and not any(p.startswith(".") for p in n.split("/"))
    )
