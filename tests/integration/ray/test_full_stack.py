"""The whole path on real Ray: REST in, trained model out, through kills of every process."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from service.domain.models import EndReason, JobStatus
from service.domain.sweeps import SweepStatus
from service.local.processes import process_table, process_tree
from service.schemas.jobs import JobDetail
from service.schemas.sweeps import TrialOut
from tests.conftest import EXAMPLE_SPEC
from tests.harness.files import replace_values
from tests.harness.stack import Stack
from tests.harness.wait import scaled, wait_for
from trainer.data.manifest import load_manifest
from trainer.protocol.events import PHASES
from trainer.spec.parse import apply_overrides

CHECKPOINT_EVERY = 20
# 6 000 ratings, 5 400 of them to train on: 43 steps of 4 x 32 rows an epoch, the last one short.
SMALL = (
    "data.batch_size=32",
    "training.report_every_steps=5",
    "training.validate_every_steps=1000",
    f"checkpoint.every_steps={CHECKPOINT_EVERY}",
)
LONG = (*SMALL, "training.epochs=3", "training.report_every_steps=1")
# As many steps, with half of the processes to start.
TWO_WORKERS = ("parallelism.workers=2", "parallelism.shard_group_size=1", "data.batch_size=64")


def assert_whole(stack: Stack, job: JobDetail) -> None:
    """Every report step has exactly one value of the loss, and rows were counted once."""
    assert job.status is JobStatus.SUCCEEDED, job.message
    every = job.spec.training.report_every_steps
    series = stack.client.metrics(job.id, names=["train/loss"], max_points=5000).series[0]
    steps = [point.step for point in series.points]
    total = job.progress.total_steps
    assert steps == sorted({*range(every, total + 1, every), total})
    rows_per_epoch = load_manifest(Path(job.spec.data.path)).splits["train"].num_rows
    assert job.progress.rows == job.spec.training.epochs * rows_per_epoch


def test_the_jobs_api_of_ray_answers_with_its_token_only(stack: Stack) -> None:
    url, token = stack.jobs_api()
    with httpx.Client(trust_env=False, timeout=scaled(30.0)) as http:
        assert http.get(f"{url}/api/jobs/").status_code in (401, 403)
        allowed = http.get(f"{url}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    assert allowed.status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_goes_on_after_the_whole_stack_went_down_and_up(
    stack: Stack, small_movielens: Path
) -> None:
    job = stack.submit(small_movielens, *LONG, "retry.max_failures=0")
    reached = stack.wait_for_step(job.id, CHECKPOINT_EVERY + 5)
    stack.down()
    stack.up()
    ended = stack.wait_for_end(job.id)
    assert_whole(stack, ended)
    assert ended.num_failures == 0, "a cluster that was shut down is no failure of the job"
    runs = stack.timeline(job.id, "workers_started")
    assert runs[-1]["resumed_step"] >= reached.progress.step - CHECKPOINT_EVERY


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_outlives_the_service_doubles_no_trial_and_its_stopped_ones_can_be_resumed(
    stack: Stack, small_movielens: Path
) -> None:
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    two = ("parallelism.workers=2", "parallelism.shard_group_size=1")
    tiny = (*LONG, *two, "training.epochs=6")
    varied: list[dict[str, object]] = [
        {"path": "optimizer.sparse.lr", "low": 0.001, "high": 0.3, "log": True},
        {"path": "parallelism.sync.every_steps", "values": [1, 4, 16]},
    ]
    sweep = stack.client.create_sweep(
        apply_overrides(document, [f"data.path={small_movielens}", *tiny]),
        varied,
        metric="train/loss",
        num_trials=6,
        num_parallel=2,
        early_stopping={"min_steps": 10},
    )

    def trials() -> dict[int, TrialOut]:
        return {each.number: each for each in stack.client.get_sweep(sweep.id).trials}

    wait_for(lambda: any(each.step for each in trials().values()), "a trial to train", 120)
    before = trials()
    stack.kill_service()
    stack.up()
    wait_for(lambda: stack.client.get_sweep(sweep.id).status.is_terminal, "all trials", 400)
    ended = stack.client.get_sweep(sweep.id)
    assert (ended.status, len(ended.trials)) == (SweepStatus.COMPLETED, 6)
    for number, known in before.items():
        after = ended.trials[number]
        assert (after.values, known.job_id or after.job_id) == (known.values, after.job_id)
    jobs = [*stack.client.iter_jobs(labels={"sweep": sweep.id})]
    assert {job.id for job in jobs} == {each.job_id for each in ended.trials}
    assert len(jobs) == 6, "each trial is one job"
    stopped = [each for each in ended.trials if each.stopped_at is not None]
    for each in ended.trials:
        assert each.status is (JobStatus.PAUSED if each in stopped else JobStatus.SUCCEEDED)
    assert stopped, "the worse ones of six"
    assert ended.best is not None and ended.best_spec is not None
    job_id = str(stopped[0].job_id)
    reached = stack.client.get_job(job_id).progress
    assert reached.step < reached.total_steps
    stack.client.resume(job_id)
    assert_whole(stack, stack.wait_for_end(job_id))


@pytest.mark.slow
def test_a_running_job_is_traced_and_a_cancelled_one_leaves_no_worker(
    stack: Stack, small_movielens: Path, tmp_path: Path
) -> None:
    job = stack.submit(small_movielens, *LONG)
    reached = stack.wait_for_step(job.id, CHECKPOINT_EVERY + 2)
    requested = stack.client.request_trace(job.id, num_steps=2, ranks=[0, 3])
    written = stack.client.wait_for_traces(job.id, requested, timeout_s=60)
    for each in written:
        content = gzip.decompress(stack.client.download_trace(job.id, each, tmp_path).read_bytes())
        assert b"ProfilerStep#" in content
    pids = [stack.pid(reached, f"rank-{rank}") for rank in range(4)]
    stack.client.cancel(job.id)
    ended = stack.wait_for_end(job.id)
    assert ended.status is JobStatus.CANCELLED
    wait_for(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        "the workers to be gone",
        limit_s=20,
    )
    assert stack.client.checkpoints(job.id), "what was saved stays"


@pytest.fixture
def spoiled_movielens(small_movielens: Path, tmp_path: Path) -> Path:
    """Prepared data with a NaN rating in one training file."""
    folder = shutil.copytree(small_movielens, tmp_path / "spoiled")
    replace_values(min((folder / "train").glob("*.parquet")), "rating", {5: float("nan")})
    return folder


def _processes_of_ray(stack: Stack, title: str) -> set[int]:
    """Pids of processes below Ray whose titles begin like that."""
    ray = stack.state.ray
    assert ray is not None
    found = set()
    for each in process_tree(ray, process_table()):
        with suppress(psutil.Error):
            if " ".join(psutil.Process(each.pid).cmdline()).startswith(title):
                found.add(each.pid)
    return found


def check_what_was_told(stack: Stack, job: JobDetail) -> None:
    """All that a trained job tells: layout, metrics, plans, checkpoints, logs."""
    assert_whole(stack, job)
    started = stack.timeline(job.id, "workers_started")[0]
    assert started["sharding_groups"] == [[0], [1]]
    assert started["replica_groups"] == [[0, 1]]
    assert job.latest_metrics["validation/rmse"] < 1.2
    names = set(stack.client.metrics(job.id).names)
    assert {"speed/rows_per_s", "sync/time_s", "balance/lookup", "balance/gradient"} <= names
    assert {f"phase/{phase}_s" for phase in PHASES} <= names
    plans = {plan["name"]: plan for plan in started["tables"]}
    assert plans.keys() == {table.name for table in job.spec.embedding_tables}
    checkpoints = stack.client.checkpoints(job.id)
    assert checkpoints[-1].step == job.progress.total_steps
    assert any(checkpoint.is_best for checkpoint in checkpoints)
    logs = stack.client.logs(job.id)
    assert {"driver", "rank-0", "rank-1"} <= set(logs.sources)
    assert any(f"step {job.progress.total_steps}/" in line.text for line in logs.lines)


def submit(data: Path, *overrides: str) -> list[str]:
    """`shardloom submit --wait` of a job."""
    changes = [f"--set={change}" for change in (f"data.path={data}", *overrides)]
    return ["submit", "--wait", str(EXAMPLE_SPEC), *changes]


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_one_job_outlives_worker_controller_driver_and_service_and_the_next_finds_warm_workers(
    stack: Stack, small_movielens: Path, spoiled_movielens: Path
) -> None:
    all_room = "resources.cpus_per_worker=4"  # nothing that is dead may keep any
    settings = (*LONG, *TWO_WORKERS, "name=outlives", all_room)
    with stack.shardloom(*submit(small_movielens, *settings)) as command:
        job = wait_for(lambda: next(stack.client.iter_jobs(name="outlives"), None), "the job")
        before_worker = stack.wait_for_step(job.id, CHECKPOINT_EVERY + 5)
        os.kill(stack.pid(before_worker, "rank-1"), signal.SIGKILL)
        wait_for(lambda: len(stack.timeline(job.id, "workers_started")) == 2, "new workers", 120)
        before_controller = stack.wait_for_step(job.id, 2 * CHECKPOINT_EVERY + 5)
        (controller,) = _processes_of_ray(stack, "ray::TrainController")
        os.kill(controller, signal.SIGKILL)
        wait_for(lambda: len(stack.timeline(job.id, "workers_started")) == 3, "its workers", 120)
        before_driver = stack.wait_for_step(job.id, 3 * CHECKPOINT_EVERY + 5)
        os.kill(stack.pid(before_driver, "driver"), signal.SIGKILL)
        wait_for(lambda: len(stack.timeline(job.id, "workers_started")) == 4, "a new driver", 120)
        before_service = stack.wait_for_step(job.id, 4 * CHECKPOINT_EVERY + 5)
        before = stack.state
        stack.kill_service()
        log = stack.files(before_service, 1).log_path("rank-0")
        size = log.stat().st_size
        wait_for(lambda: log.stat().st_size > size, "training to go on without the service")
        stack.up()
        after = stack.state
        assert (after.ray, after.url) == (before.ray, before.url), "beside the Ray that lives"
        ended = stack.wait_for_end(job.id)
        output, messages = command.communicate(timeout=scaled(60))

    assert (command.returncode, output.strip()) == (0, job.id), messages
    assert "training completed" in messages
    check_what_was_told(stack, ended)
    assert ended.num_failures == 3
    runs = stack.timeline(job.id, "workers_started")
    assert [run["run_index"] for run in runs] == [0, 1, 2, 0]
    for run, before_kill in zip(
        runs[1:], (before_worker, before_controller, before_driver), strict=True
    ):
        assert run["resumed_step"] >= before_kill.progress.step - CHECKPOINT_EVERY
    reasons = [attempt.end_reason for attempt in stack.client.attempts(job.id)]
    assert reasons == [EndReason.DRIVER_LOST, EndReason.COMPLETED]

    def idle() -> set[int]:
        return _processes_of_ray(stack, "ray::IDLE")

    warm = wait_for(lambda: idle() if len(idle()) >= 2 else None, "workers for the next job", 60)
    with stack.shardloom(*submit(spoiled_movielens, *SMALL, *TWO_WORKERS)) as command:
        _, messages = command.communicate(timeout=scaled(180))
    assert command.returncode == 1
    assert "part-00000.parquet, row 5, column 'rating'" in messages
    failed = stack.client.get_job(next(stack.client.iter_jobs(statuses=[JobStatus.FAILED])).id)
    assert failed.reason is EndReason.DATA_ERROR
    assert failed.num_attempts == 1
    assert {stack.pid(failed, f"rank-{rank}") for rank in range(2)} <= warm


def test_groups_that_are_failure_domains_train_on_ray(stack: Stack, small_movielens: Path) -> None:
    short = "training.max_steps=20"
    job = stack.submit(small_movielens, *SMALL, "parallelism.placement=inter_host", short)
    ended = stack.wait_for_end(job.id)
    assert ended.status is JobStatus.SUCCEEDED, ended.message
    assert ended.num_failures == 0
    joined = stack.timeline(job.id, "group_joined")
    assert sorted(each["group"] for each in joined) == [0, 1]
