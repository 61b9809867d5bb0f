"""The outbox: records reach the service once and in order, whatever the service does."""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import row_wise_plan, workers_started
from tests.harness.wait import scaled, wait_for
from trainer.protocol.events import EventBatch, Note
from trainer.protocol.outbox import EventWriter, OutboxPoster, read_batch
from trainer.protocol.run_dir import AttemptDir


class Service:
    """Takes batches as the control plane does: contiguous per stream, answering what it holds."""

    def __init__(self, faults: random.Random | None = None) -> None:
        self.taken: dict[str, list[float]] = {}
        self.faults = faults

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self._fails():
            raise httpx.ConnectError("nobody there")
        batch = EventBatch.model_validate_json(request.content)
        taken = self.taken.setdefault(batch.stream, [])
        if batch.first_seq > len(taken):
            return httpx.Response(409, json={"code": "sequence_gap", "next_seq": len(taken)})
        taken += [event.time for event in batch.events][len(taken) - batch.first_seq :]
        if self._fails():
            raise httpx.ReadTimeout("the answer was lost")
        return httpx.Response(200, json={"stream": batch.stream, "next_seq": len(taken)})

    def _fails(self) -> bool:
        return self.faults is not None and self.faults.random() < 0.3


Answers = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    """The outbox folder of an attempt."""
    folder = AttemptDir(tmp_path).outbox_dir
    folder.mkdir()
    return folder


def poster_of(folder: Path, service: Answers) -> OutboxPoster:
    """A poster whose thread is not started: `post_new` is called by hand."""
    client = httpx.Client(transport=httpx.MockTransport(service))
    return OutboxPoster(AttemptDir(folder.parent), client, "http://service/events")


def write_notes(writer: EventWriter, times: range) -> None:
    for time in times:
        writer.write(Note(time=time, message="x"))


def test_streams_are_posted_in_order_and_later_runs_of_worker_groups_later(outbox: Path) -> None:
    service = Service()
    for name, count in (("driver", 3), ("workers-10", 1), ("workers-2", 1200)):
        write_notes(EventWriter(outbox / f"{name}.jsonl"), range(count))
    (outbox / "copy of driver.jsonl").write_bytes((outbox / "driver.jsonl").read_bytes())
    poster_of(outbox, service).post_new()
    assert [(name, len(times)) for name, times in service.taken.items()] == [
        ("driver", 3),
        ("workers-2", 1200),
        ("workers-10", 1),
    ]
    assert service.taken["workers-2"] == list(range(1200))


@pytest.mark.parametrize(("num_shards", "is_told"), [(0, True), (512, False)])
def test_workers_of_5000_tables_start_whatever_their_plan_takes(
    outbox: Path, num_shards: int, is_told: bool
) -> None:
    size = 512
    tables = [row_wise_plan(f"table_{number:04}", num_embeddings=10**9) for number in range(5000)]
    shards = [tables[0].shards[0].model_copy(update={"position": p}) for p in range(num_shards)]
    # The first hundred tables have that many shards, the others are data-parallel.
    tables = [each.model_copy(update={"shards": shards}) for each in tables[:100]] + [
        each.model_copy(update={"sharding_type": "data_parallel", "shards": []})
        for each in tables[100:]
    ]
    groups = {
        "world_size": 8 * size,
        "shard_group_size": size,
        "num_replicas": 8,
        "sharding_groups": [list(range(g * size, (g + 1) * size)) for g in range(8)],
        "replica_groups": [list(range(s, 8 * size, size)) for s in range(size)],
        "hosts": [f"ip-10-0-{n // 256}-{n % 256}.eu-central-1.compute.internal" for n in range(512)]
        * 8,
        "table_shards": {each.name: each.sharding_type for each in tables},
    }
    started = workers_started().model_copy(update={**groups, "tables": tables})
    EventWriter(outbox / "workers-0.jsonl").write(started)
    (told,), _ = read_batch(outbox / "workers-0.jsonl", 0)
    assert told == (started if is_told else started.model_copy(update={"tables": []}))


def test_an_unfinished_line_waits_for_its_end_and_a_damaged_one_keeps_the_numbering(
    outbox: Path,
) -> None:
    service = Service()
    path = outbox / "driver.jsonl"
    write_notes(EventWriter(path), range(1))
    poster = poster_of(outbox, service)
    with path.open("a", buffering=1) as file:
        file.write('{"bro')
        poster.post_new()
        assert service.taken == {"driver": [0]}
        file.write("ken\n")
    write_notes(EventWriter(path), range(2, 3))
    poster.post_new()
    [first, _, last] = service.taken["driver"]
    assert (first, last) == (0, 2)


def test_a_service_that_lost_records_gets_them_again(outbox: Path) -> None:
    service = Service()
    poster = poster_of(outbox, service)
    write_notes(EventWriter(outbox / "driver.jsonl"), range(4))
    poster.post_new()
    del service.taken["driver"][2:]
    write_notes(EventWriter(outbox / "driver.jsonl"), range(4, 5))
    poster.post_new()
    assert service.taken == {"driver": list(range(5))}
    write_notes(EventWriter(outbox / "driver.jsonl"), range(5, 7))
    # A new poster goes on where the service is.
    poster_of(outbox, service).post_new()
    assert service.taken == {"driver": list(range(7))}


@given(st.integers(0, 10_000))
def test_lost_requests_and_answers_lose_and_double_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("attempt") / "outbox"
    service = Service(random.Random(seed))
    writer, poster = EventWriter(folder / "driver.jsonl"), poster_of(folder, service)
    for start in range(0, 20, 4):
        write_notes(writer, range(start, start + 4))
        poster.post_new()
    service.faults = None
    poster.post_new()
    assert service.taken["driver"] == list(range(20))


def test_lines_are_kept_while_storage_refuses_them(outbox: Path) -> None:
    writer = EventWriter(outbox / "driver.jsonl")
    outbox.rmdir()
    write_notes(writer, range(2))
    outbox.mkdir()
    write_notes(writer, range(2, 3))
    service = Service()
    poster_of(outbox, service).post_new()
    assert service.taken == {"driver": [0, 1, 2]}


class FullAtTheClose(io.FileIO):
    """A file on NFS: that there is no room for the end of it is said when it is closed."""

    def close(self) -> None:
        if not self.closed:
            self.truncate(self.seek(0, os.SEEK_END) - 3)
            super().close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_are_kept_that_storage_refuses_at_the_close(
    outbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventWriter(outbox / "driver.jsonl")
    write_notes(writer, range(1))
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode, buffering: FullAtTheClose(path, mode))
        write_notes(writer, range(1, 3))
    write_notes(writer, range(3, 4))
    service = Service()
    poster_of(outbox, service).post_new()
    assert service.taken == {"driver": [0, 1, 2, 3]}


def test_a_message_that_names_a_file_by_bytes_that_are_no_utf_8_is_told(outbox: Path) -> None:
    path = outbox / "driver.jsonl"
    name = b"caf\xe9.parquet".decode(errors="surrogateescape")
    EventWriter(path).write(Note(time=0, message=f"{name} is damaged"))
    [note], _ = read_batch(path, 0)
    assert isinstance(note, Note) and note.message == "caf?.parquet is damaged"


ODD_ANSWERS = {
    "a proxy's page": httpx.Response(200, text="<html>sign in</html>"),
    "a redirect": httpx.Response(302, headers={"Location": "https://sign.in"}),
    "an acknowledgement without a number": httpx.Response(200, json={"stream": "driver"}),
    "an acknowledgement of nothing": httpx.Response(200, json={"next_seq": 0}),
    "a conflict that contradicts itself": httpx.Response(409, json={"next_seq": 7}),
    "another conflict": httpx.Response(409, json={"code": "conflict"}),
    "a conflict that is a list": httpx.Response(409, json=[]),
    "a number below zero": httpx.Response(409, json={"next_seq": -1}),
}


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_records_go_out_once_the_service_answers_as_it_should(
    outbox: Path, answer: httpx.Response
) -> None:
    service = Service()
    odd: list[httpx.Response] = [answer] * 3

    def answer_oddly_at_first(request: httpx.Request) -> httpx.Response:
        return odd.pop() if odd else service(request)

    write_notes(EventWriter(outbox / "driver.jsonl"), range(2))
    poster = poster_of(outbox, answer_oddly_at_first)
    for num_left in (2, 1, 0):
        poster.post_new()
        assert (len(odd), service.taken) == (num_left, {}), "it is not asked again at once"
    poster.post_new()
    assert service.taken == {"driver": [0, 1]}


def test_the_thread_outlives_whatever_goes_wrong_and_says_so_once(
    outbox: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service()
    write_notes(EventWriter(outbox / "driver.jsonl"), range(2))
    client = httpx.Client(transport=httpx.MockTransport(service))
    files = AttemptDir(outbox.parent)
    poster = OutboxPoster(files, client, "http://service/events", interval_s=0.001)
    num_failed = 0
    read = AttemptDir.stream_paths

    def fail_at_first(files: AttemptDir) -> list[Path]:
        nonlocal num_failed
        if num_failed < 3:
            num_failed += 1
            raise RuntimeError("what nobody thought of")
        return read(files)

    monkeypatch.setattr(AttemptDir, "stream_paths", fail_at_first)
    poster.start()
    wait_for(lambda: num_failed == 3, "the poster to fail three times", poll_s=0.001)
    assert poster._thread.is_alive()
    poster.close(scaled(10))
    assert service.taken == {"driver": [0, 1]}
    assert caplog.text.count("posting them failed") == 1
