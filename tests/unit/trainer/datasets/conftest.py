"""Tests of preparations: what happens while their parts are made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import pytest

from trainer.datasets.io.journal import Journal

Hear = Callable[[str], object]


@pytest.fixture
def before_parts() -> Callable[[Hear], AbstractContextManager[None]]:
    """Inside of it, what it is given hears the name of each part before that is made."""

    @contextmanager
    def told(hear: Hear):
        real = Journal.part

        def part(journal, name, make):
            return real(journal, name, lambda path: hear(name) or make(path))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "part", part)
            yield

    return told


@pytest.fixture
def killed_at(before_parts) -> Callable[[str, int], AbstractContextManager[None]]:
    """Inside of it, work ends where part number `nth` of those below `folder` is to be made."""

    @contextmanager
    def killed(folder: str, nth: int):
        names: list[str] = []

        def hear(name: str) -> None:
            names.extend([name] if name.startswith(folder) else [])
            if len(names) == nth:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), before_parts(hear):
            yield

    return killed
