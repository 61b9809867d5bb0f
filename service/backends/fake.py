"""A backend that plays scripts: for tests of the control plane, its clients and the dashboard.

Its state is files in one folder, so it outlives the service as a cluster would, and a test may
change the course of a running attempt from another process:

    STATE_DIR/scripts/KEY.json     what the attempts of KEY do; KEY is an attempt id or a job id
    STATE_DIR/attempts/ID.json     what happened to an attempt so far
    STATE_DIR/attempts/ID.polls    a byte for each poll: hundreds of attempts are polled each second
    STATE_DIR/hosts.json           the hosts of the cluster, if a test set any
    STATE_DIR/down                 while it exists, nobody answers
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from service.backends.base import Backend, Submission
from service.domain.models import Observation, ObservedState
from service.errors import BackendUnreachable, SubmissionRefused
from trainer.layout.hosts import HostFacts
from trainer.protocol.untrusted import replace_untrusted


@dataclass(frozen=True)
class Script:
    """What an attempt does: one observation per poll, the last one for ever after.

    `refusal` is the text of a refused submission. The first `num_lost_answers` submissions raise
    `BackendUnreachable`; they arrive all the same if `arrives_unanswered`.
    """

    observations: tuple[str, ...] = ("pending", "running")
    refusal: str = ""
    num_lost_answers: int = 0
    arrives_unanswered: bool = False


@dataclass(frozen=True)
class Record:
    """What happened to an attempt so far."""

    attempt_id: str
    job_id: str
    entrypoint: str
    env: dict[str, str]
    has_arrived: bool = False
    num_submits: int = 0
    num_polls: int = 0
    num_stops: int = 0


class FakeBackend(Backend):
    name = "fake"

    def __init__(self, state_dir: Path) -> None:
        self.address = str(state_dir)
        self._scripts = state_dir / "scripts"
        self._attempts = state_dir / "attempts"
        self._down = state_dir / "down"
        self._hosts = state_dir / "hosts.json"
        for folder in (self._scripts, self._attempts):
            folder.mkdir(parents=True, exist_ok=True)

    # ---- the test's side

    def play(self, key: str, script: Script) -> None:
        """Let `key` (a job or an attempt id) follow a script, from its next poll on."""
        _write(self._scripts / f"{key}.json", asdict(script))

    def set_down(self, is_down: bool) -> None:
        """Cut the cluster off, or bring it back."""
        if is_down:
            self._down.touch()
        else:
            self._down.unlink(missing_ok=True)

    def set_hosts(self, *hosts: HostFacts) -> None:
        _write(self._hosts, [asdict(host) for host in hosts])

    def record(self, attempt_id: str) -> Record | None:
        """What happened to an attempt; None if nobody ever tried to submit it."""
        path = self._attempts / f"{attempt_id}.json"
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        with suppress(FileNotFoundError):
            record["num_polls"] = path.with_suffix(".polls").stat().st_size
        return Record(**record)

    def attempt_ids(self) -> list[str]:
        return sorted(path.stem for path in self._attempts.glob("*.json"))

    # ---- the service's side

    def submit(self, submission: Submission) -> None:
        self._check_up()
        script = self._script_of(submission.attempt_id, submission.job_id)
        record = self.record(submission.attempt_id) or Record(
            submission.attempt_id, submission.job_id, submission.entrypoint, submission.env
        )
        record = replace(record, num_submits=record.num_submits + 1)
        is_answered = record.num_submits > script.num_lost_answers
        has_arrived = not script.refusal and (is_answered or script.arrives_unanswered)
        self._keep(replace(record, has_arrived=record.has_arrived or has_arrived))
        if not is_answered:
            raise BackendUnreachable("the fake cluster did not answer in time, as scripted")
        if script.refusal:
            raise SubmissionRefused(script.refusal)

    def observe(self, attempt_id: str) -> Observation:
        if self._down.exists():
            return Observation(ObservedState.UNREACHABLE, "the fake cluster is down")
        record = self.record(attempt_id)
        if record is None or not record.has_arrived:
            return Observation(ObservedState.NOT_FOUND)
        script = self._script_of(attempt_id, record.job_id)
        with (self._attempts / f"{attempt_id}.polls").open("ab") as polls:
            polls.write(b".")
        if record.num_stops:
            return Observation(ObservedState.STOPPED)
        turn = min(record.num_polls, len(script.observations) - 1)
        return Observation(ObservedState(script.observations[turn]))

    def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
        return {attempt_id: self.observe(attempt_id) for attempt_id in attempt_ids}

    def stop(self, attempt_id: str) -> None:
        """From the next poll on the attempt is stopped."""
        self._check_up()
        record = self.record(attempt_id)
        if record is not None:
            self._keep(replace(record, num_stops=record.num_stops + 1))

    def check(self) -> str:
        self._check_up()
        return "fake cluster"

    def hosts(self) -> tuple[HostFacts, ...] | None:
        """The hosts that a test set; not to be had before."""
        self._check_up()
        if not self._hosts.exists():
            return None
        return tuple(HostFacts(**host) for host in json.loads(self._hosts.read_text()))

    def _check_up(self) -> None:
        if self._down.exists():
            raise BackendUnreachable("the fake cluster is down")

    def _script_of(self, attempt_id: str, job_id: str) -> Script:
        for key in (attempt_id, job_id, "default"):
            path = self._scripts / f"{key}.json"
            if path.exists():
                fields = json.loads(path.read_text())
                return Script(**{**fields, "observations": tuple(fields["observations"])})
        return Script()

    def _keep(self, record: Record) -> None:
        _write(self._attempts / f"{record.attempt_id}.json", asdict(record))


def _write(path: Path, document: dict[str, object] | list[dict[str, object]]) -> None:
    """Replace a file in one step: the other process never reads half of it."""
    replace_untrusted(path, json.dumps(document).encode(), path.parent, durable=False)
