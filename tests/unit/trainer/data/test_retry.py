"""When remote storage is tried again, for how long, and when not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.errors import StorageAwayError, StorageRefusedError
from trainer.data.retry import Backoff, kind_of, persist


class Storage:
    """Fails `num_failures` times with `error`; its clock moves by what is slept."""

    def __init__(self, num_failures: int, error: Exception) -> None:
        self.left, self.error = num_failures, error
        self.now = 0.0
        self.slept: list[float] = []

    def read(self) -> str:
        if self.left:
            self.left -= 1
            raise self.error
        return "content"

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def persist(self, backoff: Backoff, draw: float = 1.0) -> str:
        return persist(
            self.read, backoff, clock=lambda: self.now, sleep=self.sleep, draw=lambda: draw
        )


def test_delays_double_up_to_the_longest() -> None:
    storage = Storage(6, StorageAwayError("busy"))
    assert storage.persist(Backoff(budget_s=60, first_s=1, longest_s=8)) == "content"
    assert storage.slept == [1, 2, 4, 8, 8, 8]


def test_what_no_retry_helps_is_said_at_once() -> None:
    storage = Storage(1, StorageRefusedError("denied"))
    with pytest.raises(StorageRefusedError, match="denied"):
        storage.persist(Backoff())
    assert storage.slept == []


def test_a_spent_budget_ends_in_the_last_error() -> None:
    storage = Storage(1000, StorageAwayError("busy"))
    with pytest.raises(StorageAwayError, match="busy"):
        storage.persist(Backoff(budget_s=10, first_s=1, longest_s=4))
    assert storage.slept == [1, 2, 4]


def test_a_budget_of_nothing_tries_once() -> None:
    storage = Storage(1, StorageAwayError("busy"))
    with pytest.raises(StorageAwayError):
        storage.persist(Backoff(budget_s=0))
    assert storage.slept == []


@given(
    budget_s=st.floats(0, 1000),
    first_s=st.floats(0.01, 10),
    longest_s=st.floats(0.01, 100),
    draws=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
def test_delays_stay_within_the_budget_and_the_longest(budget_s, first_s, longest_s, draws) -> None:
    backoff, elapsed_s = Backoff(budget_s, first_s, longest_s), 0.0
    for num_failures, draw in enumerate(draws, start=1):
        delay_s = backoff.delay_s(num_failures, elapsed_s, draw)
        if delay_s is None:
            break
        assert 0 < delay_s <= longest_s
        elapsed_s += delay_s
    assert elapsed_s <= budget_s


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("AWS Error SLOW_DOWN during ListObjectsV2 operation: SlowDown", "away"),
        ("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation", "away"),
        ("AWS Error UNKNOWN (HTTP status 429) during HeadObject operation", "away"),
        ("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 18", "away"),
        ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted)", "away"),
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", "refused"),
        ("AWS Error SIGNATURE_DOES_NOT_MATCH during CreateMultipartUpload", "refused"),
        ("google::cloud::Status(PERMISSION_DENIED: Permanent error)", "refused"),
        ("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation", "no_bucket"),
        ("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation", "other"),
    ],
)
def test_messages_of_the_sdks_are_told_apart(said: str, kind: str) -> None:
    assert kind_of(said) == kind
