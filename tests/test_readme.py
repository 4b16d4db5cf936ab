"""The README's tree names what exists, and its commands are real."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tree() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("## The tree")[1].split("```")[1]
    paths, folder = [], ""
    for line in block.strip("\n").splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            paths.append(name)
        else:
            paths.append(folder + name)
    return paths


def test_every_captioned_path_exists() -> None:
    missing = [path for path in tree() if not (ROOT / path).exists()]
    assert not missing and len(tree()) > 20


def test_every_line_of_the_tree_has_a_caption() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("## The tree")[1].split("```")[1]
    assert all(len(line.split(maxsplit=1)) == 2 for line in block.strip("\n").splitlines())


def test_top_level_packages_are_captioned() -> None:
    assert {"flows/", "tasks/", "training/", "data/", "tests/", "infra/"} <= set(tree())


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"`?make ([a-z-]+)`?", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
