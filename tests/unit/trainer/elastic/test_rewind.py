"""Going back to an older checkpoint: which ones count no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.elastic.rewind import Rewind, read_rewind

CHOSEN = Rewind(checkpoint="step-00000200-a1-r0", attempt_index=3)


@pytest.mark.parametrize(
    "name", ["step-00000300-a1-r0", "step-00000300-a2-r1-g0i0", "step-00000200-a2-r0"]
)
def test_what_earlier_attempts_saved_later_is_left(name: str) -> None:
    assert CHOSEN.supersedes(name)


@pytest.mark.parametrize(
    "name",
    ["step-00000200-a1-r0", "step-00000100-a0-r0", "step-00000300-a3-r0", "step-00000250-a4-r0"],
)
def test_the_chosen_one_those_before_and_those_of_the_new_line_count(name: str) -> None:
    assert not CHOSEN.supersedes(name)


def test_a_folder_that_is_no_checkpoint_of_ours_is_left_alone() -> None:
    assert not CHOSEN.supersedes("damaged-step-00000300-a1-r0")
    assert not CHOSEN.supersedes("ray")


def test_without_a_readable_choice_the_newest_counts(tmp_path: Path) -> None:
    path = tmp_path / "rewind.json"
    assert read_rewind(path) is None
    path.write_text("{")
    assert read_rewind(path) is None
    path.write_text(CHOSEN.model_dump_json())
    assert read_rewind(path) == CHOSEN
