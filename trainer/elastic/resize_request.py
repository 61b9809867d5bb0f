"""What people ask of a running job's size: a number of workers, hosts to leave.

    service ──► resize-request.json {"id", "workers", "drain_hosts"}    read by the driver

The newest file says all of it: hosts that it does not name may be used again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

logger = logging.getLogger(__name__)


class ResizeRequest(BaseModel):
    """`workers` is the wanted T, None for as many as the spec and the cluster allow."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = ""
    workers: PositiveInt | None = None
    drain_hosts: frozenset[str] = Field(default=frozenset())


class ResizeRequests:
    """The newest request in the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refused: bytes | None = None
        self._newest = ResizeRequest()

    def poll(self) -> ResizeRequest:
        """The newest request that could be read; one without wishes when there was none."""
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
