"""The sync between groups that are torch.distributed worlds of their own.

Rank s of every group in a round averages its shard with the other ranks s. What rounds, overlap and
exact rounds are is said in docs/design/elastic.md. A round that fails changes nothing: rows stay
touched, what was trained stays trained, and the next round covers it, with the groups that are
left.

In a round that overlaps, ranks wait for the others and for the union of the touched rows, take a
snapshot of these, and train on. After `sync.overlap` steps, or the next lease if that is over
before, they wait for the verdict and apply the averages as `trainer.parallel.sync` does.

The base of the changes that travel with `sync.dtype` bf16 or fp16 is the state at the last commit,
on which all copies agree, also after rounds that failed. Delayed means of moments are formed by the
thread while the next lease is trained, and applied with the next commit: a rank that could not form
them refuses that round. They are forgotten when a round fails, the members change or a round is
exact; nothing is lost, as their rows count as differing until means are applied.

Where copies are compared (`divergence_check`), a vote carries checksums of the rows that the round
leaves alone, which the last commit left equal, and of the averages.

Buffers of modules, such as the running means of a BatchNorm, go along with the dense part: a joiner
has those of the others with the first commit that it hears.

A copy's weight is the number of rows that it was trained on since the last sync, or the sum of
those rows' weights where rows do not all count alike. A group that only listens, or whose loss
became NaN, has weight 0.

The ranks s of a generation are a bare backend (gloo, on GPUs NCCL) outside any world; they meet in
a store that one of them serves (`trainer.elastic.rendezvous`). A rank that cannot go on drops the
group at once, which closes its sockets: gloo does not report that a rank has given up, and the
others would wait for it until the time-out. A pending gloo operation cannot be stopped, only
abandoned: it ends by itself later, in memory that nobody uses any more. Calls of NCCL may block: a
thread aborts the group when one takes too long, and torch's watchdog, which would end this process
as soon as a peer is gone, is told to leave that group alone.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.coordination.client import LONGEST_S, CoordinatorClient
from trainer.coordination.messages import (
    Arrive,
    Round,
    RoundMember,
    RoundResult,
    Vote,
    host_of,
)
from trainer.elastic.peer_copy import DonorServer, Joiner, pieces_of
from trainer.elastic.rendezvous import RendezvousStore
from trainer.parallel.collectives import Block, ReplicaCollectives, in_background
from trainer.parallel.divergence import checksum
from trainer.parallel.model import TwoDParallel
from trainer.parallel.row_store import RowStore
from trainer.parallel.sync import (
    Extra,
    OverflowWarning,
    PendingSync,
    SyncReport,
    SyncThread,
    blocks_of,
    moments_of,
    watched,
    weight_of,
    whole,
)
from trainer.parallel.touched_rows import RowNumbers, Rows, Window, unite
from trainer.spec.parallelism import DivergenceCheckSpec, SyncSpec
from trainer.spec.training import RecoverySpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo as Gloo
    from torch.distributed import ProcessGroupNCCL as Nccl

_POLL = timedelta(milliseconds=20)
_MEET_POLL_S, _MAX_MEET_POLL_S = 0.001, 0.05
_DEVICE_POLL_S = 0.0002
_PROBE_S = 1.0
_TELLING_S = 1.0
_PROBES_AT_ONCE = 32
_ABORT_S = 1.0
_CONNECT_S = 30.0  # at least, for NCCL to form a group, which may be of hundreds of hosts
# Read as a backend is made: else torch's watchdog ends the process at an error of a peer, or when
# an abort takes long.
_UNWATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_NEVER = timedelta(days=1)
MakeArrival = Callable[[], Arrive]


class ExchangeError(RuntimeError):
    """A group could not be formed, or one of its operations failed: a peer is gone, or slow.

    `suspects` are the places of peers that could not be reached. Who `gave_up` was told to.
    """

    def __init__(
        self, message: str, suspects: Sequence[int] = (), *, gave_up: bool = False
    ) -> None:
        super().__init__(message)
        self.suspects, self.gave_up = tuple(suspects), gave_up


@dataclass(frozen=True)
class ReplicaRank:
    """This rank is `index` of the `size` ranks with its shard in a generation."""

    generation: int
    index: int
    size: int


def limit_nccl(timeout_s: float) -> None:
    """Let no call on a non-blocking communicator wait for NCCL for good.

    Nor for longer than forming a group may take. Torch reads it in the process's first collective.
    """
    limit_s = math.ceil(max(timeout_s, _CONNECT_S))
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(limit_s))


def new_nccl(store: dist.Store, replica: ReplicaRank) -> Nccl:
    """A backend none of whose calls blocks for good, and which never ends this process.

    `limit_nccl` comes before.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # the exchange's own limit counts, at which it is aborted
    options.config.blocking = 0
    before = {name: os.environ.get(name) for name in _UNWATCHED}
    os.environ.update(_UNWATCHED)
    try:
        return dist.ProcessGroupNCCL(store, replica.index, replica.size, options)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class CrossGroupProcessGroup:
    """A replica group outside torch.distributed's world (a `ReplicaGroup`).

    Collective over the group; every method may raise `ExchangeError`, after which the group is
    only good for `drop`. One operation takes at most `timeout_s`, and less when
    `is_aborted` becomes true. `advance` is called after each: together they may take long. Where
    one fails, the peers are named that take no connection at the `address` (host:port) of each.
    """

    def __init__(
        self,
        replica: ReplicaRank,
        store: dist.Store,
        device: torch.device,
        timeout_s: float,
        is_aborted: Callable[[], bool],
        advance: Callable[[], None] = lambda: None,
        address: str = "",
        host: int = 0,
    ) -> None:
        """`store` is that of the generation, which the peer at place `host` serves."""
        self.replica = replica
        self._host = host
        self._advance = advance
        self._device = device
        self._timeout_s = timeout_s
        self._is_aborted = is_aborted
        self._is_stuck = False  # an abandoned operation is still pending
        self._is_dropped = False
        self._has_aborted = False  # as a call took too long, or was given up
        self._launching = threading.Lock()
        self._store = store  # torch's groups keep only what it is for C++
        self._backend: Gloo | Nccl | None = None
        try:
            self._peers = self._meet(address)
            self._form()
        finally:
            if isinstance(store, RendezvousStore):
                store.close()

    def _meet(self, address: str) -> list[str]:
        """Wait until all are here; where each listens. Forming the backend waits too, but names
        nobody."""
        store, here = self._store, [f"here{index}" for index in range(self.replica.size)]
        deadline = time.monotonic() + self._timeout_s
        started = time.monotonic()
        try:
            store.set(here[self.replica.index], address)
            while not store.check(here):
                self._check(deadline, "meet")
                waited_s = time.monotonic() - started
                time.sleep(min(max(_MEET_POLL_S, waited_s / 10), _MAX_MEET_POLL_S))
            return [each.decode() for each in store.multi_get(here)]
        except RuntimeError as error:
            gave_up = self._is_given_up and not _is_telling(started, self._timeout_s)
            absent = [] if gave_up else self._absent(here)
            message = f"the replica group could not meet: {_first_line(error)}"
            raise ExchangeError(message, absent, gave_up=gave_up) from None

    def _absent(self, here: Sequence[str]) -> list[int]:
        """Places of those who have not come; of the host alone, where the store does not answer."""
        echo, deadline = f"echo{self.replica.index}", time.monotonic() + _PROBE_S
        try:
            self._store.set(echo, "")
            while not self._store.check([echo]):
                if time.monotonic() > deadline:
                    return [self._host]
                time.sleep(_MEET_POLL_S)
            return [place for place, key in enumerate(here) if not self._store.check([key])]
        except RuntimeError:
            return [self._host]

    def _unreachable(self) -> list[int]:
        """Places of the peers that take no connection: of whom a failed exchange tells nothing."""
        peers = [place for place in range(self.replica.size) if place != self.replica.index]
        with ThreadPoolExecutor(max_workers=_PROBES_AT_ONCE) as probes:
            can_connect = list(probes.map(_can_connect, [self._peers[place] for place in peers]))
        return [place for place, is_there in zip(peers, can_connect, strict=True) if not is_there]

    def _form(self) -> None:
        timeout, store, replica = timedelta(seconds=self._timeout_s), self._store, self.replica
        try:
            if self._device.type == "cuda":
                self._backend = new_nccl(store, replica)
                self._connect(self._backend)
            else:
                self._backend = self._formed(
                    lambda: dist.ProcessGroupGloo(store, replica.index, replica.size, timeout)
                )
        except RuntimeError as error:
            gave_up = self._is_given_up
            cause = self._failure("connect") if self._has_aborted else error
            self.drop()
            message = f"no replica group was formed: {_first_line(cause)}"
            suspects = [] if gave_up else self._unreachable()
            raise ExchangeError(message, suspects, gave_up=gave_up) from None

    def _formed(self, form: Callable[[], Gloo]) -> Gloo:
        """Form a backend in a thread, which is left behind where this rank must not wait for it."""
        forming = in_background(form, "forming")
        deadline = time.monotonic() + self._timeout_s + _ABORT_S
        while True:
            with suppress(TimeoutError):
                return forming.result(_POLL.total_seconds())
            self._check(deadline, "connect")

    def _connect(self, backend: Nccl) -> None:
        """Connect the ranks now: the first exchange would wait for that."""
        limit_s = max(self._timeout_s, _CONNECT_S)
        with self._aborting_at(time.monotonic() + limit_s):
            backend.eager_connect_single_device(self._device)
        if self._has_aborted:
            raise self._failure("connect")
        options = dist.BarrierOptions()
        options.device_ids = [self._device.index or 0]
        if problem := self._problem_of(lambda backend: backend.barrier(options), limit_s):
            raise ExchangeError(problem)

    def size(self) -> int:
        return self.replica.size

    def rank(self) -> int:
        return self.replica.index

    def all_gather(self, out: torch.Tensor) -> None:
        part = out.view(self.size(), -1)[self.rank()]
        self._complete(lambda backend: backend._allgather_base(out, part))

    def all_to_all(self, out: torch.Tensor, parts: torch.Tensor) -> None:
        sizes: list[int] = []
        if self._device.type == "cuda":
            # Without them torch takes ncclAlltoAll, and for a failure that it is still in progress.
            sizes = [len(out) // self.replica.size] * self.replica.size
        self._complete(lambda backend: backend.alltoall_base(out, parts, sizes, sizes))

    def _complete(self, start: Callable[[Any], dist.Work]) -> None:
        # The operation holds the sockets open: no frame of the error's traceback may hold it.
        if problem := self._problem_of(start, self._timeout_s):
            gave_up = self._is_given_up
            raise ExchangeError(
                f"an exchange between the copies failed: {problem}",
                [] if gave_up else self._unreachable(),
                gave_up=gave_up,
            )

    def _problem_of(self, start: Callable[[Any], dist.Work], limit_s: float) -> str:
        """Run an operation to its end; returns its error, empty if there is none."""
        backend = self._backend
        if backend is None:
            return "the group was dropped meanwhile"
        deadline = time.monotonic() + limit_s
        try:
            with self._aborting_at(deadline):
                self._is_stuck = True
                with self._launching:
                    work = start(backend)
                del backend  # it may be dropped meanwhile
                while not self._is_over(work):
                    self._check(deadline, "answer")
                # NCCL's wait is for the stream, and says nothing of errors.
                if self._device.type == "cuda" and (error := work.exception()):
                    return self._cause_of(error)
                work.wait()
                self._is_stuck = False
        except RuntimeError as error:
            return self._cause_of(error)
        # What was aborted may look like what succeeded.
        if self._has_aborted or self._is_dropped:
            return str(self._failure("answer"))
        self._advance()
        return ""

    @contextmanager
    def _aborting_at(self, deadline: float) -> Iterator[None]:
        """Abort the group where the block goes on beyond a `deadline`, or is given up.

        A call of NCCL may hang that only ends so; of gloo none does.
        """
        has_ended = threading.Event()

        def watch() -> None:
            while not has_ended.wait(_POLL.total_seconds()):
                if time.monotonic() > deadline or self._is_given_up:
                    self._has_aborted = True
                    self._abort(self._backend)
                    return

        if self._device.type == "cuda":
            threading.Thread(target=watch, name="abort timer", daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def _cause_of(self, error: RuntimeError) -> str:
        """What went wrong with an operation that failed, or was aborted as it took too long."""
        return str(self._failure("answer")) if self._has_aborted else _first_line(error)

    def _is_over(self, work: dist.Work) -> bool:
        """Whether `work` has ended, successfully or not; waits a little for it."""
        if self._device.type == "cuda":
            time.sleep(0 if work.is_completed() else _DEVICE_POLL_S)
        else:
            # Not over yet, or over with an error, which the last wait raises again.
            with suppress(RuntimeError):
                work.wait(_POLL)
        return work.is_completed()

    @property
    def _is_given_up(self) -> bool:
        return self._is_dropped or self._is_aborted()

    def _check(self, deadline: float, verb: str) -> None:
        if self._is_given_up or time.monotonic() > deadline:
            raise self._failure(verb)

    def _failure(self, verb: str) -> ExchangeError:
        if self._is_given_up:
            message = "the round was given up, since a group was lost or is too slow"
            return ExchangeError(message, gave_up=True)
        limit = f"recovery.exchange_timeout_s is {self._timeout_s:g} s"
        if verb == "connect" and self._device.type == "cuda":
            limit += f"; NCCL has at least {_CONNECT_S:g} s for that"
        return ExchangeError(f"some rank did not {verb} in time ({limit})")

    def drop(self) -> None:
        """Close the sockets, so that nobody waits for this rank. Harmless when repeated."""
        self._is_dropped = True
        held = [self._backend]
        self._backend = None
        if held[0] is None:
            return
        aborting = threading.Thread(target=self._abort, args=held, name="abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)
        if self._is_stuck or aborting.is_alive():
            # Its end waits for the operation's, which the rank must not.
            threading.Thread(target=held.clear, name="dropped group", daemon=True).start()
        else:
            held.clear()

    def _abort(self, backend: Gloo | Nccl | None) -> None:
        """End what the backend does, but not while it is being told: torch looks at what NCCL frees
        then. That ends by itself (`limit_nccl`).
        """
        if backend is None:
            return
        is_free = self._launching.acquire(timeout=max(self._timeout_s, _CONNECT_S) + _ABORT_S)
        try:
            backend.abort()
        finally:
            if is_free:
                self._launching.release()


def _is_telling(started: float, timeout_s: float) -> bool:
    """Whether a rank has waited long enough for others to blame them, though it was told to stop.

    Where a host is cut off all wait alike, but the first to have waited in vain ends it for all.
    """
    return time.monotonic() - started > max(timeout_s - _TELLING_S, timeout_s / 2)


def _can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _PROBE_S).close()
    except OSError:
        return False
    return True


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]


@dataclass
class Attempt:
    """One try at a sync: what is averaged, the averages once they are formed, and how it ended.

    `rows` are those in it, or None when it has all; `moment_rows` those whose moments are in it.
    Where training goes on meanwhile, `touched` are the rows that this rank had touched by then, and
    `ended` their bases. `checksums` are those of its vote. `measured` are the sums over all
    validation rows, where the round joins them.
    `error` says why this rank could not go through with it, `suspects` names the groups that it
    could not reach, and who `gave_up` was told to. `is_settled` says that the `result` is applied,
    and `is_demoted` that the group has to forget by it what it trained.
    """

    round: Round
    rows: Rows | None
    moment_rows: Rows | None
    pending: PendingSync | None = None
    touched: torch.Tensor | None = None
    ended: Window | None = None
    checksums: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    measured: torch.Tensor | None = None
    error: str = ""
    suspects: tuple[int, ...] = ()
    gave_up: bool = False
    result: RoundResult | None = None
    is_settled: bool = False
    is_demoted: bool = False


@dataclass(frozen=True)
class DelayedMoments:
    """Means of the moments of `rows`, formed since a commit by the members of its `generation`."""

    generation: int
    rows: Rows | None
    pending: PendingSync
    wait: Callable[[], None]


class GroupSync:
    """Keeps one rank's shard in sync with those of the other groups.

    All ranks of all groups call `begin` and `end` in turn. `members` are the groups of the newest
    round. `is_exact` says whether the last commit left the copies equal in all that they hold, and
    compared where `check` asks for that; `is_always_exact` whether every one does. `measured` are
    the sums of this shard's ranks over the validation rows, where the newest round has joined them;
    `own_measured` gives this rank's, float64 [k], zeros where it has measured nothing.
    """

    def __init__(
        self,
        model: TwoDParallel,
        spec: SyncSpec,
        extra: Extra,
        client: CoordinatorClient,
        recovery: RecoverySpec,
        warn: Callable[[str], None],
        check: DivergenceCheckSpec | None = None,
        own_measured: Callable[[], torch.Tensor] = lambda: torch.zeros(0, dtype=torch.float64),
    ) -> None:
        self._spec, self._own_measured = spec, own_measured
        self.measured: torch.Tensor | None = None
        self._check = check
        self.is_always_exact = spec.is_always_exact and check is None
        # The means of a sync that overlaps are late anyway.
        is_late = spec.optimizer_state == "delayed" and bool(spec.overlap)
        self._averages_state = spec.optimizer_state == "every" or is_late
        self._delayed: DelayedMoments | None = None
        self.is_exact = True
        self._num_bytes = 0  # sent for what was applied since the last report
        self._overflows = OverflowWarning(warn)
        self._extra = extra
        self._client = client
        self._timeout_s = min(recovery.exchange_timeout_s, LONGEST_S)
        self._device = model.groups.device
        self._flush_caches = model.flush_caches
        self._numbers = RowNumbers(model.table_shards(), self._device)
        self._base, self._touched = watched(self._numbers, spec)
        # Rows whose moments may differ as the policy does not average them: alike on all copies.
        self._stale = torch.zeros(self._numbers.num_rows, dtype=torch.bool, device=self._device)
        self._server = DonorServer(client.identity, pieces_of(self._numbers), client.token)
        self.donor = self._server.address  # where this rank serves its shard
        self._joiner: Joiner | None = None
        self._group: CrossGroupProcessGroup | None = None
        self._round = 0
        self._is_current = False
        self._is_closed = False
        self._attempt: Attempt | None = None
        self._await_verdict: Callable[[], None] | None = None
        self._thread = SyncThread(torch.device("cpu"))
        is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None
        self.members: tuple[RoundMember, ...] = ()

    def renew(self) -> None:
        """Take the state for what all groups hold, as after a load."""
        self._base.renew()

    def close(self) -> None:
        """Drop the process group, and stop copying and serving."""
        self._is_closed = True
        if self._await_verdict is None and self._delayed is None:
            self._drop_group()
        self._stop_listening()
        self._server.close()
        if self._touched:
            self._touched.close()

    @torch.no_grad()
    def begin(self, make_arrival: MakeArrival) -> bool:
        """Begin a sync; whether to train on until `end`. Collective over all ranks of all groups.

        `make_arrival` gives this rank's `Arrive` for every try.
        """
        attempt = self._attempt = self._open(make_arrival())
        if not attempt.round.overlaps:
            return False
        if self._touched:
            attempt.touched = self._touched.bits.clone()
            self._touched.clear()
            attempt.ended = self._base.begin_window(is_kept=True)
        self._await_verdict = self._start(partial(self._decide, attempt))
        return True

    @torch.no_grad()
    def land(self) -> None:
        """Apply the averages of a sync that overlaps, before it is ended."""
        if self._attempt and not self._attempt.is_settled:
            self._settle(self._attempt)

    @torch.no_grad()
    def end(self, make_arrival: MakeArrival) -> tuple[RoundResult, SyncReport]:
        """End the sync that was begun, and apply it. Collective over all ranks of all groups.

        It is tried until it is committed. The result is of a round that did not commit where the
        group must forget what it trained, and where it has trained on: then the rows count as
        touched again, and the next sync covers both intervals.
        """
        attempt, self._attempt = self._attempt, None
        assert attempt, "a sync is begun first"
        while True:
            if not attempt.is_settled:
                self._settle(attempt)
            result = attempt.result
            assert result, "it is settled"
            if result.committed or attempt.is_demoted or attempt.round.overlaps:
                num_bytes, self._num_bytes = self._num_bytes, 0
                numbers, rows = self._numbers, attempt.rows
                report = SyncReport(num_bytes, numbers.density(rows), numbers.counts(rows))
                return result, report
            attempt = self._open(make_arrival().model_copy(update={"may_overlap": False}))

    def _open(self, arrival: Arrive) -> Attempt:
        """Wait for the next round, and find out what it averages."""
        is_copied = self._joiner is not None and self._joiner.is_complete
        num_copied = self._joiner.num_bytes if self._joiner else 0
        update = {"has_copied": is_copied, "copied_bytes": num_copied}
        round_ = self._client.arrive(arrival.model_copy(update=update))
        self._round, self.members = round_.round, round_.members
        attempt = Attempt(round_, self._numbers.none(), self._numbers.none())
        with self._noting_errors(attempt):
            self._attend(round_, is_copied)
            self._await_moments(round_)
            self._prepare(attempt)
        return attempt

    @contextmanager
    def _noting_errors(self, attempt: Attempt) -> Iterator[None]:
        """The group is dropped at any error, so that the others do not wait for this rank."""
        try:
            yield
        except ExchangeError as problem:
            self._drop_group()
            attempt.error, attempt.gave_up = str(problem), problem.gave_up
            members = attempt.round.members
            attempt.suspects = tuple(members[place].group for place in problem.suspects)
        except BaseException:
            self._drop_group()
            raise

    def _start(self, task: Callable[[], None]) -> Callable[[], None]:
        """Let the thread do `task` on the side stream; the function returned waits for it."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

        @torch.no_grad()
        def run() -> None:
            if self._stream:
                torch.cuda.set_device(self._device)  # or this thread takes memory of GPU 0, too
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                task()

        def wait() -> None:
            done()
            if self._stream:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

        done = self._thread.submit(run)
        return wait

    def _decide(self, attempt: Attempt) -> None:
        """Form the averages, vote, and wait for the verdict."""
        round_ = attempt.round
        if not attempt.error:
            with self._noting_errors(attempt):
                if attempt.pending:
                    attempt.pending.form_means()
                    if attempt.checksums:
                        attempt.checksums.append(("averages", checksum(attempt.pending.means)))
        if self._is_closed:
            return
        if self._joiner:
            self._joiner.vote()
        error = attempt.error
        vote = Vote(
            round=round_.round,
            commit=round_.commit,
            ok=not error,
            error=error,
            suspects=attempt.suspects,
            gave_up=attempt.gave_up,
            checksums=(tuple((name, int(each)) for name, each in attempt.checksums),),
        )
        attempt.result = self._client.vote(vote)

    def _settle(self, attempt: Attempt) -> None:
        """Wait for the verdict. Apply what was averaged if all agreed; else it stays touched."""
        if self._await_verdict:
            self._await_verdict()
            self._await_verdict = None
        else:
            self._decide(attempt)
        result, attempt.is_settled = attempt.result, True
        assert result, "a verdict was waited for"
        was_current, self._is_current = self._is_current, result.standing == "current"
        attempt.is_demoted = was_current and not self._is_current
        self.measured = attempt.measured if result.committed else None
        if result.committed:
            assert not attempt.error, "a round commits when all ranks hold its averages"
            self._apply(attempt)
            if not (result.should_leave or result.has_finished):
                self._delay_moments(attempt)
        else:
            self._drop_group()
            if self._touched and attempt.touched is not None:
                self._touched.bits |= attempt.touched
                self._base.resume_window(attempt.ended)
        if self._is_current:
            assert not self._joiner or self._joiner.is_complete, "it counts once its copy is exact"
            self._stop_listening()
        elif self._joiner and result.standing == "initial":
            self._joiner.restart()

    def _attend(self, round_: Round, is_copied: bool) -> None:
        """Copy from the donor of the round where this group listens, else stop copying."""
        if self.members[self._index].standing != "listening":
            self._stop_listening()
            return
        if self._touched:
            # What it trained, if anything, does not count.
            self._touched.clear()
            self._base.begin_window()
        if self._joiner is None:
            self._joiner = Joiner(
                self._client.identity, self._numbers, self._timeout_s, self._client.token
            )
        has_missed = self._joiner.attend(round_)
        # Where it has missed a commit, which the coordinator knows, this round makes nothing of it.
        if is_copied and not (has_missed or self._joiner.is_complete):
            raise ExchangeError(
                "the donor of this group's copy was lost; it goes on with another one"
            )

    def _stop_listening(self) -> None:
        if self._joiner:
            self._joiner.close()
        self._joiner = None

    @property
    def _index(self) -> int:
        """Place of this group in the round."""
        own = (self._client.identity.group, self._client.identity.incarnation)
        return [(each.group, each.incarnation) for each in self.members].index(own)

    def _prepare(self, attempt: Attempt) -> None:
        """Find the rows to average, and take their snapshot where training goes on.

        Collective over the ranks s of the round.
        """
        round_ = attempt.round
        if round_.joins_validation:
            attempt.measured = self._join_measured(round_)
        if len(round_.members) == 1 or round_.is_idle:
            return
        replicas = ReplicaCollectives([self._group_of(round_)], self._device, _weights_in(round_))
        attempt.rows = self._touched_rows(replicas)
        weights, states = self._extra()
        block = self._exact_block if round_.is_exact else self._base.block
        blocks = [*blocks_of(self._numbers, attempt.rows, weight_of, block), *whole(weights)]
        if round_.is_exact or self._spec.optimizer_state != "never":
            blocks += whole(states)
        if round_.is_exact or self._averages_state:
            attempt.moment_rows = self._stale_rows(attempt.rows, replicas)
            blocks += blocks_of(self._numbers, attempt.moment_rows, moments_of, block)
        attempt.pending = PendingSync(blocks, replicas, trains_on=round_.overlaps)
        if self._check and (round_.is_exact or round_.commit % self._check.every_syncs == 0):
            attempt.checksums = self._checksums(attempt.rows)

    def _join_measured(self, round_: Round) -> torch.Tensor:
        """What the ranks s of all groups have measured, added up in one order. Collective."""
        own, size = self._own_measured(), len(round_.members)
        if size == 1:
            return own
        found = own.new_empty(size, len(own))
        found[self._index] = own
        self._group_of(round_).all_gather(found.view(-1))
        return found.sum(dim=0)

    def _touched_rows(self, replicas: ReplicaCollectives) -> Rows | None:
        """Rows that any copy touched, or None for all. They stay touched. Collective."""
        if self._touched is None:
            return None
        rows = self._united(self._touched.bits, replicas)
        is_dense = self._numbers.density(rows) > self._spec.full_above
        return None if self._spec.dtype == "fp32" and is_dense else rows

    def _stale_rows(self, touched: Rows | None, replicas: ReplicaCollectives) -> Rows | None:
        """Rows whose moments differ where the rows `touched` are to be averaged. Collective."""
        if touched is None or self._touched is None or self._averages_state:
            return touched
        return self._united(self._stale | self._touched.bits, replicas)

    def _united(self, bits: torch.Tensor, replicas: ReplicaCollectives) -> Rows:
        """The rows whose `bits` any copy has set. Collective."""
        united = bits.clone()
        unite(united, replicas)
        return self._numbers.of_bits(united)

    def _checksums(self, rows: Rows | None) -> list[tuple[str, torch.Tensor]]:
        """Of each shard but its `rows`, which are averaged; without moments that may differ."""
        self._flush_caches()
        keep = torch.ones(self._numbers.num_rows, dtype=torch.bool, device=self._device)
        _mark(keep, rows, False)
        found = []
        for shard, first in zip(self._numbers.shards, self._numbers.first, strict=True):
            tensors = shard.tensors if self._averages_state else (shard.weight,)
            of_shard = checksum(tensors, keep[first : first + len(shard.weight)])
            found.append((shard.table, of_shard))
        return found

    def _exact_block(self, store: RowStore, rows: torch.Tensor | None) -> Block:
        """A block that travels as it is; its base, where one is kept, becomes the mean."""
        return replace(self._base.block(store, rows), wire=None)

    def _group_of(self, round_: Round) -> CrossGroupProcessGroup:
        """The process group of the round's generation, formed where there is none yet."""
        replica = ReplicaRank(round_.generation, self._index, len(round_.members))
        if self._group and self._group.replica != replica:
            self._drop_group()
        if self._group is None:
            self._group = CrossGroupProcessGroup(
                replica,
                self._store_of(round_),
                self._device,
                self._timeout_s,
                self._is_aborted,
                self._client.reporter.advance,
                self.donor,
                host_of(round_.members),
            )
        return self._group

    def _is_aborted(self) -> bool:
        return self._is_closed or self._client.is_aborted(self._round)

    def _store_of(self, round_: Round) -> RendezvousStore:
        """Connect to the store of the round's generation."""
        identity, host = self._client.identity, host_of(round_.members)
        started = time.monotonic()
        wait_s = max(self._timeout_s, _CONNECT_S) if self._stream else self._timeout_s
        try:
            return RendezvousStore(
                round_.stores[identity.rank],
                round_.generation,
                self._client.token,
                self._is_aborted,
                connect_s=self._timeout_s,
                wait_s=wait_s,
            )
        except OSError as error:
            gave_up = self._is_aborted() and not _is_telling(started, self._timeout_s)
            raise ExchangeError(
                f"group {round_.members[host].group} cannot be reached, where the copies meet: "
                f"{error}",
                [] if gave_up else [host],
                gave_up=gave_up,
            ) from None

    def _drop_group(self) -> None:
        if self._group:
            self._group.drop()
        self._group = None

    def _apply(self, attempt: Attempt) -> None:
        round_, joiner = attempt.round, self._joiner
        rows = attempt.rows, attempt.moment_rows
        with joiner.applying(*rows, round_.is_idle) if joiner else nullcontext():
            if attempt.pending:
                self._base.landed(self._land(attempt.pending))
        if self._delayed:
            self._land(self._delayed.pending)
            _mark(self._stale, self._delayed.rows, False)
            self._delayed = None
        if round_.is_idle:
            return
        self.is_exact = self.is_always_exact or round_.is_exact
        if round_.is_exact:
            self._stale.zero_()
        elif not self._averages_state:
            _mark(self._stale, attempt.rows, True)
        if self._touched and not round_.overlaps:
            self._touched.clear()
            self._base.begin_window()

    def _land(self, pending: PendingSync) -> list[Block]:
        self._num_bytes += pending.replicas.num_bytes
        self._overflows.count(pending.replicas.num_overflows)
        return pending.land()

    def _delay_moments(self, attempt: Attempt) -> None:
        """Begin to average the moments that the round which was committed left out."""
        round_ = attempt.round
        if self._averages_state or self._spec.optimizer_state == "never":
            return
        if attempt.pending is None or round_.is_exact:
            return
        replicas = ReplicaCollectives([self._group_of(round_)], self._device, _weights_in(round_))
        rows = None if self._touched is None else self._numbers.of_bits(self._stale)
        pending = PendingSync(blocks_of(self._numbers, rows, moments_of, Block), replicas)
        wait = self._start(pending.form_means)
        self._delayed = DelayedMoments(round_.generation, rows, pending, wait)

    def _await_moments(self, round_: Round) -> None:
        """Wait for delayed means, which are applied with this round; or forget them.

        Raises `ExchangeError` where this rank could not form them.
        """
        delayed = self._delayed
        if delayed is None:
            return
        if delayed.generation == round_.generation:
            delayed.wait()
        else:
            self._drop_group()  # which ends what the thread waits for
        if delayed.generation != round_.generation or round_.is_exact:
            self._delayed = None


def _mark(bits: torch.Tensor, rows: Rows | None, value: bool) -> None:
    bits[slice(None) if rows is None else rows.numbers] = value


def _weights_in(round_: Round) -> list[float]:
    """How much each copy counts; those that train count alike where nobody trained anything."""
    if any(round_.weights):
        return list(round_.weights)
    return [float(member.standing == "current") for member in round_.members]
