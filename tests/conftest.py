"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# On a busy machine a slow example says nothing about the code; examples are bounded in number.
settings.register_profile("shardloom", deadline=None)
settings.load_profile("shardloom")

REPO = Path(__file__).parents[1]
EXAMPLE_SPEC = REPO / "deploy" / "examples" / "movielens.yaml"


@pytest.fixture(scope="session")
def small_movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared MovieLens folder of 6 000 generated ratings."""
    from trainer.data.prepare.generate import generate_movielens
    from trainer.data.prepare.movielens import MovieLensOptions, prepare_movielens

    folder = tmp_path_factory.mktemp("movielens")
    generate_movielens(folder / "csv", num_ratings=6000, seed=7)
    options = MovieLensOptions(row_group_rows=1024)
    prepare_movielens(folder / "csv", folder / "prepared", options=options)
    return folder / "prepared"
