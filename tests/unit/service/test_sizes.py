"""How many workers a job has, as far as that is decided, and how lists show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.api.views import summary_of
from service.commands.render import shape_text
from service.dashboard.views import layout_text
from service.domain import ChosenLayout, Job, Membership
from service.sizes import Sizes, sizes_of_job, sizes_of_spec, span_text
from tests.unit.service.builders import queued_job, spec

AUTO = {"shard_group_size": "auto", "placement": "auto"}


def job_of(workers: Any, **parallelism: Any) -> Job:
    """A job in an attempt that has not chosen yet."""
    sizes = {"workers": workers, "shard_group_size": 2, **parallelism}
    return replace(queued_job(parallelism=sizes), current_attempt_id="job-a1")


def with_choice(job: Job, shard_group_size: int, attempt_id: str = "job-a1") -> Job:
    """The job once an attempt has chosen groups of that size."""
    chosen = ChosenLayout(
        world_size=4,
        shard_group_size=shard_group_size,
        num_replicas=4 // shard_group_size,
        placement="inter_host",
        failure_domain="replica_group",
        num_hosts=2,
        num_hosts_survived=1,
        memory_overhead_bytes=0,
        sync_latency_s=None,
        reason="",
    )
    return replace(job, membership=Membership(attempt_id, layout=chosen))


@pytest.mark.parametrize(
    ("job", "listed", "shown"),
    [
        (job_of(4), "4 = 2 x 2", "4 workers (2 replicas x 2 shards)"),
        (
            job_of({"min": 2, "max": 6}),
            "2-6 = 1-3 x 2",
            "2-6 workers (1-3 replicas x 2 shards)",
        ),
        (job_of(4, **AUTO), "4 (auto)", "4 workers (auto)"),
        (job_of({"min": 2, "max": 6}, **AUTO), "2-6 (auto)", "2-6 workers (auto)"),
        (job_of(1, shard_group_size=1), "1 = 1 x 1", "1 worker (1 replicas x 1 shards)"),
        (
            with_choice(job_of({"min": 3, "max": 7}, **AUTO), 2),
            "4-6 = 2-3 x 2",
            "4-6 workers (2-3 replicas x 2 shards)",
        ),
    ],
)
def test_lists_and_pages_show_what_is_decided(job: Job, listed: str, shown: str) -> None:
    assert layout_text(job).replace(chr(215), "x") == listed
    assert shape_text(summary_of(job)) == shown


def test_what_an_earlier_attempt_chose_is_not_what_this_one_has() -> None:
    job = with_choice(job_of(4, **AUTO), 2, attempt_id="job-a0")
    assert sizes_of_job(job) == Sizes(4, 4, None, None)


def test_a_given_layout_is_known_before_any_attempt() -> None:
    found = sizes_of_spec(spec(parallelism={"workers": 4, "shard_group_size": 2}))
    assert found == Sizes(4, 4, 2, "intra_host")
    assert found.num_replicas == 2


def test_a_span_of_one_number_is_that_number() -> None:
    assert span_text(4, 4) == "4"
    assert span_text(2, 6) == "2-6"
