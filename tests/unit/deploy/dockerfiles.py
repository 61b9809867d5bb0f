"""Our Dockerfiles as a list of instructions, what their locks name, and what an engine is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from docker.utils.build import exclude_paths
from dockerfile_parse import DockerfileParser

from tests.conftest import REPO

DOCKERFILES = sorted((REPO / "deploy").glob("Dockerfile.*"))
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:[+-])([^}]*))?\})")


def instructions_of(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, what it says) in order, lines joined, without comments."""
    with dockerfile.open("rb") as file:
        found = DockerfileParser(fileobj=file).structure
    return [
        (each["instruction"], each["value"]) for each in found if each["instruction"] != "COMMENT"
    ]


def default_of(dockerfile: str, name: str) -> str:
    """The value that a Dockerfile gives an ARG."""
    text = (REPO / "deploy" / dockerfile).read_text()
    (found,) = re.findall(rf"^ARG {name}=(\S+)$", text, re.MULTILINE)
    return str(found)


def locked_versions(lock: Path) -> dict[str, str]:
    """What a lock of `deploy/requirements` names, by name."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), re.MULTILINE))


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with $NAME, ${NAME}, ${NAME:+WORD} and ${NAME:-WORD} replaced as an engine does."""

    def value_of(found: re.Match[str]) -> str:
        value, kind, word = values.get(found[1] or found[2], ""), found[3], found[4]
        if kind == ":+":
            return word if value else ""
        return value or word if kind == ":-" else value

    return _VARIABLE.sub(value_of, text)


def context_files() -> set[str]:
    """What `.dockerignore` lets through to an engine, as relative paths."""
    lines = (REPO / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    return exclude_paths(str(REPO), patterns)
