"""What Ray's errors say: the cause, and evidence for it, without Ray's guesses."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests.harness.builders import spec
from tests.unit.trainer.driver.scripted import attempt_in
from trainer import failures
from trainer.failures import EndReason, Failure, WorkerFailure

pytest.importorskip("ray", reason="classification reads Ray's exception types")

from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayActorError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import (
    FailureDecision,
    create_failure_policy,
)
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from trainer.driver import ray_train
from trainer.driver.ray_train import check_machine, classify
from trainer.driver.torch_backend import let_gloo_use_address
from trainer.protocol.run_dir import RunDir
from trainer.protocol.versions import versions_here

WORKER = """A worker health check failed.
Worker info: Worker(
  actor=Actor(RayTrainWorker, aa671cc1),
  metadata=ActorMetadata(
    hostname='vm',
    node_id='1968b0bf',
    node_ip='10.0.0.3',
    pid=8358,
  ),
)"""
KILLED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n"
    "\tactor_id: aa671cc1\n\tpid: 8358\n\tnamespace: c94bd517\n\tip: 10.0.0.3\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer due to high memory usage, "
    "(2) ray stop --force was called, or (3) its node has died."
)


MEMORY_MONITOR = """7 worker(s) were killed due to the node running low on memory. Memory on the \
node (IP: 127.0.0.2, ID: 454ef5e9) was 22.48GB used / 23.54GB limit (0.954906)
OOM kill reason: Memory usage 24100282368B exceeded threshold of 24012685312B
Object store memory usage: [- objects spillable: 4
Eviction Stats:
Selected to kill: (Actor(6270): job ID=02, lease ID=09, pid=31054)"""


class _Death(RayActorError):
    def __init__(self, text: str, preempted: bool = False) -> None:
        super().__init__(None, text, False, preempted)


def classified(errors: dict[int, Exception]) -> Failure:
    return classify(WorkerGroupError("it failed", errors))


def died(text: str, preempted: bool = False) -> Failure:
    """The failure of workers of which rank 1 died with these words of Ray."""
    death = WorkerHealthCheckFailedError(WORKER, _Death(text, preempted))
    return classified({0: ValueError("odd"), 1: death})


def test_a_fault_named_by_a_worker_is_the_cause_with_its_evidence() -> None:
    failure = classified(
        {
            0: WorkerFailure(EndReason.WORKERS_LOST, "connection closed by peer"),
            2: WorkerFailure(EndReason.DATA_ERROR, "part-00000, row 5", {"exception": "DataError"}),
        }
    )
    assert failure.reason == EndReason.DATA_ERROR
    assert failure.message == "rank 2: part-00000, row 5"
    assert failure.evidence == {"rank": "2", "exception": "DataError"}


def test_a_dead_worker_is_a_loss_whatever_its_peers_say() -> None:
    failure = classified({0: ValueError("odd"), 3: ActorDiedError()})
    assert failure.reason == EndReason.WORKERS_LOST
    assert failure.is_death
    assert failure.evidence["rank"] == "3"


def test_ray_guesses_at_a_death_are_no_evidence() -> None:
    failure = died(KILLED)
    assert failure.reason == EndReason.WORKERS_LOST
    assert failure.blamed_host == failure.evidence["host"] == "10.0.0.3"
    assert failure.evidence["pid"] == "8358"
    assert failure.evidence["exit"].startswith("SYSTEM_ERROR: Worker unexpectedly exits")
    told = "rank 1 (pid 8358 on 10.0.0.3) was lost: its process ended without a word"
    assert failure.message == told


def test_a_dead_node_is_a_lost_host() -> None:
    assert died("The actor died because its node has died. Node Id: 1968").reason == (
        EndReason.HOST_LOST
    )
    assert classified({0: NodeDiedError("unreachable")}).reason == EndReason.HOST_LOST


def test_the_memory_monitors_victim_ran_out_of_memory() -> None:
    failure = died(MEMORY_MONITOR)
    assert failure.reason == EndReason.HOST_OOM
    assert failure.message.partition(" was lost: ")[2] == MEMORY_MONITOR.partition("\n")[0]
    assert classified({1: MemoryError("16 GiB")}).reason == EndReason.HOST_OOM
    assert classified({0: OutOfMemoryError("threshold")}).reason == EndReason.HOST_OOM


def test_a_controller_that_the_memory_monitor_ended_ran_out_of_memory(monkeypatch):
    def fit() -> None:
        raise OutOfMemoryError(MEMORY_MONITOR)

    monkeypatch.setattr(ray_train, "_trainer", lambda run: SimpleNamespace(fit=fit))
    monkeypatch.setattr(ray_train, "CLUSTER_LOSS_GRACE_S", 0.0)
    monkeypatch.setattr(ray_train, "cluster_answers", lambda: True)
    monkeypatch.setattr(ray_train, "free_placements_of_the_dead", lambda: None)
    failure = ray_train.train(ray_train.TrainRun(None, 1))
    told = MEMORY_MONITOR.partition("\n")[0]
    assert failure == Failure(EndReason.HOST_OOM, f"Ray Train was lost: {told}")


def test_a_preempted_node_is_told_from_a_lost_one() -> None:
    failure = died("The actor died because its node has died.", preempted=True)
    assert (failure.reason, failure.blamed_host) == (EndReason.PREEMPTED, "")


@pytest.mark.parametrize("preempted", [False, True])
def test_lost_workers_are_never_started_again_by_ray_train_itself(tmp_path, preempted: bool):
    run = ray_train.TrainRun(attempt_in(tmp_path, spec()).config(0), 2, node_ids=("a", "b"))
    policy = create_failure_policy(ray_train._trainer(run).run_config.failure_config)
    death = WorkerHealthCheckFailedError(WORKER, _Death("its node has died", preempted))
    lost = WorkerGroupError("it failed", {0: RuntimeError("connection closed"), 1: death})
    assert policy.make_decision(lost) is FailureDecision.RAISE


def test_an_error_in_training_code_is_told_with_its_type() -> None:
    failure = classified({1: ZeroDivisionError("division by zero")})
    assert failure.reason == EndReason.TRAINING_ERROR
    assert failure.message == "rank 1: ZeroDivisionError: division by zero"
    assert failure.evidence["exception"] == "ZeroDivisionError: division by zero"


def test_workers_that_found_no_room_in_time_are_told_from_those_that_died() -> None:
    timeout = classify(ControllerError(WorkerGroupStartupTimeoutError(4)))
    assert timeout.reason == EndReason.NO_ROOM
    assert "not all of 4 workers came in time" in timeout.message
    start = WorkerGroupStartupFailedError("ActorDiedError: its node has died. ip: 10.0.0.3")
    gone = classify(ControllerError(start))
    assert (gone.reason, gone.blamed_host) == (EndReason.HOST_LOST, "10.0.0.3")


def test_a_worker_on_a_machine_that_is_set_up_otherwise_writes_nothing_and_says_why(tmp_path):
    files = RunDir(tmp_path).attempt("job-x-a0")
    config = SimpleNamespace(
        run_dir=tmp_path, attempt_id="job-x-a0", versions=versions_here() | {"torch": "1.2.3"}
    )
    with pytest.raises(failures.WorkerFailure, match=r"1\.2\.3 at the driver") as raised:
        check_machine(config, "10.0.0.2")
    assert raised.value.reason == EndReason.VERSION_MISMATCH
    assert raised.value.blamed_host == "10.0.0.2"
    config.versions = versions_here()
    with pytest.raises(failures.WorkerFailure, match="mount the service's run storage") as raised:
        check_machine(config, "10.0.0.2")
    assert raised.value.reason == EndReason.STORAGE_ERROR
    assert not files.resolved_spec_path.parent.exists()
    files.resolved_spec_path.parent.mkdir(parents=True)
    files.resolved_spec_path.touch()
    check_machine(config, "10.0.0.2")


def test_gloo_uses_the_interface_of_the_address_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    let_gloo_use_address("192.0.2.1")  # nobody's
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    let_gloo_use_address("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    let_gloo_use_address("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
