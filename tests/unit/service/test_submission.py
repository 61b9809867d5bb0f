"""What a driver is told of its cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.retries import NextAttempt
from service.settings import Settings
from service.submission import submission_of
from tests.unit.service.builders import attempt_of, queued_job, spec
from trainer.attempt import DriverContext


def context_of(settings: Settings, cluster: str = "shared") -> DriverContext:
    job = queued_job()
    sizes = {"workers": {"min": 2, "max": 6}, "shard_group_size": 2}
    wanted = spec(resources={"cluster": cluster}, parallelism=sizes)
    return DriverContext.from_env(
        submission_of(job, attempt_of(job), NextAttempt(wanted), settings).env
    )


@pytest.mark.parametrize(
    ("cluster", "most", "told"),
    [("shared", None, None), ("shared", 32, 32), ("own", None, 6), ("own", 32, 6)],
)
def test_a_driver_knows_how_far_its_cluster_grows(
    tmp_path: Path, cluster: str, most: int | None, told: int | None
) -> None:
    settings = Settings(home=tmp_path, cluster_max_workers=most)
    assert context_of(settings, cluster).cluster_max_workers == told
