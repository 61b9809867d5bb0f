"""What runs in the processes of `harness.elastic`: ranks that write down what they do, and who
coordinates them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.harness.emulated import INTERFACE, enter_network
from tests.harness.processes import die_with_parent, rank_environment
from tests.harness.ranks import Backend, claim_gpu
from tests.harness.wait import scaled
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec.job import JobSpec

FAILED = 1
COLLECTIVE_TIMEOUT_S = scaled(20)
_CONTROL_POLL_S = 0.01
# Of how many leases the pace is waited for before a share of the validation rows is measured.
_MEASURING_PACES = 10


@dataclass(frozen=True)
class Control:
    """What a harness tells all ranks at any time: the armed faults, and how slow they train.

    `pace_s` is added to each lease, so that what befalls a job fits into it.
    """

    faults: str = "[]"
    pace_s: float = 0.0

    def write(self, path: Path) -> None:
        """Put it where the ranks look; the file appears whole."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Control:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class RankLife:
    """One life of one rank; `control` is where its harness speaks, and `coordinator` where
    its coordinator listens (host:port).

    It lives on the `network` of an emulated host, or else on the loopback interface.
    """

    config: WorkerConfig
    rank: int
    store_port: int
    host: str
    control: Path
    records: Path
    coordinator: str
    network: Path | None = None

    @property
    def name(self) -> str:
        group = self.config.group
        return f"g{group.group}i{group.incarnation}r{self.rank}"


class Recorder:
    """Appends what happens to a rank to its record, a line each, with the wall clock's time."""

    def __init__(self, life: RankLife) -> None:
        self._identity = {
            "group": life.config.group.group,
            "incarnation": life.config.group.incarnation,
            "rank": life.rank,
        }
        self._file = (life.records / f"{life.name}.jsonl").open("a", buffering=1)

    def __call__(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.time(), **self._identity, **values}
        self._file.write(json.dumps(line) + "\n")


def backend_of(spec: JobSpec) -> Backend:
    """NCCL where the job asks for GPUs, which all ranks of a machine share."""
    return "nccl" if spec.resources.device == "cuda" else "gloo"


def live(life: RankLife) -> None:
    """Be one rank to the end: exit code 0 if its group is through, `FAILED` if it cannot go on."""
    die_with_parent()
    log = (life.records / f"{life.name}.log").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if life.network:
        enter_network(life.network)
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, force=True)
    logging.getLogger("trainer").setLevel(logging.INFO)
    # As workers on Ray do.
    os.environ.update(life.config.secrets.values)
    record = Recorder(life)
    record("started", pid=os.getpid())
    listener = ControlListener(life)
    _enter_world(life)
    from trainer.failures import WorkerFailure

    try:
        metrics = _run(life, record, listener)
    except WorkerFailure as error:
        record("failed", reason=error.reason, message=error.message)
        os._exit(FAILED)
    record("ended", metrics=metrics)
    # The group's store is in the process of rank 0, and others may still talk to it.
    time.sleep(0.2 if life.rank == 0 else 0)
    os._exit(0)


class ControlListener:
    """Does as the harness says, from a thread of its own."""

    def __init__(self, life: RankLife) -> None:
        from trainer import fault_injection

        group = life.config.group
        self._path, self._site = life.control, (group.group, life.rank, group.incarnation)
        self.control = Control.read(life.control)
        os.environ[fault_injection.VARIABLE] = self.control.faults
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        from trainer import fault_injection

        while True:
            time.sleep(_CONTROL_POLL_S)
            control = Control.read(self._path)
            if control.faults != self.control.faults:
                # A rank that is still starting arms what is there once more.
                os.environ[fault_injection.VARIABLE] = control.faults
                fault_injection.arm(*self._site)
            self.control = control


def _enter_world(life: RankLife) -> None:
    import torch
    import torch.distributed as dist

    from trainer.elastic.group_sync import limit_nccl

    torch.set_num_threads(1)
    spec = life.config.spec
    num_ranks = spec.parallelism.group_size
    interface = INTERFACE if life.network else "lo"
    os.environ.update(rank_environment(life.rank, num_ranks, life.store_port, interface))
    backend, device = backend_of(spec), None
    if backend == "nccl":
        limit_nccl(spec.recovery.exchange_timeout_s)
        place = life.config.group.group * num_ranks + life.rank
        device = claim_gpu(place, spec.parallelism.world_size)
    dist.init_process_group(
        backend,
        rank=life.rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=device,
    )


def _run(life: RankLife, record: Recorder, listener: ControlListener) -> dict[str, float]:
    from trainer import fault_injection
    from trainer.coordination.client import Identity
    from trainer.elastic.group_session import connect, run_group

    config, group = life.config, life.config.group
    _record_sessions(record, listener)
    _record_faults(record)
    fault_injection.install(config, life.rank)
    identity = Identity(
        group=group.group,
        incarnation=group.incarnation,
        rank=life.rank,
        num_ranks=config.spec.parallelism.group_size,
        host=life.host,
    )
    timeout_s = config.spec.recovery.heartbeat_timeout_s
    with connect(identity, lambda: life.coordinator, timeout_s, config.token) as client:
        return run_group(config, client, life.host)


def _record_faults(record: Recorder) -> None:
    """Let this process record what befalls it, before it does."""
    from trainer import fault_injection

    takes = fault_injection._takes

    def recorded(fault: fault_injection.Fault, step: int) -> bool:
        is_taken = takes(fault, step)
        if is_taken:
            record("struck", kind=fault.kind, phase=fault.phase)
        return is_taken

    fault_injection._takes = recorded


def _record_sessions(record: Recorder, listener: ControlListener) -> None:
    """Let every session of this process record its leases, its shares of a validation, its commits
    and a hash of its state.

    There is no hash where the copy holds more than what is committed.
    """
    from trainer.coordination.messages import RoundResult
    from trainer.elastic.group_session import GroupSession

    train_lease, take = GroupSession.train_lease, GroupSession._take
    measure_share = GroupSession.measure_share

    def recorded_lease(self: GroupSession) -> None:
        lease = self._leases[0] if self._leases else None
        train_lease(self)
        if lease:
            time.sleep(listener.control.pace_s)
            record("trained", **lease.model_dump())

    def recorded_share(self: GroupSession) -> None:
        record("measuring", share=self._result.share if self._result else None)
        time.sleep(_MEASURING_PACES * listener.control.pace_s)  # for a test to kill it meanwhile
        measure_share(self)

    def recorded_result(self: GroupSession, result: RoundResult) -> None:
        take(self, result)
        is_ahead = self._num_steps_ahead > 0
        others = set() if self.group.group == result.leader else {"open_epochs"}
        record(
            "committed",
            standing=result.standing,
            hash=None if is_ahead else state_hash(self),
            **result.ledger.model_dump(exclude=others),
        )

    GroupSession.train_lease = recorded_lease  # type: ignore[method-assign]
    GroupSession.measure_share = recorded_share  # type: ignore[method-assign]
    GroupSession._take = recorded_result  # type: ignore[method-assign]


def state_hash(session: Any) -> str:
    """Of everything that copies of a shard have in common: tables, moments, dense part.

    Without moments where the last sync left them different.
    """
    from tests.harness.sessions import snapshot
    from tests.harness.small_model import dense_parameters

    found = snapshot(session)
    is_averaged = session.spec.parallelism.sync.optimizer_state == "every"
    if not (is_averaged or session.group_sync.is_exact):
        tables = session.model.state_dict()
        weights = {key: shard for key, shard in found["shards"].items() if key[0] in tables}
        assert 0 < len(weights) < len(found["shards"])
        found = {"shards": weights, "dense": dense_parameters(session.model)}
    digest = hashlib.blake2b(digest_size=12)
    for part in (found["shards"], found["dense"]):
        for name in sorted(part, key=str):
            digest.update(str(name).encode())
            digest.update(part[name].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- the coordinator


def coordinate(
    config: WorkerConfig,
    num_groups: int,
    address: str,
    network: Path | None,
    folder: Path,
    pipe: Connection,
) -> None:
    """Coordinate a job until killed: its ranks at `address`, its harness at the end of `pipe`.

    `network` is the emulated host's to which `address` belongs, if it does to one.
    """
    die_with_parent()
    if network:
        enter_network(network)
    log = (folder / "coordinator.log").open("a", buffering=1)
    sys.stdout = sys.stderr = log
    logging.basicConfig(
        level=logging.INFO, stream=log, format="%(asctime)s %(message)s", force=True
    )
    coordinator = _start_coordinator(config, num_groups, address)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            coordinator.stop()
            return
        found = getattr(coordinator, method)
        try:
            pipe.send((None, found(*args) if callable(found) else found))
        except Exception:  # the harness raises it again
            pipe.send((traceback.format_exc(), None))


def _start_coordinator(config: WorkerConfig, num_groups: int, address: str):
    from trainer.elastic.coordinator.interface import MembershipPolicy
    from trainer.elastic.coordinator.leases import LeaseBook
    from trainer.elastic.coordinator.server import Coordinator, CoordinatorConfig
    from trainer.protocol.run_dir import RunDir

    host, _, port = address.rpartition(":")
    attempt = RunDir(config.run_dir).attempt(config.attempt_id).root
    return Coordinator(
        CoordinatorConfig(
            policy=MembershipPolicy.of(config.spec, num_groups),
            book=LeaseBook.of(config.spec),
            host=host,
            port=int(port),
            attempt_dir=attempt,
            token=config.token,
        )
    )
