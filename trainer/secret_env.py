"""Secrets of a job on their way from the service to the environment of its processes.

The driver fetches them with its attempt's own token and hands them to the workers inside of what
Ray pickles for them, in an object that never shows its values: not in Ray's dashboard, which shows
what a Train run is configured with, and not in a log. They are in no file and in no runtime
environment.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from trainer import failures
from trainer.failures import Failure

logger = logging.getLogger(__name__)

# As long as a service may take to be restarted somewhere else.
PATIENCE_S = 600.0
_RETRY_S = 2.0


@dataclass(frozen=True, repr=False)
class SecretEnv:
    """Environment variables whose values nobody sees by accident."""

    values: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"SecretEnv({', '.join(sorted(self.values))})"

    def set_in(self, environment: MutableMapping[str, str]) -> None:
        """Set the variables."""
        environment.update(self.values)


NO_SECRETS = SecretEnv()


class SecretsUnavailable(Exception):
    """The secrets of a job could not be had; `failure` says why the attempt ends."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(failures.STORAGE_ERROR, message)


def secret_names(path: Path) -> list[str]:
    """Names of the secrets that a job has, from the file that the service left; none without."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    return [str(name) for name in found]


def fetch_secrets(
    http: httpx.Client,
    url: str,
    patience_s: float = PATIENCE_S,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> SecretEnv:
    """Secrets at a URL of the service; raises `SecretsUnavailable` if refused, or away for long."""
    give_up_at = clock() + patience_s
    while True:
        try:
            response = http.get(url)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
        else:
            if response.is_success:
                return SecretEnv(dict(response.json()["secrets"]))
            cause = f"HTTP {response.status_code}"
            if response.is_client_error and response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                raise SecretsUnavailable(f"the service refuses the job's secrets ({cause})")
        if clock() >= give_up_at:
            raise SecretsUnavailable(f"the service does not give the job's secrets ({cause})")
        logger.warning("waiting for the job's secrets: %s", cause)
        wait(_RETRY_S)
