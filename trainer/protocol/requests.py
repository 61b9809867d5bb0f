"""Request files of a run: resize, growth limit, rewind, stop.

The service writes the first three, for the driver and (rewind) the workers; the driver writes the
last, which rank 0 reads at reports. `trainer.protocol.run_dir` has the paths. The newest resize
request replaces earlier ones: hosts that it does not name may be used again. The growth limit
exists while another job waits for room that this one would grow into.

After a rewind, what earlier attempts saved after the chosen checkpoint, or in a later attempt than
the one that saved it, is *superseded*: it is not
resumed from, and is removed once an attempt of the new line has committed a checkpoint. Until then
nothing is lost: without the file the newest checkpoint counts again.

Workers that end well have completed the training, or left the mark `stopping-RUN_INDEX`, once a
checkpoint for the stop is on storage. Before a pause in the domain `replica_group` the leader does
so for all groups; the driver then ends them.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_serializer

from trainer.protocol.run_dir import AttemptDir, write_whole
from trainer.protocol.untrusted import NotRegular, read_untrusted

logger = logging.getLogger(__name__)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ResizeRequest(_Request):
    """`workers` is the wanted T, None for as many as the spec and the cluster allow.

    `growth_limit` is the T beyond which the job shall not grow by itself, None for any.
    """

    id: str = ""
    workers: PositiveInt | None = None
    drain_hosts: frozenset[str] = Field(default=frozenset())
    growth_limit: PositiveInt | None = Field(default=None, exclude=True)

    @field_serializer("drain_hosts")
    def _in_order(self, hosts: frozenset[str]) -> list[str]:
        return sorted(hosts)

    def wanted_beside(self, num_workers: int) -> int | None:
        """The wanted T of a job that has `num_workers`: a limit to growth takes none away."""
        if self.growth_limit is None:
            return self.workers
        limit = max(self.growth_limit, num_workers)
        return limit if self.workers is None else min(self.workers, limit)


class _GrowthLimit(_Request):
    max_workers: PositiveInt


class ResizeRequests:
    """The newest request in the files of an attempt."""

    def __init__(self, files: AttemptDir) -> None:
        self._path = files.resize_request_path
        self._limit_path = files.growth_limit_path
        self._refused: bytes | None = None
        self._newest = ResizeRequest()

    def poll(self) -> ResizeRequest:
        """The newest request that could be read; an empty one when there was none."""
        try:
            limit = _GrowthLimit.model_validate_json(self._limit_path.read_bytes()).max_workers
        except (OSError, ValidationError):
            limit = None
        text = b""
        try:
            text = self._path.read_bytes()
            self._newest = ResizeRequest.model_validate_json(text)
        except OSError:
            pass  # no request, or storage fails for a moment
        except ValidationError as error:
            if text != self._refused:
                logger.warning("the request in %s is refused: %s", self._path.name, error)
            self._refused = text
        return self._newest.model_copy(update={"growth_limit": limit})


class Rewind(BaseModel):
    """Attempts from number `attempt_index` on go on from the folder named `checkpoint`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    checkpoint: str
    attempt_index: int = Field(ge=0)

    def supersedes(self, name: str) -> bool:
        """Whether the checkpoint in folder `name` is of the line that was left."""
        chosen, saved = _step_and_attempt(self.checkpoint), _step_and_attempt(name)
        if chosen is None or saved is None or name == self.checkpoint:
            return False
        is_later = saved[0] >= chosen[0] or saved[1] > chosen[1]
        return is_later and saved[1] < self.attempt_index


def read_rewind(path: Path) -> Rewind | None:
    """The choice in a file; None where nobody made one, or what is there is no choice.

    Raises OSError where storage is away: the choice must not be passed over.
    """
    try:
        return Rewind.model_validate_json(read_untrusted(path, path.parent))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (NotRegular, ValidationError) as error:
        logger.warning("%s is ignored: %s", path, error)
        return None


def _step_and_attempt(name: str) -> tuple[int, int] | None:
    found = re.match(r"step-(\d+)-a(\d+)-", name)
    return (int(found[1]), int(found[2])) if found else None


class StopRequest(_Request):
    """Worker group run `run_index` shall save and end; `cause` is one of `Resized`."""

    run_index: int = Field(ge=0)
    cause: str


def ask(files: AttemptDir, request: StopRequest) -> bool:
    """Put a request where the workers look for it; False where storage fails: try again."""
    try:
        write_whole(files.stop_request_path, request.model_dump_json().encode())
    except OSError as error:
        logger.warning("the workers are asked again, as storage fails: %s", error)
        return False
    return True


def is_stop_wanted(files: AttemptDir, run_index: int) -> bool:
    """Whether a request to stop lies there for this run; one that cannot be read is none."""
    try:
        request = StopRequest.model_validate_json(files.stop_request_path.read_bytes())
    except (OSError, ValidationError):
        return False
    return request.run_index == run_index
