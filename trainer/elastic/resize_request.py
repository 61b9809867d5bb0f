"""What people ask of a running job's size, and how far the queue lets it grow.

    service ──► resize-request.json {"id", "workers", "drain_hosts"}    read by the driver
    service ──► growth-limit.json {"max_workers"}

The newest request says all of it: hosts that it does not name may be used again. The limit is
there while a job waits for room that this one would grow into.
"""

from __future__ import annotations

import logging

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from trainer.run_dir import AttemptDir

logger = logging.getLogger(__name__)


class ResizeRequest(BaseModel):
    """`workers` is the wanted T, None for as many as the spec and the cluster allow.

    `growth_limit` is the T beyond which the job shall not grow by itself, None for any.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = ""
    workers: PositiveInt | None = None
    drain_hosts: frozenset[str] = Field(default=frozenset())
    growth_limit: PositiveInt | None = Field(default=None, exclude=True)

    def wanted_beside(self, num_workers: int) -> int | None:
        """The wanted T of a job that has `num_workers`: a limit to growth takes none away."""
        if self.growth_limit is None:
            return self.workers
        limit = max(self.growth_limit, num_workers)
        return limit if self.workers is None else min(self.workers, limit)


class _GrowthLimit(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    max_workers: PositiveInt


class ResizeRequests:
    """The newest request in the files of an attempt."""

    def __init__(self, files: AttemptDir) -> None:
        self._path = files.resize_request_path
        self._limit_path = files.growth_limit_path
        self._refused: bytes | None = None
        self._newest = ResizeRequest()

    def poll(self) -> ResizeRequest:
        """The newest request that could be read; one without wishes when there was none."""
        return self._poll_request().model_copy(update={"growth_limit": self._poll_limit()})

    def _poll_limit(self) -> int | None:
        try:
            return _GrowthLimit.model_validate_json(self._limit_path.read_bytes()).max_workers
        except (OSError, ValidationError):
            return None  # the queue asks for nothing; what cannot be read limits nothing either

    def _poll_request(self) -> ResizeRequest:
        try:
            text = self._path.read_bytes()
        except OSError:
            return self._newest  # nobody asks, or storage is away for a moment
        try:
            self._newest = ResizeRequest.model_validate_json(text)
        except ValidationError as error:
            if text != self._refused:
                logger.warning("the request in %s is refused: %s", self._path.name, error)
            self._refused = text
        return self._newest
