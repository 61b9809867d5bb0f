"""The README keeps up with the tree: every file is in its map, every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
README = (REPO / "README.md").read_text()


@pytest.mark.parametrize("folder", ["service", "trainer", "deploy", "tests"])
def test_every_file_has_a_line_in_the_file_map(folder: str) -> None:
    files = [
        path.relative_to(REPO).as_posix()
        for path in (REPO / folder).rglob("*")
        if path.suffix in {".py", ".sh", ".yaml"} and path.name != "__init__.py"
    ]
    assert files
    assert [file for file in files if f"`{file}`" not in README] == []


def test_the_file_map_names_nothing_that_is_gone() -> None:
    named = re.findall(r"^\| `([^`{]+)` \|", README, flags=re.MULTILINE)
    assert [file for file in named if not (REPO / file).exists()] == []


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (REPO / link).exists()] == []
