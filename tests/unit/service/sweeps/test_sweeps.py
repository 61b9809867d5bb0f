"""Sweeps over REST, SDK and CLI, with the loop that carries them out, cut off anywhere."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import yaml
from sqlalchemy import text

from service.api.routers import sweeps
from service.backends.fake import Script
from service.client.client import ShardloomClient
from service.client.errors import Conflict, InvalidRequest, NotFound, ServiceUnreachable
from service.db.metrics import first_value
from service.db.sweeps import SweepStore
from service.domain.auth import Role
from service.domain.job_filter import JobFilter
from service.domain.models import JobStatus
from service.domain.sweeps import Direction, Observed, Parameter, Sweep, SweepStep, Trial
from service.errors import StoreUnavailable
from service.jobs import submit
from service.jobs.run_storage import run_dir_of
from service.sweeps import runner, search
from service.sweeps.runner import SweepRunner
from service.sweeps.search import spec_of_trial
from tests.harness.builders import (
    batch,
    metrics,
    progress,
    queued_job,
    spec_document,
    workers_started,
)
from tests.harness.clock import FakeClock
from tests.harness.service import Api, end, problem_in, shardloom
from trainer.layout.hosts import HostFacts
from trainer.spec.base import FieldProblem, SpecError

LR = {"path": "optimizer.sparse.lr", "low": 0.01, "high": 0.3, "log": True}
EVERY = {"path": "parallelism.sync.every_steps", "values": [1, 4, 16]}
METRIC = "validation/rmse"


def body(**changes):
    return {"spec": spec_document(), "parameters": [LR, EVERY], "metric": METRIC, **changes}


@pytest.fixture
def create(api: Api):
    """Creates a sweep; its id."""

    def send(**changes) -> str:
        answer = api.http.post("/v1/sweeps", json=body(**changes))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    return send


def runner_of(api: Api) -> SweepRunner:
    """A loop as a service just started would have it."""
    context = api.http.app.state.context  # type: ignore[attr-defined]
    keys = context.security.keys
    job_ended = context.telemetry.job_ended
    return SweepRunner(context.sweeps, api.store, keys, api.settings, lambda: None, job_ended)


def trials_of(api: Api, sweep_id: str):
    return api.http.get(f"/v1/sweeps/{sweep_id}").json()["trials"]


def train(api: Api, job_id: str, step: int, value: float) -> None:
    """Start a job if it waits, and let it report the metric."""
    if api.store.get_job(job_id).current_attempt_id is None:
        api.backend.play(job_id, Script(("running",)))
        api.poll()
    sent = api.post_events(
        f"{job_id}-a0",
        batch(workers_started(), metrics(step, validation_rmse=value), progress(step)),
    )
    assert sent.status_code == 200, sent.text


@pytest.mark.every_database
def test_a_sweep_runs_to_its_end_and_names_the_best_spec(api, create):
    sweep_id = create(num_trials=3, num_parallel=2)
    loop = runner_of(api)
    loop.poll()
    first = trials_of(api, sweep_id)
    assert [trial["number"] for trial in first] == [0, 1]
    for trial, value in zip(first, (0.9, 0.7), strict=True):
        train(api, trial["job_id"], 0, value)
        end(api, trial["job_id"])
    loop.poll()
    (last,) = trials_of(api, sweep_id)[2:]
    train(api, last["job_id"], 0, 0.8)
    end(api, last["job_id"])
    loop.poll()
    found = api.http.get(f"/v1/sweeps/{sweep_id}").json()
    assert (found["status"], found["best"]) == ("COMPLETED", 1)
    best = found["best_spec"]["optimizer"]["sparse"]["lr"]
    assert best == found["trials"][1]["values"]["optimizer.sparse.lr"]
    job = api.http.get(f"/v1/jobs/{found['trials'][1]['job_id']}").json()
    assert job["labels"] == {"sweep": sweep_id, "trial": "1"}
    assert job["spec"]["optimizer"]["sparse"]["lr"] == best
    assert 0.01 <= best <= 0.3


def test_a_sweep_that_cannot_be_read_does_not_stall_the_others(api, create, caplog):
    store = api.http.app.state.context.sweeps
    good = create(num_trials=1)
    store.create(replace(store.get(good), id="sweep-later", search="of_tomorrow"))
    for _ in range(2):
        runner_of(api).poll()
    assert len(trials_of(api, good)) == 1
    page = api.http.get("/v1/sweeps", params={"limit": 1}).json()
    rest = api.http.get("/v1/sweeps", params={"after": page["next"]}).json()
    assert [each["id"] for each in page["items"] + rest["items"]] == [good]
    told = [record for record in caplog.records if "sweep-later" in record.getMessage()]
    assert len(told) == 1


def test_a_trial_whose_job_only_another_version_can_read_goes_on(api, create, monkeypatch):
    sweep_id = create(num_trials=2, num_parallel=1)
    runner_of(api).poll()

    def spoil(_: str) -> None:
        raise ValueError("a field of tomorrow")

    with monkeypatch.context() as patched:
        patched.setattr("service.db.rows._spec_of", spoil)
        runner_of(api).poll()
    found = api.http.get(f"/v1/sweeps/{sweep_id}").json()
    assert (found["status"], len(found["trials"])) == ("RUNNING", 1)
    api.http.post(f"/v1/jobs/{found['trials'][0]['job_id']}:cancel")
    with monkeypatch.context() as patched:
        patched.setattr("service.db.rows._spec_of", spoil)
        runner_of(api).poll()
    assert len(trials_of(api, sweep_id)) == 2


def test_a_sweep_that_newer_checks_refuse_goes_on_through_all_its_values(api, create):
    store = api.http.app.state.context.sweeps
    spec = store.get(create(num_trials=1)).spec
    later = {**spec, "recovery": {**spec["recovery"], "exclude_host_s": 1e12}}
    repeated = (Parameter(EVERY["path"], values=(1, 4, 4)),)
    sweep = replace(store.get(create()), id="sweep-earlier", spec=later, parameters=repeated)
    store.create(sweep)
    for _ in range(2):
        runner_of(api).poll()
    found = trials_of(api, sweep.id)
    assert [trial["values"][EVERY["path"]] for trial in found] == [1, 4]
    assert all(trial["job_id"] for trial in found), found
    with pytest.raises(SpecError, match="project"):
        spec_of_trial(sweep, 2, {"project": "other"})
    with pytest.raises(SpecError, match="multiple of shard_group_size"):
        spec_of_trial(sweep, 2, {"parallelism.workers": 3})


def test_only_trials_that_came_to_a_rung_are_asked_for_their_metric(api, create):
    stopping = {"min_steps": 10, "reduction_factor": 2}
    sweep_id = create(num_trials=2, num_parallel=2, early_stopping=stopping)
    runner_of(api).poll()
    for trial, step in zip(trials_of(api, sweep_id), (9, 10), strict=True):
        train(api, trial["job_id"], step, 0.9)
    store = api.http.app.state.context.sweeps
    with patch("service.db.sweeps.first_value", wraps=first_value) as read:
        found = store.observe(store.get(sweep_id))
    assert [each.reached for each in found] == [None, 0.9]
    assert read.call_count == 1


def play(api: Api, job_id: str, value: float) -> None:
    """Let the cluster go on with a job: it trains a step; the best ends, others pause if asked."""
    job = api.store.get_job(job_id)
    if job.pause_requested:
        end(api, job_id, "paused")
    elif job.status in (JobStatus.QUEUED, JobStatus.STARTING):
        train(api, job_id, 1, value)
    elif job.status is JobStatus.RUNNING and value == 0.0:
        end(api, job_id)


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SweepStore, "add_trial"),
        (SweepStore, "change_trial"),
        (runner, "submit_job"),
        (runner, "pause_job"),
    ],
)
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_pass_that_is_cut_off_anywhere_doubles_and_loses_nothing(
    api, create, owner, name, is_done
):
    stopping = {"min_steps": 1, "reduction_factor": 2}
    sweep_id = create(num_trials=4, num_parallel=2, early_stopping=stopping)
    reached = []

    def killing(original):
        def run(*args, **kwargs):
            if reached:
                return original(*args, **kwargs)
            reached.append(1)
            if is_done:
                original(*args, **kwargs)
            raise Killed

        return run

    def pass_over() -> None:
        with patch.object(owner, name, killing(getattr(owner, name))), suppress(Killed):
            runner_of(api).poll()

    known: dict[int, object] = {}
    for _ in range(20):
        pass_over()
        for trial in trials_of(api, sweep_id):
            assert known.setdefault(trial["number"], trial["values"]) == trial["values"]
            if trial["job_id"] is not None:
                play(api, trial["job_id"], float(trial["number"]))
        if api.http.get(f"/v1/sweeps/{sweep_id}").json()["status"] == "COMPLETED":
            break
    pass_over()
    jobs, _ = api.store.list_jobs(JobFilter(labels=[("sweep", sweep_id)]))
    assert sorted(job.spec.labels["trial"] for job in jobs) == ["0", "1", "2", "3"]
    found = api.http.get(f"/v1/sweeps/{sweep_id}").json()
    assert found["status"] == "COMPLETED"
    assert [trial["stopped_at"] for trial in found["trials"]] == [None, 1, 1, 1]
    assert [trial["status"] for trial in found["trials"]] == ["SUCCEEDED", *["PAUSED"] * 3]


def test_trials_have_the_secrets_of_their_sweep_which_goes_without_once_it_ended(api, create):
    sweep_id = create(num_trials=1, secrets={"DB_PASSWORD": "hunter2"})
    security, later = api.http.app.state.context.security, time.time() + 60
    security.keys.forget_orphans(later)
    runner_of(api).poll()
    (trial,) = trials_of(api, sweep_id)
    job = api.http.get(f"/v1/jobs/{trial['job_id']}").json()
    assert job["secret_names"] == ["DB_PASSWORD"]
    assert run_dir_of(api.settings, job["id"]).secret_names_path.exists(), "its driver asks"
    assert "hunter2" not in api.http.get(f"/v1/sweeps/{sweep_id}").text
    train(api, job["id"], 0, 0.5)
    end(api, job["id"])
    runner_of(api).poll()
    security.keys.forget_orphans(later)
    assert security.read_secrets(sweep_id) == {}
    assert security.read_secrets(job["id"]) == {"DB_PASSWORD": "hunter2"}


def test_the_same_seed_makes_the_same_choices(api, create):
    made = [create(search=search, seed=7, num_parallel=3) for search in ("tpe", "random") * 2]
    runner_of(api).poll()
    found = [[trial["values"] for trial in trials_of(api, sweep)] for sweep in made]
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert len({str(values) for values in found[0]}) == 3


def test_suggestions_go_by_how_far_calibration_is_from_1():
    lr = Parameter("optimizer.sparse.lr", low=0.0, high=1.0)
    sweep = Sweep("sweep-1", "ratings", {}, (lr,), METRIC, 20, 0.0)

    def suggested(direction: Direction, *values: float) -> dict[str, float]:
        trials = []
        for number, value in enumerate(values):
            trial = Trial(sweep.id, number, {lr.path: number / len(values)}, 0.0)
            done = replace(queued_job(), status=JobStatus.SUCCEEDED, latest_metrics={METRIC: value})
            trials.append(Observed(trial, done))
        return search.suggest(replace(sweep, direction=direction), trials)

    values = [0.2 + 0.1 * number for number in range(16)]
    found = suggested("approach_one", *values)
    assert found == suggested("minimize", *(abs(value - 1) for value in values))
    assert found != suggested("minimize", *values)


@pytest.mark.parametrize("num_trials", [1, 12])
@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_a_sweep_with_the_next_seed_is_not_this_one_a_trial_later(kind, num_trials):
    lr = Parameter("optimizer.sparse.lr", low=0.0, high=1.0)
    sweep = Sweep("sweep-1", "ratings", {}, (lr,), METRIC, 20, 0.0, search=kind)
    trials = [
        Observed(Trial(sweep.id, number, {lr.path: 0.5}, 0.0, message="failed"))
        for number in range(num_trials)
    ]
    assert search.suggest(replace(sweep, seed=1), trials[1:]) != search.suggest(sweep, trials)


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_values_are_tried_anew_only_once_there_are_no_others(kind):
    epochs = Parameter("training.epochs", low=1, high=4, is_integer=True)
    every = Parameter("parallelism.sync.every_steps", values=(1, [4]))
    sweep = Sweep("sweep-1", "ratings", {}, (epochs, every), METRIC, 9, 0.0, search=kind)
    trials: list[Observed] = []
    for number in range(sweep.num_trials):
        trial = Trial(sweep.id, number, search.suggest(sweep, trials), 0.0)
        trials.append(Observed(trial))
    assert len({str(each.trial.values) for each in trials[:8]}) == 8


@pytest.mark.parametrize("kind", ["grid", "tpe", "random"])
def test_where_there_are_no_more_points_than_trials_each_is_tried_once(api, create, kind):
    values = {"path": "training.epochs", "values": [1, 2]}
    sweep_id = create(search=kind, parameters=[EVERY, values], num_trials=100, num_parallel=100)
    runner_of(api).poll()
    found = api.http.get(f"/v1/sweeps/{sweep_id}").json()
    assert found["num_trials"] == 6
    assert len({str(trial["values"]) for trial in found["trials"]}) == 6


def test_bad_sweeps_are_refused_by_field_and_leave_nothing(api):
    of_user = spec_document(model={"module": "mine:Net", "tasks": [{"loss": "mse"}]})
    for changes, path in (
        ({"parameters": [{"path": "optimizer.sparse.lr", "low": -1, "high": 1}]}, None),
        ({"parameters": [{"path": "training.epochs", "low": 1.0, "high": 3.0}]}, "training.epochs"),
        ({"parameters": [{"path": "nonsense.field", "values": [1]}]}, None),
        ({"parameters": [{"path": "project", "values": ["default", "other"]}]}, "project"),
        ({"parameters": [{"path": "data.path", "values": ["/etc"]}]}, None),
        ({"parameters": [{"path": "name", "values": ["a", "b"]}]}, "name"),
        ({"parameters": [{"path": "priority", "values": [1]}]}, "priority"),
        ({"parameters": [{"path": "preemptible", "values": [False]}]}, "preemptible"),
        ({"parameters": [{"path": "resources.cluster", "values": ["own"]}]}, "resources.cluster"),
        (
            {"spec": of_user, "parameters": [{"path": "model.module", "values": ["other:Net"]}]},
            "model.module",
        ),
        (
            {"spec": of_user, "parameters": [{"path": "model.code", "values": ["0" * 64]}]},
            "model.code",
        ),
        ({"metric": "validation/ne"}, "metric"),
        ({"metric": "validation/rating/rmse"}, "metric"),
        ({"metric": "speed/rows"}, "metric"),
    ):
        answer = api.http.post("/v1/sweeps", json=body(**changes))
        problem = problem_in(answer, 422, "invalid_spec")
        assert path is None or path in {field["path"] for field in problem["fields"]}
    few = spec_document(training={"max_steps": 10})
    steps = {"path": "training.max_steps", "values": [5, 20]}
    for parameter, step in ((LR, 11), (steps, 21)):
        late = body(spec=few, parameters=[parameter], early_stopping={"min_steps": step})
        problem = problem_in(api.http.post("/v1/sweeps", json=late), 422, "invalid_spec")
        assert problem["fields"][0]["path"] == "early_stopping.min_steps"
    split = {"train": ".", "validation": None}
    spec = spec_document(data={**spec_document()["data"], "split": split})
    problem = problem_in(api.http.post("/v1/sweeps", json=body(spec=spec)), 422, "invalid_spec")
    assert "they report train/loss, train/rmse, train/mae" in problem["detail"]
    for changes in (
        {"parameters": [LR, LR]},
        {"search": "grid"},
        {"metric": 'x" innerHTML="<img>'},
        {"num_trials": 0},
        {"parameters": [{**LR, "values": [1]}]},
        {"parameters": [{**EVERY, "values": [1, 4, 1]}]},
        {"parameters": [{**LR, "low": 1, "high": 10**400}]},
        {"parameters": [{**LR, "low": -1.7e308, "high": 1.7e308, "log": False}]},
        {"parameters": [{"path": f"labels.l{n}", "values": ["a"] * 99} for n in range(6)]},
        {"early_stopping": {"min_steps": 0}},
    ):
        problem_in(api.http.post("/v1/sweeps", json=body(**changes)), 422, "invalid_request")
    backwards = body(parameters=[LR, {"path": "training.epochs", "low": 3, "high": 1}])
    sent = api.http.post("/v1/sweeps", json=backwards)
    (fault,) = problem_in(sent, 422, "invalid_request")["fields"]
    assert fault["path"] == "parameters[1].low"
    assert fault["message"].startswith("of training.epochs must be below")
    assert api.http.get("/v1/sweeps").json()["items"] == []


def test_trials_may_be_compared_at_the_last_step_of_any_of_them(create):
    spec = spec_document(training={"max_steps": 10})
    steps = {"path": "training.max_steps", "values": [5, 20]}
    create(spec=spec, parameters=[steps], early_stopping={"min_steps": 20})


def test_a_sweep_of_which_no_trial_fits_the_workers_is_refused_once_unless_forced(api):
    api.backend.set_hosts(HostFacts("a", 4, 0, 4 * 2**30))
    table = {"name": "users", "num_embeddings": 2 * 10**8, "embedding_dim": 8}
    large = body(spec=spec_document(embedding_tables=[table]))
    problem = problem_in(api.http.post("/v1/sweeps", json=large), 422, "does_not_fit")
    assert "one copy of the tables takes" in problem["detail"] and problem["changes"]
    assert api.http.get("/v1/sweeps").json()["items"] == []
    sizes = {"path": "embedding_tables[0].num_embeddings", "values": [10**3, 2 * 10**8]}
    for sent in (
        api.http.post("/v1/sweeps", json=large | {"parameters": [LR, sizes]}),
        api.http.post("/v1/sweeps?force=true", json=large),
    ):
        assert sent.status_code == 201, sent.text


def test_values_that_ask_the_same_of_a_cluster_are_looked_at_once(api, create, monkeypatch):
    found = []
    monkeypatch.setattr(sweeps, "check_fits", lambda specs, context: found.extend(specs))
    sizes = {"path": "embedding_tables[0].num_embeddings", "values": [10**3, 10**4]}
    epochs = {"path": "training.epochs", "values": list(range(1, 100))}
    create(parameters=[LR, epochs, sizes])
    assert [spec.embedding_tables[0].num_embeddings for spec in found] == [100, 10**3, 10**4]


def test_a_sweep_that_cannot_go_on_ends_and_delays_no_other(api, create):
    broken, other = create(num_trials=1), create(num_trials=1)

    def suggest(sweep, trials):
        if sweep.id == broken:
            raise OverflowError("Range exceeds valid bounds")
        return search.suggest(sweep, trials)

    loop = runner_of(api)
    loop.clock = clock = FakeClock(loop.clock())
    with patch.object(runner, "suggest", suggest):
        for _ in range(5):
            assert api.http.get(f"/v1/sweeps/{broken}").json()["status"] == "RUNNING"
            loop.poll()
            clock.now += 15.0
    assert len(trials_of(api, other)) == 1
    ended = api.http.get(f"/v1/sweeps/{broken}").json()
    assert (ended["status"], "exceeds valid bounds" in ended["message"]) == ("FAILED", True)


@pytest.mark.parametrize(
    ("fault", "status"), [(OSError(24, "too many"), "RUNNING"), (KeyError("inside"), "FAILED")]
)
def test_a_sweep_survives_what_passes_and_tells_nothing_of_the_inside(api, create, fault, status):
    sweep_id, loop = create(num_trials=1), runner_of(api)
    loop.clock = clock = FakeClock(loop.clock())
    with patch.object(runner, "suggest", side_effect=fault):
        for _ in range(5):
            loop.poll()
            clock.now += 30.0
    told = api.http.get(f"/v1/sweeps/{sweep_id}").json()
    assert (told["status"], "(KeyError)" in told["message"]) == (status, status == "FAILED")
    assert "inside" not in told["message"]


def test_faults_that_a_good_pass_parts_end_no_sweep(api, create):
    sweep_id, loop = create(num_trials=1), runner_of(api)
    loop.clock = clock = FakeClock(loop.clock())
    passes = [KeyError(), KeyError(), SweepStep(), KeyError()]
    with patch.object(runner, "decide", side_effect=passes):
        for _ in passes:
            loop.poll()
            clock.now += 30.0
    assert api.http.get(f"/v1/sweeps/{sweep_id}").json()["status"] == "RUNNING"


def test_sweeps_in_a_database_of_a_newer_version_are_left_to_it(api, create):
    create(num_trials=1)
    with api.store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreUnavailable, match=r"9999.*run the newer version"):
        runner_of(api).poll()


@pytest.mark.parametrize("read", ["in_time", "_read_manifest"])
def test_storage_that_is_away_delays_trials_and_keeps_no_sweep_from_ending(api, create, read):
    kept, cancelled = (create(num_trials=6, num_parallel=6) for _ in range(2))
    loop = runner_of(api)
    with patch.object(submit, read, side_effect=OSError(116, "Stale file handle")):
        loop.poll()
        loop.poll()
        api.http.post(f"/v1/sweeps/{cancelled}:cancel")
        loop.poll()
        loop.poll()
    status = {
        each: api.http.get(f"/v1/sweeps/{each}").json()["status"] for each in (kept, cancelled)
    }
    assert status == {kept: "RUNNING", cancelled: "CANCELLED"}
    loop.poll()
    assert all(trial["job_id"] for trial in trials_of(api, kept))
    assert len(trials_of(api, kept)) == 6


def test_a_path_that_nobody_may_read_ends_a_sweep_after_a_day(api, create):
    sweep_id, loop = create(num_trials=6, num_parallel=6), runner_of(api)
    loop.clock = FakeClock(time.time())
    with patch.object(submit, "in_time", side_effect=PermissionError(13, "Permission denied")):
        for _ in range(8):
            loop.poll()
            loop.clock.now += 86_400.0
    found = api.http.get(f"/v1/sweeps/{sweep_id}").json()
    assert found["status"] == "FAILED"
    assert "Permission denied" in found["trials"][0]["message"]


def test_large_whole_numbers_are_searched_as_they_are(api, create):
    low, high = 2**63 - 2, 2**63 - 1
    largest = {"path": "checkpoint.every_steps", "low": low, "high": high}
    sweep_id = create(parameters=[largest], num_trials=1)
    runner_of(api).poll()
    (trial,) = trials_of(api, sweep_id)
    assert trial["values"]["checkpoint.every_steps"] in (low, high)
    assert trial["job_id"], trial["message"]


def test_values_that_are_not_legal_together_cost_one_trial(api, create):
    # Each by itself is fine with what the spec has for the other.
    sweep_id = create(num_trials=2, num_parallel=2)

    def refuse_first(sweep, number, values):
        if number == 0:
            raise SpecError([FieldProblem("training.epochs", "range", "too many")])
        return spec_of_trial(sweep, number, values)

    with patch.object(runner, "spec_of_trial", refuse_first):
        runner_of(api).poll()
    refused, made = trials_of(api, sweep_id)
    assert "too many" in refused["message"]
    assert refused["job_id"] is None
    assert made["job_id"]


def test_sweeps_of_other_projects_do_not_exist(open_guarded):
    house = open_guarded()
    house.add_key("stranger", {"other": Role.ADMIN})
    made = house.send("POST", "/v1/sweeps", "submitter", json=body())
    assert made.status_code == 201, made.text
    path = f"/v1/sweeps/{made.json()['id']}"
    assert house.send("GET", path, "viewer").status_code == 200
    problem_in(house.send("GET", path, "stranger"), 404, "sweep_not_found")
    problem_in(house.send("POST", f"{path}:cancel", "stranger"), 404, "sweep_not_found")
    assert house.send("GET", "/v1/sweeps", "stranger").json()["items"] == []
    assert len(house.send("GET", "/v1/sweeps", "viewer").json()["items"]) == 1


def test_the_sdk_creates_lists_cancels_and_forgets(client, api):
    made = [client.create_sweep(spec_document(), [EVERY], metric=METRIC) for _ in range(3)]
    assert [each.id for each in client.sweeps()] == [each.id for each in reversed(made)]
    loop = runner_of(api)
    loop.poll()
    with pytest.raises(Conflict):
        client.delete_sweep(made[0].id)
    assert client.cancel_sweep(made[0].id).status == "CANCELLING"
    loop.poll()
    loop.poll()
    found = client.get_sweep(made[0].id)
    assert found.status == "CANCELLED"
    assert {trial.status for trial in found.trials} == {JobStatus.CANCELLED}
    ended = 'shardloom_ended_jobs_total{reason="cancelled",status="CANCELLED"}'
    assert f"{ended} {len(found.trials)}.0" in api.http.get("/metrics").text
    with pytest.raises(Conflict):
        client.cancel_sweep(made[0].id)
    client.delete_sweep(made[0].id)
    with pytest.raises(NotFound):
        client.get_sweep(made[0].id)
    assert client.get_job(found.trials[0].job_id).status is JobStatus.CANCELLED
    with pytest.raises(InvalidRequest):
        client.create_sweep(spec_document(), [], metric=METRIC)
    for metric, better in (("speed/rows_per_s", "maximize"), (METRIC, "minimize")):
        assert client.create_sweep(spec_document(), [EVERY], metric=metric).direction == better


def test_the_cli_begins_and_shows_a_sweep_and_writes_its_best_spec(
    client, api, tmp_path, monkeypatch
):
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(spec_document()))
    vary = ("--vary", "optimizer.sparse.lr=log:0.01..0.3", "--vary", f"{EVERY['path']}=1,4,16")
    begun = shardloom("sweep", str(spec), *vary, "--metric", METRIC, "--trials", "2")
    assert begun.exit_code == 0, begun.stderr
    sweep_id = begun.stdout.strip()
    found = json.loads(shardloom("sweeps", "show", sweep_id, "--json").stdout)
    lr, every = found["parameters"]
    assert (lr["low"], lr["high"], lr["is_log"]) == (0.01, 0.3, True)
    assert every["values"] == [1, 4, 16]
    runner_of(api).poll()
    job_id = trials_of(api, sweep_id)[1]["job_id"]
    train(api, job_id, 0, 0.75)
    page = shardloom("sweeps", "show", sweep_id).stdout
    assert page.index("0.75") < page.index(trials_of(api, sweep_id)[0]["job_id"])
    best = tmp_path / "best.yaml"
    assert shardloom("sweeps", "best", sweep_id, "--to", str(best)).exit_code == 0
    for place, problem in ((str(tmp_path), "Is a directory"), ("/dev/full", "No space left")):
        refused = shardloom("sweeps", "best", sweep_id, "--to", place)
        assert (refused.exit_code, problem in refused.stderr) == (2, True)
    expected = trials_of(api, sweep_id)[1]["values"]
    assert yaml.safe_load(best.read_text())["optimizer"]["sparse"]["lr"] == pytest.approx(
        expected["optimizer.sparse.lr"]
    )
    assert sweep_id in shardloom("sweeps", "list").stdout
    assert shardloom("sweeps", "cancel", sweep_id).exit_code == 0
    watched = json.loads(shardloom("sweep", str(spec), *vary, "--json").stdout)
    assert watched["metric"] == "validation/rmse"
    lost = Mock(side_effect=ServiceUnreachable("http://fake:1", "Connection refused"))
    monkeypatch.setattr(ShardloomClient, "follow_sweep", lost)
    unseen = shardloom("sweep", str(spec), *vary, "--wait")
    assert (unseen.exit_code, next(client.sweeps()).id in unseen.stderr) == (3, True)
    for bad in ("lr", "lr=", "training.epochs=a..b"):
        refused = shardloom("sweep", str(spec), "--vary", bad, "--metric", METRIC)
        assert refused.exit_code == 2
        assert "--vary" in refused.stderr


def test_the_cli_asks_for_no_more_sweeps_than_it_lists(client, monkeypatch):
    made = client.create_sweep(spec_document(), [LR], metric=METRIC)
    listed = itertools.chain([made], map(pytest.fail, ["asked for one more"]))
    monkeypatch.setattr(ShardloomClient, "sweeps", lambda _: listed)
    assert made.id in shardloom("sweeps", "list", "--limit", "1").stdout
