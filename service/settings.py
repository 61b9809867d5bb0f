"""Typed settings of the service: built once in `main`, then passed down, never read elsewhere.

Every field is set by an environment variable with the prefix `SHARDLOOM_`, as in
`SHARDLOOM_PORT=8701`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.addresses import local_url


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


def _default_database_url(values: dict[str, Any]) -> str:
    return f"sqlite:///{values['home'] / 'shardloom.db'}"


def _default_runs_dir(values: dict[str, Any]) -> Path:
    return values["home"] / "runs"


def _default_service_url(values: dict[str, Any]) -> str:
    return local_url(values["host"], values["port"])


class Settings(BaseSettings):
    """What the service needs to know before it starts. Paths become absolute."""

    model_config = SettingsConfigDict(env_prefix="SHARDLOOM_", frozen=True, extra="ignore")

    home: AbsolutePath = Field(
        default=Path("~/.shardloom"),
        validate_default=True,
        description="Folder of everything that the service keeps.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8700, ge=1, le=65535, description="Port to listen on.")
    database_url: str = Field(
        default_factory=_default_database_url,
        description="SQLAlchemy URL of the store; SQLite under `home` by default.",
    )
    runs_dir: AbsolutePath = Field(
        default_factory=_default_runs_dir,
        description="Run storage: one folder per job, shared with the cluster.",
    )
    backend: Literal["ray_jobs", "fake"] = Field(
        default="ray_jobs", description="Where attempts run; `fake` plays scripts for tests."
    )
    ray_address: str = Field(
        default="http://127.0.0.1:8265", description="URL of the Ray Jobs API (the Ray dashboard)."
    )
    ray_auth_token: SecretStr | None = Field(
        default=None, description="Bearer token of the Ray cluster, if it wants one."
    )
    service_url: str = Field(
        default_factory=_default_service_url,
        description="URL under which drivers reach this service to post their records.",
    )
    trainer_python: str = Field(
        default=sys.executable, description="Python that runs the driver on the cluster."
    )
    dashboard: bool = Field(default=True, description="Whether to serve the dashboard pages.")
    reconcile_interval_s: PositiveFloat = Field(
        default=1.0, description="Seconds between two looks at every live job."
    )
    reconcile_threads: int = Field(
        default=8, ge=1, description="Jobs looked at in parallel, so that a slow one delays few."
    )
    backend_timeout_s: PositiveFloat = Field(
        default=5.0, description="Longest wait for one answer of the backend."
    )
    submit_timeout_s: PositiveFloat = Field(
        default=20.0, description="Longest wait for the backend to take a submission."
    )
    stream_poll_s: PositiveFloat = Field(
        default=0.5, description="Seconds between two looks for news of a followed stream."
    )
    stream_heartbeat_s: PositiveFloat = Field(
        default=15.0, description="Longest silence of a followed stream before a comment is sent."
    )
    shutdown_timeout_s: int = Field(
        default=5, ge=1, description="Longest wait for open requests at shutdown."
    )
