"""Jobs with clusters of their own: who may ask for one, who starts, what drivers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.api.planning import plan_of
from service.auth.crypto import ATTEMPT_TOKEN_PREFIX
from service.backends.base import check_cluster, cluster_text, hosts_for
from service.backends.fake import FakeBackend
from service.domain.lifecycle import decide, start, submission_accepted
from service.domain.models import (
    EndReason,
    Job,
    JobStatus,
    Observation,
    ObservedState,
    QueueState,
)
from service.domain.retries import NextAttempt
from service.errors import BackendUnreachable, SubmissionRefused
from service.reconciler.submission import submission_of
from service.settings import Settings
from tests.harness.builders import NOW, attempt_of, queued_job, spec, spec_document
from tests.harness.service import Api, House
from tests.unit.service.scheduler.test_runner import submit
from trainer.driver.attempt import DriverContext
from trainer.layout.hosts import HostFacts
from trainer.spec import validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec

OWN = {"cluster": "own"}


class Maker:
    """A backend that makes clusters of hosts with 8 CPUs, as far as `error` lets it."""

    name = "maker"
    makes_clusters = True
    isolated_projects = frozenset({"ads"})

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def hosts(self) -> tuple[HostFacts, ...]:
        return (HostFacts("shared", 2, 0, 1 << 30),)

    def own_hosts(self, spec: JobSpec) -> tuple[HostFacts, ...]:
        if self.error:
            raise self.error
        return (HostFacts("own-0", 8, 0, 1 << 33),)


# ---- who may ask for one


def test_a_backend_with_one_cluster_refuses_at_submission_and_in_a_dry_run(api: Api) -> None:
    for path in ("/v1/jobs", "/v1/jobs?dry_run=true"):
        answer = api.http.post(path, json={"spec": spec_document(resources=OWN)})
        assert answer.status_code == 422
        (fault,) = answer.json()["fields"]
        assert (fault["path"], fault["code"]) == ("resources.cluster", "no_own_clusters")
        assert "SHARDLOOM_BACKEND=kuberay" in fault["message"]
    assert api.http.get("/v1/jobs").json()["items"] == []


def test_workers_that_fit_no_host_are_refused_and_silence_is_not() -> None:
    own = validate_spec(spec_document(resources=OWN))
    check_cluster(Maker(), own)  # type: ignore[arg-type]
    check_cluster(Maker(BackendUnreachable("away")), own)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="too large"):
        check_cluster(Maker(SubmissionRefused("too large")), own)  # type: ignore[arg-type]


def test_a_job_of_an_isolated_project_is_refused_where_others_run() -> None:
    for resources, project in ((OWN, "ads"), ({}, "maps")):
        accepted = validate_spec(spec_document(resources=resources, project=project))
        check_cluster(Maker(), accepted)  # type: ignore[arg-type]
    shared = validate_spec(spec_document(project="ads"))
    with pytest.raises(SpecError, match="the project ads is isolated"):
        check_cluster(Maker(), shared)  # type: ignore[arg-type]


def test_a_plan_is_made_for_the_cluster_that_the_job_will_have() -> None:
    own = spec(resources={**OWN, "queue": "ads"})
    assert [each.address for each in hosts_for(Maker(), own)] == ["own-0"]  # type: ignore[arg-type]
    assert hosts_for(Maker(BackendUnreachable("away")), own) == ()  # type: ignore[arg-type]
    plan = plan_of(own, hosts_for(Maker(), own))  # type: ignore[arg-type]
    assert plan.cluster == "its own, by Kueue queue ads: 1 host(s) with room for 8 worker(s)"
    assert cluster_text(spec()) == "shared"


# ---- the queue


def test_a_shared_cluster_that_is_silent_holds_up_its_own_jobs_alone(house: House) -> None:
    own = submit(house, name="own", resources=OWN)
    shared = submit(house, name="shared")
    house.backend.set_down(True)
    house.poll()
    assert house.store.get_job(own.id).status is JobStatus.STARTING
    waiting = house.store.get_job(shared.id)
    assert waiting.status is JobStatus.QUEUED
    assert house.place_of(shared).reason == "the cluster does not answer"


def test_a_cluster_that_is_away_beside_one_that_answers_is_told_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    own, shared = submit(house, resources=OWN), submit(house)
    house.poll(2)

    class OwnAway(FakeBackend):
        def observe(self, attempt_id: str) -> Observation:
            is_away = attempt_id.startswith(own.id)
            away = Observation(ObservedState.UNREACHABLE, "no answer")
            return away if is_away else super().observe(attempt_id)

    reconciler = house.reconciler(OwnAway)
    for job in (own, shared, own, shared):
        reconciler.reconcile(job.id)
    reconciler.close()
    told = [line.message for line in caplog.records if line.levelname == "WARNING"]
    assert told == ["backend fake, own cluster: no answer"]


# ---- the life of an attempt


def _live(job: Job) -> tuple[Job, Any]:
    begun = start(job, NOW, QueueState())
    assert begun.attempt is not None
    taken = submission_accepted(begun.job, begun.attempt, NOW)
    return taken.job, taken.attempt


def test_why_a_cluster_does_not_start_is_the_message_of_its_job() -> None:
    job, attempt = _live(queued_job(resources=OWN))
    kept = decide(job, attempt, Observation(ObservedState.PENDING, "pod x: Unschedulable"), NOW)
    assert kept.job.message == "pod x: Unschedulable"
    assert decide(kept.job, attempt, Observation(ObservedState.RUNNING), NOW).job.message == ""


@pytest.mark.parametrize(
    ("reason", "status", "num_failures"),
    [
        (EndReason.PREEMPTED, JobStatus.QUEUED, 0),
        (EndReason.HOST_LOST, JobStatus.QUEUED, 0),
        (EndReason.SUBMISSION_REFUSED, JobStatus.FAILED, 0),
        (None, JobStatus.QUEUED, 1),
    ],
)
def test_a_backend_that_knows_why_an_attempt_failed_is_believed(
    reason: EndReason | None, status: JobStatus, num_failures: int
) -> None:
    job, attempt = _live(queued_job(resources=OWN))
    seen = Observation(ObservedState.FAILED, "as it says", reason)
    ended = decide(job, attempt, seen, NOW + 60)
    assert (ended.job.status, ended.job.num_failures) == (status, num_failures)
    assert ended.attempt.end_reason is (reason or EndReason.DRIVER_LOST)


# ---- what a driver is told


def context_of(settings: Settings, cluster: str = "shared") -> DriverContext:
    job = queued_job()
    sizes = {"workers": {"min": 2, "max": 6}, "shard_group_size": 2}
    wanted = spec(resources={"cluster": cluster}, parallelism=sizes)
    return DriverContext.from_env(
        submission_of(job, attempt_of(job), NextAttempt(wanted), settings).env
    )


def test_a_token_is_in_the_environment_of_a_cluster_of_its_own_only(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert context_of(settings, "own").token.startswith(ATTEMPT_TOKEN_PREFIX)
    assert context_of(settings, "shared").token == ""


def test_a_driver_knows_how_far_its_cluster_grows(tmp_path: Path) -> None:
    for cluster, most, told in (
        ("shared", None, None),
        ("shared", 32, 32),
        ("own", None, 6),
        ("own", 32, 6),
    ):
        settings = Settings(home=tmp_path, cluster_max_workers=most)
        assert context_of(settings, cluster).cluster_max_workers == told
