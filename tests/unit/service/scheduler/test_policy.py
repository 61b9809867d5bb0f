"""Who starts next: order, quotas, gangs, passing, preemption; and what holds for any queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.domain.lifecycle import preempt
from service.domain.membership import workers_held
from service.domain.models import (
    Job,
    JobStatus,
    Member,
    Membership,
    Progress,
    Project,
    QueueState,
)
from service.scheduler.policy import (
    PASS_WINDOW_S,
    Admission,
    Capacity,
    _SchedulingPass,
    admit,
    most_held,
)
from tests.harness.builders import NOW, folded_membership, layout_chosen, queued_job
from tests.harness.properties import examples
from trainer.layout.hosts import HostFacts


def cluster(*cpus: float, gpus: float = 0.0) -> Capacity:
    """Hosts with so many CPUs each."""
    return Capacity(tuple(HostFacts(f"h{n}", each, gpus, 8 << 30) for n, each in enumerate(cpus)))


def job(
    name: str = "job",
    workers: int | dict[str, int] = 2,
    *,
    priority: int = 0,
    project: str = "default",
    age_s: float = 0.0,
    preemptible: bool = True,
    **fields: Any,
) -> Job:
    """A queued job in groups of one worker that has waited for `age_s`."""
    made = queued_job(
        name=name,
        priority=priority,
        project=project,
        preemptible=preemptible,
        parallelism={"workers": workers, "shard_group_size": 1},
    )
    place = {"priority": priority, "project": project, "queued_at": NOW - age_s}
    return replace(made, **place, **fields)


def running(name: str = "busy", workers: Any = 2, *, holds: int = 0, **fields: Any) -> Job:
    """A job that holds workers, all that it may have unless it is said how many it `holds`."""
    made = job(name, workers, **fields)
    note = QueueState(workers=holds or workers)
    return replace(made, status=JobStatus.RUNNING, queue_note=note, started_at=NOW - 50)


def starting(name: str, workers: Any = 2, *, holds: int = 0) -> Job:
    """A job whose driver has started, and none of its workers."""
    made = running(name, workers, holds=holds)
    return replace(made, status=JobStatus.STARTING, current_attempt_id=f"{made.id}-a0")


def started(admission: Admission) -> list[str]:
    return [start.job.name for start in admission.starts]


def reasons(admission: Admission) -> dict[str, str]:
    return {place.job.name: place.reason for place in admission.places}


def decide(
    queued: list[Job],
    held: list[Job] | None = None,
    capacity: Capacity | None = None,
    *projects: Project,
) -> Admission:
    quotas = {project.name: project for project in projects}
    return admit(queued, held or [], quotas, capacity or Capacity(), NOW)


# ---- order


def test_a_higher_priority_starts_first_and_then_who_waits_longest() -> None:
    assert started(decide([job("a", age_s=2), job("b", 99, age_s=1)])) == ["a", "b"], "no limits"
    queued = [job("new"), job("old", age_s=9), job("urgent", priority=5)]
    assert started(decide(queued, capacity=cluster(6))) == ["urgent", "old", "new"]
    assert started(decide(queued, capacity=cluster(4))) == ["urgent", "old"]


def test_projects_take_turns_by_what_they_hold() -> None:
    queued = [job(f"a{n}", project="a", age_s=90 - n) for n in range(3)]
    queued += [job("b0", project="b", age_s=1)]
    assert started(decide(queued, capacity=cluster(4))) == ["a0", "b0"]
    held = [running("b-old", 2, project="b")]
    assert started(decide(queued, held, cluster(6))) == ["a0", "a1"]


def test_a_job_that_backs_off_waits_for_its_time_and_holds_nobody_up() -> None:
    late = job("late", priority=9, retry_at=NOW + 1)
    found = decide([late, job("a")], capacity=cluster(2))
    assert started(found) == ["a"]
    assert [place.position for place in found.places] == [None]
    turned_back = job("late", retry_at=NOW + 3600)
    assert started(decide([turned_back])) == ["late"], "no backoff is an hour long"


def test_a_start_is_expected_when_enough_running_jobs_have_ended_and_not_guessed() -> None:
    def ending(eta_s: float | None, name: str = "busy") -> Job:
        return replace(running(name), progress=Progress(step=1, eta_s=eta_s))

    def expected(*held: Job, **quota: int) -> dict[str, float | None]:
        queued = [job("four", 4, age_s=9), job("next", age_s=8), job("vast", 99), job("last")]
        projects = [Project("default", **quota)] if quota else []
        places = decide(queued, [*held], cluster(6), *projects).places
        starts = {place.job.name: place.expected_start_at for place in places}
        return {name: at and at - NOW for name, at in starts.items()}

    held = [ending(60.0), ending(20.0), ending(90.0)]
    found = expected(*held)
    assert found == {"four": 60.0, "next": 90.0, "vast": None, "last": None}
    assert expected(*held[:2], ending(None))["next"] is None, "nobody knows when the third ends"
    pausing = replace(held[0], pause_requested=True)
    assert expected(pausing, *held[1:])["four"] == 20.0
    assert set(expected(*held, max_running_jobs=3).values()) == {None}, "a quota holds them back"


def changed(made: Job, section: str, **values: Any) -> Job:
    """A job with other values in a section of its spec, as an earlier version may have stored."""
    other = getattr(made.spec, section).model_copy(update=values)
    return replace(made, spec=made.spec.model_copy(update={section: other}))


def test_a_job_that_cannot_be_looked_at_holds_up_no_other() -> None:
    vast = {"workers": 10**400}
    held = changed(running("held"), "parallelism", **vast)
    tiny = changed(job("tiny", priority=9), "resources", cpus_per_worker=1e-320)
    queued = [tiny, job("innocent"), changed(job("vast", priority=9), "parallelism", **vast)]
    found = decide(queued, [replace(held, queue_note=QueueState())], cluster(4))
    assert started(found) == ["innocent"]
    assert "OverflowError" in reasons(found)["tiny"]
    assert reasons(found).keys() == {"tiny", "vast"}
    assert found.faults.keys() == {tiny.id, held.id}
    positions = {place.job.name: place.position for place in decide(queued, [], cluster(1)).places}
    assert positions == {"tiny": None, "vast": 1, "innocent": 2}
    grows = starting("grows", {"min": 1, "max": 2}, holds=1)
    grows = changed(grows, "resources", cpus_per_worker=1e-320)
    found = decide([job("innocent")], [grows], cluster(4))
    assert (started(found), found.faults.keys()) == (["innocent"], {grows.id})


def test_nothing_starts_onto_a_running_job_that_cannot_be_looked_at() -> None:
    held = changed(running("held", 3), "parallelism", shard_group_size="no number")
    quota = Project("default", max_workers=4)
    for capacity, *quotas in ((cluster(4),), (Capacity(max_workers=4),), (Capacity(), quota)):
        found = decide([job("next")], [held], capacity, *quotas)
        assert (started(found), found.faults.keys()) == ([], {held.id})
        assert started(decide([job("small", 1)], [held], capacity, *quotas)) == ["small"]


# ---- gangs


def test_a_job_starts_only_when_its_fewest_workers_fit() -> None:
    found = decide([job("big", 8)], [running(workers=2)], cluster(4, 2))
    assert started(found) == []
    assert reasons(found) == {"big": "needs 8 workers; cluster max 6"}
    found = decide([job("six", 6)], [running(workers=4)], cluster(4, 2))
    assert reasons(found) == {"six": "waiting for 4 of 6 workers; cluster max 6"}


def test_an_elastic_job_starts_with_what_there_is_between_its_bounds() -> None:
    elastic = job("elastic", {"min": 2, "max": 8})
    (start,) = decide([elastic], [running(workers=2)], cluster(6)).starts
    assert (start.workers, start.max_workers) == (4, None)
    assert decide([elastic], [running(workers=5)], cluster(6)).starts == []


def test_workers_that_want_gpus_fit_where_gpus_are_free() -> None:
    wants = queued_job(
        parallelism={"workers": 2, "shard_group_size": 1}, resources={"device": "cuda"}
    )
    assert decide([wants], capacity=cluster(16)).starts == []
    assert len(decide([wants], capacity=cluster(16, gpus=2)).starts) == 1
    # By itself a job takes GPUs where there are enough for its fewest workers.
    elastic = queued_job(parallelism={"workers": {"min": 2, "max": 4}, "shard_group_size": 1})
    for num_gpus, demand in ((1, (1.0, 0.0)), (2, (1.0, 1.0))):
        assert cluster(16, gpus=num_gpus).demand_of(elastic) == demand


def test_of_a_job_that_waits_again_its_spec_says_the_fewest_workers_not_its_last_layout() -> None:
    made = queued_job(
        name="auto", parallelism={"workers": {"min": 2, "max": 8}, "shard_group_size": "auto"}
    )
    attempt = f"{made.id}-a0"
    wide = layout_chosen(world_size=8, shard_group_size=4, num_replicas=2)
    told = folded_membership(wide, attempt_id=attempt)
    again = replace(made, current_attempt_id=attempt, membership=told)
    (start,) = decide([again], [], cluster(3), Project("default", max_workers=3)).starts
    assert start.workers == 3


# ---- quotas


def test_quotas_hold_back_their_project_and_nobody_else() -> None:
    ads = Project("ads", max_workers=8)
    held = [running(workers=8, project="ads")]
    found = decide([job("a", project="ads", age_s=9), job("b")], held, None, ads)
    assert started(found) == ["b"]
    assert reasons(found) == {"a": "project ads: 8 of 8 workers in use"}
    one = Project("ads", max_running_jobs=1)
    found = decide([job("a", project="ads", age_s=9), job("b", project="ads")], [], None, one)
    assert started(found) == ["a"]
    assert reasons(found) == {"b": "project ads: 1 of 1 jobs running"}


def test_what_an_elastic_job_may_grow_to_is_kept_for_it() -> None:
    ads = Project("ads", max_workers=8)
    first = job("first", {"min": 2, "max": 6}, project="ads", age_s=9)
    found = decide([first, job("second", 4, project="ads")], [], cluster(6), ads)
    assert started(found) == ["first"]
    reason = "project ads: 6 of 8 workers in use"
    assert reasons(found) == {"second": reason}
    small = decide([first, job("second", 4, project="ads")], [running(workers=3)], cluster(6), ads)
    grows = f"{reason}, with what elastic jobs may grow to"
    assert [(start.workers, start.job.name) for start in small.starts] == [(3, "first")]
    assert reasons(small) == {"second": grows}


def test_a_job_that_shall_survive_needs_hosts_for_its_groups() -> None:
    groups = {"workers": 4, "shard_group_size": 2, "survive": {"hosts": 1}}
    asked = queued_job(name="spread", parallelism=groups)
    low = running(workers=4, priority=0)
    urgent = replace(asked, priority=5)
    found = decide([urgent], [low], cluster(4))
    assert (found.starts, found.preemptions) == ([], []), "nobody makes way for what cannot start"
    wanted = "needs 2 hosts with room for 2 workers each, to survive a lost one"
    assert reasons(found) == {"spread": wanted}
    assert len(decide([asked], [], cluster(3, 2)).starts) == 1
    assert decide([asked], [], cluster(3, 1)).starts == []


def test_spares_count_with_their_job() -> None:
    sizes = {"workers": {"min": 2, "max": 4}, "shard_group_size": 1, "placement": "inter_host"}
    spared = queued_job(name="spared", parallelism=sizes | {"spares": 1})
    (start,) = decide([spared], [], cluster(4), Project("default", max_workers=4)).starts
    assert (start.workers, start.max_workers) == (3, 3)
    found = decide([spared], [], None, Project("default", max_workers=2))
    assert "the job needs 3" in reasons(found)["spared"]
    busy = replace(spared, status=JobStatus.RUNNING, id="busy")
    assert workers_held(busy) == 5
    waiting = job("waiting", 8, age_s=1e6)
    assert decide([waiting], [busy], cluster(8)).growth_limits == {}
    few = replace(busy, queue_note=QueueState(workers=2))
    assert decide([waiting], [few], cluster(8)).growth_limits == {"busy": 2}
    assert decide([], [few], Capacity(max_workers=4)).growth_limits == {"busy": 3}


def test_a_job_that_its_quota_or_cluster_can_never_hold_blocks_nobody() -> None:
    ads = Project("ads", max_workers=4)
    queued = [job("big", 8, project="ads", age_s=1e6), job("small", project="ads")]
    found = decide(queued, [], None, ads)
    assert started(found) == ["small"]
    assert "may use 4 workers" in reasons(found)["big"]
    huge = job("huge", 99, priority=9, age_s=1e6)
    assert started(decide([huge, job("small")], capacity=cluster(4))) == ["small"]


def _spread(job: Job, *hosts: str) -> Job:
    """A running job whose groups of one worker lie on these hosts."""
    members = tuple(Member(n, 0, (host,), "current") for n, host in enumerate(hosts))
    attempt = f"{job.id}-a0"
    membership = Membership(attempt, world_size=len(hosts), members=members)
    return replace(job, current_attempt_id=attempt, membership=membership)


def test_a_gang_counts_what_is_free_on_each_host_where_that_is_known() -> None:
    groups = {"workers": 4, "shard_group_size": 2, "survive": {"hosts": 1}}
    survivor = replace(queued_job(name="survivor", parallelism=groups), queued_at=NOW)
    # Half of each host is free, or one host whole: four workers either way, in groups of two.
    apart = _spread(running(workers=4), "h0", "h0", "h1", "h1")
    together = _spread(running(workers=4), "h0", "h0", "h0", "h0")
    assert started(decide([survivor], [apart], cluster(4, 4))) == ["survivor"]
    assert started(decide([survivor], [together], cluster(4, 4))) == []
    assert started(decide([survivor], [together], cluster(4, 4, 2))) == ["survivor"]


def test_a_job_that_says_it_holds_more_than_it_may_is_in_nobodys_way() -> None:
    liar = running("liar", 2)
    attempt = f"{liar.id}-a0"
    members = tuple(Member(group, 0, ("h0",) * 50, "current") for group in range(50))
    told = Membership(attempt, world_size=10**6, changed_at=NOW, members=members)
    liar = replace(liar, current_attempt_id=attempt, membership=told)
    assert started(decide([job(workers=2)], [liar], cluster(4))) == ["job"]


def test_elastic_jobs_do_not_grow_into_the_room_that_another_job_waits_for() -> None:
    elastic = running("elastic", {"min": 2, "max": 8}, holds=2)
    urgent = replace(elastic, id="job-urgent", priority=9)
    waiting = job("big", 6, priority=1)
    found = decide([waiting], [elastic, urgent, running("fixed")], cluster(8))
    assert started(found) == []
    assert found.growth_limits == {elastic.id: 2}
    assert decide([], [elastic], cluster(8)).growth_limits == {}


def test_where_the_cluster_grows_nobody_asks_for_hosts_that_were_given_to_another_job() -> None:
    elastic = running("elastic", {"min": 2, "max": 8}, holds=2)
    alone = decide([], [elastic], Capacity(max_workers=10))
    assert alone.growth_limits == {}, "there is room for all that it may take"
    beside = decide([job("other", 4)], [elastic], Capacity(max_workers=8))
    assert started(beside) == ["other"]
    assert beside.growth_limits == {elastic.id: 4}, "two workers' room is nobody's"
    assert decide([], [elastic], cluster(8)).growth_limits == {}, "its hosts limit it themselves"


def test_jobs_that_start_at_once_leave_each_other_what_they_were_given() -> None:
    elastic = starting("elastic", {"min": 2, "max": 4}, holds=2)
    # It chose its layout before the other's workers had their places.
    chose = replace(elastic, membership=Membership(f"{elastic.id}-a0", world_size=4))
    other, grown = starting("other"), running("grown", {"min": 1, "max": 4}, holds=1)
    for begun in (elastic, chose):
        assert decide([], [begun, other], cluster(4)).growth_limits == {elastic.id: 2}
        assert decide([], [begun], cluster(4)).growth_limits == {}
        assert started(decide([job("third", 1)], [begun, other], cluster(5))) == ["third"]
    both = decide([], [elastic, grown], cluster(4)).growth_limits
    assert both == {elastic.id: 3, grown.id: 2}, "one worker's room is nobody's"
    trains = replace(chose, status=JobStatus.RUNNING)
    assert decide([], [trains, other], cluster(4)).growth_limits == {elastic.id: 2}
    running_now = [replace(each, status=JobStatus.RUNNING) for each in (elastic, other)]
    assert decide([], running_now, cluster(4)).growth_limits == {}


# ---- passing


def test_a_small_job_passes_a_blocked_one_only_for_a_while() -> None:
    held, small = [running(workers=2)], job("small", 2)
    fresh, patient = job("big", 6, age_s=10), job("big", 6, age_s=PASS_WINDOW_S)
    assert started(decide([fresh, small], held, cluster(6))) == ["small"]
    found = decide([patient, small], held, cluster(6))
    assert started(found) == []
    assert "behind job" in reasons(found)["small"]
    again = replace(patient, queue_note=QueueState(since=NOW - 10))
    assert started(decide([again, small], held, cluster(6))) == ["small"], "it ran meanwhile"


def test_nobody_learns_the_names_of_jobs_of_other_projects() -> None:
    held = [running(workers=2)]
    ahead = job("secret", 6, age_s=PASS_WINDOW_S, project="theirs")
    found = decide([ahead, job("small", 2)], held, cluster(6))
    assert reasons(found)["small"] == "behind a job of another project, which waits for workers"
    victim, by = running("victim"), job("secret", priority=5, project="theirs")
    (told,) = preempt(victim, by, NOW, 60.0).timeline
    assert "secret" not in f"{told.message} {told.data}"


def test_a_preemptible_job_of_a_lower_priority_passes_at_any_time() -> None:
    held = [running(workers=2, preemptible=False)]
    big = job("big", 6, priority=5, age_s=1e6)
    assert started(decide([big, job("small", 2)], held, cluster(6))) == ["small"]
    stubborn = job("small", 2, preemptible=False)
    assert started(decide([big, stubborn], held, cluster(6))) == []


# ---- preemption


def test_the_least_important_and_latest_job_makes_way_and_no_more_than_needed() -> None:
    held = [
        running("old", 2, priority=1, age_s=9),
        running("low", 2, priority=0),
        running("peer", 2, priority=5),
    ]
    found = decide([job("urgent", 2, priority=5)], held, cluster(6))
    assert [each.job.name for each in found.preemptions] == ["low"]
    assert "make way" in reasons(found)["urgent"]
    held = [running("small", 1, priority=0), running("large", 4, priority=1)]
    found = decide([job("urgent", 4, priority=5)], held, cluster(5))
    assert [each.job.name for each in found.preemptions] == ["large"], "small gives too little"
    first, second = running("first", 2, age_s=9), running("second", 2)
    anew = QueueState(workers=2, since=NOW - 1)
    retried = replace(first, queue_note=anew)
    found = decide([job("urgent", 2, priority=5)], [retried, second], cluster(4))
    assert [each.job.name for each in found.preemptions] == ["first"], "it started last"


def test_nobody_makes_way_in_vain_or_against_their_will() -> None:
    urgent = job("urgent", 6, priority=5)
    fixed = running("fixed", 2, preemptible=False)
    assert decide([urgent], [running(workers=2), fixed], cluster(6)).preemptions == []
    assert decide([job("peer", 4)], [running(workers=2)], cluster(4)).preemptions == []


def test_of_jobs_alike_one_is_asked_for_whom_others_could_make_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    make_room = _SchedulingPass._make_room

    def note(turn: _SchedulingPass, waiting: Job, least: int) -> str:
        asked.append(waiting.name)
        return make_room(turn, waiting, least)

    monkeypatch.setattr(_SchedulingPass, "_make_room", note)
    held = [running("fixed", 4, preemptible=False), running("low", 2)]
    alike = [job(f"alike{n}", 4, priority=5, age_s=9 - n) for n in range(4)]
    found = decide([*alike, job("smaller", 2, priority=4)], held, cluster(7))
    assert asked == ["alike0", "smaller"]
    assert [each.by.name for each in found.preemptions] == ["smaller"]
    asked.clear()
    # What starts between them may make way itself, once it runs.
    starts = job("starts", 1, priority=5, age_s=7.5)
    decide([*alike, starts], held, cluster(7))
    assert asked == ["alike0", "alike2"]


def test_while_a_job_makes_way_nobody_else_takes_its_room_or_is_stopped() -> None:
    leaving = replace(running("leaving", 4), pause_requested=True)
    held = [leaving, running("low", 2)]
    queued = [job("urgent", 4, priority=5), job("small", 1)]
    found = decide(queued, held, cluster(7))
    assert (started(found), found.preemptions) == ([], [])


# ---- clusters of jobs' own


def own(made: Job) -> Job:
    return changed(made, "resources", cluster="own")


def test_jobs_with_own_clusters_wait_for_no_room_and_take_none() -> None:
    assert started(decide([own(job("own"))], [running()], cluster(2))) == ["own"]
    assert started(decide([job("small")], [own(running())], cluster(2))) == ["small"]


def test_they_pass_a_job_that_waits_for_room_and_never_make_way_for_it() -> None:
    blocked = job("blocked", priority=9, age_s=10_000)
    held = [running(priority=9), own(running())]
    admission = decide([blocked, own(job("own"))], held, cluster(2))
    assert started(admission) == ["own"]
    assert admission.preemptions == [] and not admission.growth_limits


def test_quotas_of_their_project_hold_for_them_too() -> None:
    both = [own(job("one")), own(job("two"))]
    for limit, number in (
        ({"max_workers": 3}, 1),
        ({"max_running_jobs": 1}, 1),
        ({"max_workers": 4}, 2),
    ):
        found = decide(both, [], cluster(2), Project("default", **limit))
        assert len(started(found)) == number


# ---- what holds for any queue

_projects = st.sampled_from(["a", "b"])
_jobs = st.builds(
    job,
    workers=st.integers(1, 6) | st.just({"min": 2, "max": 5}),
    priority=st.integers(0, 2),
    project=_projects,
    age_s=st.sampled_from([0.0, 10.0, PASS_WINDOW_S, 2 * PASS_WINDOW_S]),
    preemptible=st.booleans(),
)
_quotas = st.fixed_dictionaries(
    {
        name: st.builds(
            Project,
            st.just(name),
            max_workers=st.none() | st.integers(0, 8),
            max_running_jobs=st.none() | st.integers(0, 3),
        )
        for name in ("a", "b")
    }
)


def _run(admission: Admission, jobs: list[Job]) -> tuple[list[Job], list[Job]]:
    """Running and waiting jobs after a decision: whoever starts holds what it was counted with."""
    notes = {
        start.job.id: QueueState(workers=start.workers, max_workers=start.max_workers)
        for start in admission.starts
    }
    begun = [
        replace(each, status=JobStatus.RUNNING, queue_note=notes[each.id])
        for each in jobs
        if each.id in notes
    ]
    return begun, [each for each in jobs if each.id not in notes]


@given(st.lists(_jobs, max_size=6), st.lists(_jobs, max_size=8), _quotas, st.integers(0, 12))
def test_no_queue_gives_away_more_than_there_is_or_than_a_quota_allows(
    first: list[Job], then: list[Job], quotas: dict[str, Project], cpus: int
) -> None:
    capacity = cluster(*([4.0] * (cpus // 4)), float(cpus % 4))
    held: list[Job] = []
    for queued in (first, then):
        admission = admit(queued, held, quotas, capacity, NOW)
        begun, waiting = _run(admission, queued)
        held += begun
        assert sum(map(workers_held, held)) <= cpus
        for project in quotas.values():
            own = [each for each in held if each.project == project.name]
            if project.max_workers is not None:
                # Though they grow without asking.
                assert sum(map(most_held, own)) <= project.max_workers
            if project.max_running_jobs is not None:
                assert len(own) <= project.max_running_jobs
        assert {place.job.id for place in admission.places} == {each.id for each in waiting}
        assert all(place.reason for place in admission.places)
        for start in admission.starts:
            sizes = start.job.spec.parallelism
            assert sizes.min_workers <= start.workers <= sizes.world_size


@given(st.lists(_jobs, max_size=8), st.integers(1, 12))
def test_room_is_left_unused_only_for_a_job_that_was_passed_long_enough(
    queued: list[Job], cpus: int
) -> None:
    admission = admit(queued, [], {}, cluster(float(cpus)), NOW)
    begun, waiting = _run(admission, queued)
    free = cpus - sum(map(workers_held, begun))
    could = [each for each in waiting if each.spec.parallelism.min_workers <= free]
    for each in could:
        ahead = [
            other
            for other in waiting
            if free < other.spec.parallelism.min_workers <= cpus
            and NOW - other.waits_since >= PASS_WINDOW_S
        ]
        assert ahead, f"{each.name} fits and nobody is ahead of it"


@settings(max_examples=examples(60))
@given(
    st.lists(_jobs, min_size=1, max_size=8),
    st.integers(6, 12),
    st.lists(st.integers(1, 3), min_size=200, max_size=200),
)
def test_every_job_that_fits_the_cluster_starts_in_the_end(
    queued: list[Job], cpus: int, lives: list[int]
) -> None:
    """Small jobs of the same priority keep coming, each running for a few turns."""
    waiting, held = list(queued), dict[str, tuple[Job, int]]()
    now, left = NOW, {each.id for each in queued}
    for turn, life in enumerate(lives):
        if not left:
            return
        waiting.append(replace(job("filler", 1, priority=0), queued_at=now))
        admission = admit(waiting, [each for each, _ in held.values()], {}, cluster(cpus), now)
        begun, waiting = _run(admission, waiting)
        for each in admission.preemptions:
            gone, _ = held.pop(each.job.id)
            waiting.append(replace(gone, status=JobStatus.QUEUED, queue_note=QueueState()))
        held |= {each.id: (each, turn + life) for each in begun}
        held = {name: entry for name, entry in held.items() if entry[1] > turn}
        left -= {each.id for each in begun}
        now += 60.0
    pytest.fail(f"{len(left)} job(s) never started")
