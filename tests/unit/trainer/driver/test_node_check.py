"""The node check: who is measured when, and what leaves a host out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from trainer.coordination.detection import HostRecord
from trainer.driver.cluster import Host
from trainer.driver.node_check import (
    Check,
    NodeChecker,
    copied_bytes_per_s,
    faults,
    products_per_s,
    written_bytes_per_s,
)
from trainer.protocol.events import HostExcluded
from trainer.storage import Location

CPU = torch.device("cpu")
FAST: dict[str, float] = {"memory": 100.0, "network": 10.0}
SLOW: dict[str, float] = {"memory": 101.0, "network": 4.0}


def test_a_host_is_measured_by_the_median_of_all_and_by_the_faster_of_two() -> None:
    found = faults({"a": FAST, "b": SLOW}, 0.5)
    assert found == {
        "b": "is slow: network at 0.40 of the median of 2 hosts, recovery.min_node_speed is 0.5"
    }
    assert faults({"a": FAST, "b": SLOW}, 0.4) == {}
    assert faults({"a": FAST, "b": SLOW, "c": SLOW}, 0.5) == {}
    assert faults({"only": SLOW}, 1.0) == {}


def test_a_failed_check_excludes_a_host_unless_all_failed() -> None:
    assert faults({"a": FAST, "b": "it broke"}, 0.5) == {"b": "failed the node check: it broke"}
    assert faults({"a": "storage is away", "b": "storage is away"}, 0.5) == {}


@dataclass
class Cluster:
    """Two hosts; checks find what `results` says, at once or when a test completes them."""

    results: dict[str, Check] = field(default_factory=lambda: {"a": FAST, "b": FAST, "c": SLOW})
    now: float = 100.0
    waits: bool = False
    pending: list[tuple[Future[dict[str, Check]], list[str]]] = field(default_factory=list)
    told: list[HostExcluded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hosts = [self.host("a"), self.host("b")]
        self.checked: list[list[str]] = []
        self.record = HostRecord(exclude_after=3, exclude_s=60)
        self.find = NodeChecker(
            lambda: self.hosts, self.start, self.record, 0.5, self.told.append, lambda: self.now
        )

    @staticmethod
    def host(name: str) -> Host:
        return Host(name, num_slots=2, num_free=2, node_id=f"node-{name}")

    def start(self, new: Sequence[Host], hosts: Sequence[Host]) -> Future[dict[str, Check]]:
        names = [host.address for host in new]
        assert {*names} <= {host.address for host in hosts}
        self.checked.append(names)
        future: Future[dict[str, Check]] = Future()
        self.pending.append((future, names))
        if not self.waits:
            self.complete()
        return future

    def complete(self) -> None:
        future, names = self.pending.pop()
        future.set_result({name: self.results[name] for name in names if name in self.results})

    def room(self) -> dict[str, int]:
        return {host.address: host.num_free for host in self.find()}


def test_a_host_that_comes_later_has_no_room_until_it_is_checked() -> None:
    cluster = Cluster()
    assert cluster.room() == {"a": 2, "b": 2}
    cluster.waits = True
    cluster.hosts.append(cluster.host("c"))
    assert cluster.room() == {"a": 2, "b": 2, "c": 0}
    assert [host.num_unchecked for host in cluster.find()] == [0, 0, 2]
    cluster.complete()
    cluster.room()
    assert cluster.record.excluded(cluster.now) == {"c"}
    (event,) = cluster.told
    assert (event.host, event.until) == ("c", 160.0)
    assert event.reason.startswith("is slow: network at 0.40")
    # Placement avoids it, and may take it all the same where nothing else is left.
    assert cluster.room() == {"a": 2, "b": 2, "c": 2}
    assert cluster.checked == [["a", "b"], ["c"]]


def test_a_host_is_checked_again_once_its_exclusion_is_over() -> None:
    cluster = Cluster(results={"a": FAST, "b": "it broke"})
    cluster.room()
    cluster.now += 59
    cluster.room()
    assert cluster.checked == [["a", "b"]]
    cluster.now += 2
    cluster.results["b"] = FAST
    assert cluster.room() == {"a": 2, "b": 2}
    assert cluster.checked == [["a", "b"], ["b"]]
    assert cluster.record.excluded(cluster.now) == frozenset()


def test_a_host_that_later_ones_show_to_be_slow_is_checked_again_after_its_exclusion() -> None:
    slower = {"memory": 49.0, "network": 10.0}
    cluster = Cluster(results={"a": slower, "b": slower, "c": FAST, "d": FAST, "e": FAST})
    cluster.hosts = [cluster.host("a")]
    assert cluster.room() == {"a": 2}
    cluster.hosts += [cluster.host("c"), cluster.host("d")]
    cluster.room()
    cluster.room()
    assert [each.host for each in cluster.told] == ["a"]
    cluster.now += 61
    cluster.results["a"] = FAST
    cluster.waits = True
    cluster.hosts.append(cluster.host("e"))
    cluster.room()
    assert cluster.checked[-1] == ["a", "e"]
    cluster.complete()
    cluster.room()
    assert len(cluster.told) == 1, "what was found before does not count"


def test_a_check_without_an_answer_lets_the_host_in() -> None:
    cluster = Cluster(results={"a": FAST})
    assert cluster.room() == {"a": 2, "b": 2}
    assert not cluster.told

    failing = Cluster(waits=True)
    future: Future[dict[str, Check]] = Future()
    future.set_exception(ConnectionError("Ray is away"))
    failing.find = replace(failing.find, start=lambda new, hosts: future)
    assert failing.room() == {"a": 2, "b": 2}
    assert not failing.told


def test_a_host_whose_room_is_taken_is_checked_when_it_is_free() -> None:
    cluster = Cluster()
    busy = replace(cluster.host("c"), num_free=0)
    cluster.hosts.append(busy)
    cluster.room()
    assert cluster.checked == [["a", "b"]]
    cluster.hosts[2] = cluster.host("c")
    cluster.room()
    assert cluster.checked[1:] == [["c"]]


def test_measures_this_machine_and_leaves_nothing(tmp_path: Path) -> None:
    assert products_per_s(CPU, 64) > 0
    assert copied_bytes_per_s(CPU, 2**16) > 0
    assert written_bytes_per_s(Location.parse(tmp_path)) > 0
    assert not [*tmp_path.iterdir()]


def test_wrong_products_and_wrong_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.matmul

    def wrong(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        matmul(left, right, out=out)[3, 5] += 1
        return out

    monkeypatch.setattr(torch, "matmul", wrong)
    with pytest.raises(ArithmeticError, match="product of matrices is wrong"):
        products_per_s(CPU, 64)
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: self.zero_())
    with pytest.raises(ArithmeticError, match="memory holds something else"):
        copied_bytes_per_s(CPU, 2**16)
