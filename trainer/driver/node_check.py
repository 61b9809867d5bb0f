"""The node check: what a host does in a second, before workers are placed on it.

With `recovery.min_node_speed` every host is checked when it is first seen: matrix products, memory,
the way to another host, and the storage of the run. One that fails, or is slower in one of these
than that share of the median of all hosts checked so far, is excluded and named. A check without an
answer means nothing: the host is used. On GPUs each free one is checked, and the slowest counts.
"""

from __future__ import annotations

import logging
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainer.coordination.detection import HostRecord
from trainer.driver.cluster import Host
from trainer.protocol.events import HostExcluded
from trainer.storage import Location

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_TIMEOUT_S = 60.0
_NUM_TRIES = 3  # of which the fastest counts
_BLOCK_BYTES = 16 * 2**20  # over the network
_FILE_BYTES = 4 * 2**20
# Rows of the matrix, and bytes written to memory. Products of 0 to 3 stay exact in fp32.
_SIZES = {"cpu": (512, 32 * 2**20), "cuda": (4096, 512 * 2**20)}

Speeds = dict[str, float]
"""Of one host, per second, by what was measured; more is better."""
Check = Speeds | str
"""What a check found; a text says how it failed."""


def faults(checks: Mapping[str, Check], min_node_speed: float) -> dict[str, str]:
    """Hosts that are not to be used, each with what is wrong with it.

    Where no check succeeded the hosts are not to blame: storage may be away.
    """
    measured = {host: each for host, each in checks.items() if not isinstance(each, str)}
    if not measured:
        return {}
    found = {h: f"failed the node check: {each}" for h, each in checks.items() if h not in measured}
    for host, speeds in measured.items():
        for name, speed in speeds.items():
            # Of two hosts the faster one is the measure.
            known = [each[name] for each in measured.values() if name in each]
            share = speed / statistics.median_high(known)
            if share < min_node_speed:
                found[host] = (
                    f"is slow: {name} at {share:.2f} of the median of {len(known)} hosts, "
                    f"recovery.min_node_speed is {min_node_speed:g}"
                )
    return found


@dataclass
class NodeChecker:
    """The hosts that `read_hosts` finds; without room as long as they are being checked.

    `start` begins the check of some of all hosts; results go by address. The first are waited for.
    A host that was excluded is checked again when that is over.
    """

    read_hosts: Callable[[], list[Host]]
    start: Callable[[Sequence[Host], Sequence[Host]], Future[dict[str, Check]]]
    record: HostRecord
    min_node_speed: float
    write: Callable[[HostExcluded], None]
    clock: Callable[[], float] = time.time
    _checks: dict[str, Check] = field(default_factory=dict)
    _checked: dict[str, str] = field(default_factory=dict)  # addresses by id of Ray's node
    _running: tuple[Future[dict[str, Check]], list[Host]] | None = None

    def __call__(self) -> list[Host]:
        hosts = self.read_hosts()
        excluded = self.record.excluded(self.clock())
        new = [
            host
            for host in hosts
            if host.num_free and host.node_id not in self._checked and host.address not in excluded
        ]
        if new and self._running is None:
            self._running = self.start(new, hosts), new
        if self._running and (not self._checked or self._running[0].done()):
            self._take(*self._running)
            self._running = None
        withheld = {host.node_id for host in new} - self._checked.keys()
        return [
            replace(h, num_free=0, num_unchecked=h.num_free) if h.node_id in withheld else h
            for h in hosts
        ]

    def _take(self, future: Future[dict[str, Check]], hosts: Sequence[Host]) -> None:
        """Apply what the check of `hosts` found."""
        try:
            self._checks |= future.result()
        except Exception as error:  # whatever Ray raises, it says nothing about the hosts
            logger.warning("the node check came to nothing: %s", error)
        self._checked |= {host.node_id: host.address for host in hosts}
        now = self.clock()
        excluded = self.record.excluded(now)
        for address, reason in faults(self._checks, self.min_node_speed).items():
            if address not in excluded:
                self.write(self.record.exclude(address, reason, now))
                del self._checks[address]
                self._checked = {id_: at for id_, at in self._checked.items() if at != address}


def check_hosts(
    new: Sequence[Host], hosts: Sequence[Host], folder: Location, *, use_gpu: bool
) -> dict[str, Check]:
    """Check the `new` of all `hosts` at once, within `_TIMEOUT_S`; those that answered."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def on(host: Host, function: Callable[..., Any], *arguments: Any, num_gpus: int = 0) -> Any:
        pinned = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
        options = {"num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": pinned}
        # Its process ends, or it would keep memory of the GPU.
        task: Any = ray.remote(max_calls=1, max_retries=0)(function)
        return task.options(**options).remote(*arguments)

    blocks = {host.node_id: on(host, make_block) for host in hosts}
    tasks: dict[Any, str] = {}
    for host in new:
        others = [blocks[other.node_id] for other in hosts if other.node_id != host.node_id]
        # Each from another one, so that none sends to many.
        block = [others[hosts.index(host) % len(others)]] if others else []
        for _ in range(host.num_free if use_gpu else 1):
            task = on(host, measure_node, block, folder, num_gpus=int(use_gpu))
            tasks[task] = host.address
    answered, silent = ray.wait([*tasks], num_returns=len(tasks), timeout=_TIMEOUT_S)
    found: dict[str, Check] = {}
    for task in answered:
        known, check = found.get(tasks[task]), _result_of(task)
        if isinstance(known, dict) and isinstance(check, dict):
            check = {name: min(speed, known[name]) for name, speed in check.items()}
        if check is not None and not isinstance(known, str):
            found[tasks[task]] = check
    for task in silent:
        logger.warning("%s gave no answer to the node check", tasks[task])
        ray.cancel(task, force=True)
    logger.info("node check: %s", found)
    return found


def make_block() -> bytes:
    """What another host fetches."""
    return bytes(_BLOCK_BYTES)


def measure_node(block: Sequence[Any], folder: Location) -> Speeds:
    """Measure the host of this process; raises what shows that it cannot be trusted.

    `block` may have a reference to what `make_block` made on another host.
    """
    import ray
    import torch

    device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
    num_rows, num_bytes = _SIZES[device.type]
    speeds = {
        "matrix products": products_per_s(device, num_rows),
        "memory": copied_bytes_per_s(device, num_bytes),
        "storage": written_bytes_per_s(folder),
    }
    if block:
        ray.wait([*block], fetch_local=False)  # until it is made
        speeds["network"] = _BLOCK_BYTES / _fastest_s(lambda: ray.get([*block]), num_tries=1)
    return speeds


def products_per_s(device: torch.device, num_rows: int) -> float:
    """Multiplications per second in products of [n, n] matrices; raises `ArithmeticError`."""
    import torch

    left, right = (
        torch.randint(0, 4, (num_rows, num_rows), device=device).float() for _ in range(2)
    )
    product = left @ right
    took_s = _fastest_s(lambda: torch.matmul(left, right, out=product), device)
    if not torch.equal(product.double().sum(1), left.double() @ right.double().sum(1)):
        raise ArithmeticError("a product of matrices is wrong: replace the processor or GPU")
    return num_rows**3 / took_s


def copied_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a copy in memory; raises `ArithmeticError`."""
    import torch

    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for pattern in (0x55, 0xAA):
        if not bool((memory.fill_(pattern) == pattern).all()):
            raise ArithmeticError("memory holds something else than was written: replace it")
    copy = torch.empty_like(memory)
    return num_bytes / _fastest_s(lambda: copy.copy_(memory), device)


def written_bytes_per_s(folder: Location) -> float:
    """Bytes per second of a small file written to `folder`; raises `StorageError`."""
    file = folder / f"node-check-{uuid.uuid4().hex}"
    try:
        return _FILE_BYTES / _fastest_s(lambda: file.write_bytes(bytes(_FILE_BYTES)))
    finally:
        file.delete()


def _result_of(task: Any) -> Check | None:
    """None where the task says nothing about its host."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        speeds: Speeds = ray.get(task)
    except RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        logger.warning("the node check came to nothing: %s", error)
        return None
    return speeds


def _fastest_s(
    operation: Callable[[], object],
    device: torch.device | None = None,
    num_tries: int = _NUM_TRIES,
) -> float:
    """The fewest seconds that it took in some tries."""
    import torch

    is_cuda = device is not None and device.type == "cuda"
    times_s = []
    for _ in range(num_tries):
        began = time.perf_counter()
        operation()
        if is_cuda:
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - began)
    return min(times_s)
