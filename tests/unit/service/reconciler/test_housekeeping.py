"""What the reconciler does beside jobs: leases of replicas, and tidying up once a minute."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from service.db.auth import KeyStore
from service.db.jobs import JobStore
from service.db.webhooks import WebhookStore
from service.domain.models import Job, JobStatus
from service.domain.webhooks import Webhook
from service.errors import StoreUnavailable
from service.reconciler import housekeeping
from service.reconciler.housekeeping import Housekeeper
from service.settings import Settings
from tests.harness.builders import NOW, batch, metrics, queued_job
from tests.harness.databases import store_attempt
from tests.harness.service import House
from tests.harness.wait import scaled


def _running(house: House) -> Job:
    return store_attempt(house.store, queued_job(now=house.now), JobStatus.RUNNING)[0]


def _num_polls_as(house: House, replica: str) -> int:
    """How often the replica reconciles jobs when it dispatches once."""
    reconciler = house.reconciler(replica_id=replica)
    reconciler._dispatch()
    reconciler._pools["shared"].shutdown()
    looks = "shardloom_reconcile_seconds_count"
    return int(reconciler._telemetry.registry.get_sample_value(looks) or 0)


def test_a_job_that_another_replica_looks_at_is_left_to_it(house: House) -> None:
    _running(house)
    assert [_num_polls_as(house, replica) for replica in ("a", "b", "a")] == [1, 0, 1]


def test_a_replica_that_closes_leaves_its_jobs_to_the_others_at_once(house: House) -> None:
    _running(house)
    reconciler = house.reconciler()
    reconciler._dispatch()
    reconciler.close()
    assert _num_polls_as(house, "b") == 1


def test_a_service_on_sqlite_goes_on_with_its_jobs_when_it_starts_again() -> None:
    assert Settings().replica_id == Settings().replica_id
    on_postgresql = Settings(database_url="postgresql://host/name")
    assert on_postgresql.replica_id != Settings(database_url="postgresql://host/name").replica_id


def test_points_beyond_the_limit_are_thinned(house: House) -> None:
    job = _running(house)
    records = [metrics(step, train_loss=1.0) for step in range(201)]
    house.store.append_events(f"{job.id}-a0", batch(*records), NOW)
    settings = house.settings.model_copy(update={"metric_max_points_per_series": 200})
    Housekeeper(house.store, settings, lambda: house.now).run()
    assert len(house.store.metric_points(job.id, "train/loss")) == 151


def test_a_run_comes_a_minute_after_the_one_before_whether_that_failed_or_not(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []
    keeper = Housekeeper(store, Settings(), lambda: NOW)

    def wait(timeout_s: float) -> bool:
        told.append(timeout_s)
        return told.count("run") == 2

    def fail(*_: object, **__: object) -> None:
        told.append("run")
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(keeper._closing, "wait", wait)
    monkeypatch.setattr(housekeeping, "prune", fail)
    keeper.start()
    keeper._thread.join(scaled(20))
    assert told == [60.0, "run", 60.0, "run", 60.0]
    assert caplog.text.count("cannot finish housekeeping, trying again") == 2


def test_a_database_that_is_away_is_tidied_up_later(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(housekeeping, "prune", Mock(side_effect=StoreUnavailable("away")))
    Housekeeper(store, Settings(), lambda: NOW).run()
    assert "trying again: away" in caplog.text


def test_files_are_tidied_up_once_an_hour_also_after_a_clock_was_set_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidy = Mock(return_value=None)
    monkeypatch.setattr(housekeeping, "finish_deletions", tidy)
    keeper = Housekeeper(house.store, house.settings, lambda: house.now)
    for passed_s, num_times in ((0, 1), (60, 1), (-86_400, 2), (60, 2), (3600, 3)):
        house.now += passed_s
        keeper.run()
        assert tidy.call_count == num_times


def test_deliveries_of_webhooks_are_kept_for_two_weeks(house: House) -> None:
    webhooks = WebhookStore(house.store.engine)
    known = Webhook("wh-1", "default", "https://a.example", "", (), "sealed", True, house.now)
    webhooks.create(known)
    keeper = Housekeeper(house.store, house.settings, lambda: house.now)
    for is_added, num_kept in ((True, 1), (True, 2), (False, 1), (False, 0)):
        if is_added:
            webhooks.add_test(known.id, "{}", house.now)
        keeper.run()
        assert len(webhooks.list_deliveries(known.id)) == num_kept
        house.now += 7.7 * 86_400


def test_secrets_that_no_job_or_sweep_has_any_more_are_forgotten(house: House) -> None:
    keys = KeyStore(house.store.engine)
    job = _running(house)
    for owner in (job.id, "sweep-1"):
        keys.keep_secrets(owner, {"PASSWORD": "sealed"}, house.now)
    keeper = Housekeeper(house.store, house.settings, lambda: house.now)
    for passed_s, kept in ((0.0, ["PASSWORD"]), (2 * 3600.0, [])):
        house.now += passed_s
        keeper.run()
        assert list(keys.secrets_of("sweep-1")) == kept
    assert list(keys.secrets_of(job.id)) == ["PASSWORD"]
