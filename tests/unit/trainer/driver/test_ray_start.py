"""A node that is slow to register is waited for; one that cannot come any more is not."""

from __future__ import annotations

import pytest

from trainer.driver.ray_start import patient


def _absent(gcs_address: str, node_id: str) -> object:
    raise RuntimeError("no such node")


def test_a_node_that_is_late_is_found() -> None:
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node_id": "n"}])
    pauses: list[float] = []

    def get_node(gcs_address: str, node_id: str) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    find = patient(get_node, lambda: True, patience_s=60, sleep=pauses.append)
    assert find("127.0.0.2:6379", "n") == {"node_id": "n"}
    assert len(pauses) == 2


@pytest.mark.parametrize(("patience_s", "raylet_lives"), [(0, True), (60, False)])
def test_a_node_that_cannot_come_is_given_up(patience_s: float, raylet_lives: bool) -> None:
    find = patient(_absent, lambda: raylet_lives, patience_s)
    with pytest.raises(RuntimeError, match="no such node"):
        find("127.0.0.2:6379", "n")
