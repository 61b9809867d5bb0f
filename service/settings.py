"""Settings of the service: built once in `main`, then passed down, never read elsewhere.

Every field is set by an environment variable with the prefix `SHARDLOOM_`, as in
`SHARDLOOM_PORT=8701`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    IPvAnyNetwork,
    PositiveFloat,
    SecretStr,
    ValidationError,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.files import DEFAULT_HOME
from service.network import is_loopback, local_url


def _absolute(path: Path) -> Path:
    if re.match(r"[\w+.-]+:/", str(path)):
        raise ValueError(
            "is a URL where a path belongs; roots of storage may be s3://BUCKET/FOLDER or "
            "gs://BUCKET/FOLDER, without '?', '#' and '%'"
        )
    return path.expanduser().absolute()


def _storage_root(given: Path | str) -> Path | str:
    text = str(given)
    return text if _REMOTE_FOLDER.fullmatch(text) else _absolute(Path(given))


def _none_if_empty(text: Any) -> Any:
    return text or None


def _from_json(given: object) -> object:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        example = '["a", "b"], or {"name": "value"} where names have values'
        raise ValueError(f"reads as JSON, as in {example}") from None


_Json = BeforeValidator(_from_json)
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
_REMOTE_FOLDER = re.compile(r"(s3|gs)://[^/?#%]+(/[^?#%]+)*/?")
RoleName = Literal["viewer", "submitter", "admin"]
StorageRoot = Annotated[Path | str, AfterValidator(_storage_root)]


def _default_service_url(values: dict[str, Any]) -> str:
    scheme = "https" if values.get("ssl_certfile") else "http"
    return local_url(values["host"], values["port"], scheme)


def _default_auth(values: dict[str, Any]) -> Literal["none", "local", "required"]:
    return "local" if is_loopback(values["host"]) else "required"


def _default_replica_id(values: dict[str, Any]) -> str:
    # A SQLite file has one service, which goes on with its jobs at once when it starts again.
    if values["database_url"].startswith("sqlite"):
        return "embedded"
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def faults_of(error: ValidationError) -> list[str]:
    """What is wrong with settings, as in `SHARDLOOM_AUTH: Input should be ...`."""
    return [
        f"SHARDLOOM_{str(fault['loc'][0]).upper()}"
        f"{''.join(f'[{part}]' for part in fault['loc'][1:])}: {fault['msg']}"
        for fault in error.errors()
        # Not of those whose default follows from the ones that are wrong.
        if fault["type"] != "default_factory_not_called"
    ]


class Settings(BaseSettings):
    """What the service needs to know before it starts. Paths become absolute."""

    model_config = SettingsConfigDict(
        env_prefix="SHARDLOOM_",
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        enable_decoding=False,  # or what is no JSON would not be among the faults
    )

    home: AbsolutePath = Field(default=Path(DEFAULT_HOME), validate_default=True)
    """Folder of everything that the service keeps."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8700, ge=1, le=65535)
    """Port to listen on."""
    ssl_certfile: AbsolutePath | None = None
    """Certificate (PEM, with its chain) to serve HTTPS with."""
    ssl_keyfile: AbsolutePath | None = None
    """Its private key (PEM)."""
    database_url: str = Field(
        default_factory=lambda values: f"sqlite:///{values['home'] / 'shardloom.db'}"
    )
    """SQLAlchemy URL of the store; SQLite under `home` by default."""
    runs_dir: AbsolutePath = Field(default_factory=lambda values: values["home"] / "runs")
    """Run storage: one folder per job."""
    runs_shared: bool = True
    """Whether the cluster's hosts have `runs_dir` mounted at the same path. With `false` it is the
    disk of this one replica: hosts have a folder of their own there and exchange files with the
    service, and checkpoints go to object storage (`checkpoint_root`)."""
    backend: Literal["ray_jobs", "kuberay", "fake"] = "ray_jobs"
    """Where attempts run: on a Ray cluster; there or, by KubeRay, on clusters of their own; `fake`
    plays scripts for tests."""
    ray_address: str = "http://127.0.0.1:8265"
    """URL of the Ray Jobs API (the Ray dashboard) of the cluster that jobs share; with
    `backend=kuberay` empty if there is none."""
    ray_auth_token: SecretStr | None = None
    """Bearer token of the Ray cluster, if it wants one."""
    kubeconfig: Annotated[AbsolutePath | None, BeforeValidator(_none_if_empty)] = Field(
        default=None,
        validation_alias=AliasChoices("kubeconfig", "SHARDLOOM_KUBECONFIG", "KUBECONFIG"),
    )
    """How to reach Kubernetes (`backend=kuberay`); by default as the pod that the service runs
    in."""
    kuberay_namespace: str = Field(default="shardloom", min_length=1)
    """Namespace of the clusters of jobs' own."""
    kuberay_namespaces: Annotated[dict[str, str], _Json] = {}
    """Project -> namespace of its own for its clusters, as in {"ads": "ads-training"}: its jobs run
    there and nowhere else."""
    kuberay_template_file: AbsolutePath = Path("/etc/shardloom/raycluster.yaml")
    """YAML file with the RayCluster after which they are made."""
    kuberay_ttl_s: int = Field(default=60, ge=0)
    """Seconds for which a cluster outlives its job."""
    kuberay_queue: str | None = None
    """Kueue LocalQueue of jobs that name none in `resources.queue`."""
    service_url: str = Field(default_factory=_default_service_url)
    """URL under which drivers reach this service to post their records."""
    trainer_python: str = sys.executable
    """Python that runs the driver on the cluster, and here the planner."""
    keep_planner: bool = True
    """Whether TorchRec's planner stays loaded (some 0.5 GB), so that a plan does not wait some
    seconds for that; else it is loaded for a plan, and ends two minutes after the last one."""
    dashboard: bool = True
    """Whether to serve the dashboard pages."""
    replica_id: str = Field(default_factory=_default_replica_id, min_length=1, max_length=255)
    """Name of this replica among those on one PostgreSQL: no two have the same."""
    lease_s: PositiveFloat = 15.0
    """How long after a replica has died others take over its jobs."""
    metric_retention_days: float = Field(default=0.0, ge=0)
    """Age at which metric points are deleted; 0 keeps them."""
    metric_max_points_per_series: int = Field(default=200_000, ge=100)
    """Points of one metric of a job; older ones are thinned beyond that."""
    reconcile_interval_s: PositiveFloat = 1.0
    """Seconds between two polls of every live job."""
    queue_capacity: Literal["observed", "unlimited"] = "observed"
    """Whether a job waits in the queue until its workers fit on the cluster's hosts or, with
    `unlimited`, only for its project's quotas."""
    cluster_max_workers: int | None = Field(default=None, ge=1)
    """Most workers of a cluster that grows by itself; its hosts do not count then."""
    pause_grace_s: PositiveFloat = 120.0
    """Longest wait for the workers of a pausing job to save."""
    stream_poll_s: PositiveFloat = 0.5
    """Seconds between two polls for new items of a followed stream."""
    # ---- who may call
    auth: Literal["none", "local", "required"] = Field(default_factory=_default_auth)
    """`required` wants an API key, a token or a session. `local`, the default on loopback and for
    that only, also takes the token that the service puts into `home` at each start, and gives it
    all rights. `none`, for loopback too, lets in whoever is on this machine."""
    secret_key: SecretStr | None = None
    """Secret of at least 32 characters for tokens and stored secrets; several, separated by commas,
    are a rotation. The file `secret-key` under `home` by default."""
    first_key: SecretStr | None = None
    """Text of an administrator's API key (`shl_`, 12 characters of a-z and 0-9, `_`, 43 of A-Z,
    a-z, 0-9, `-` and `_`), which the service writes to its database once; revoked it stays so."""
    metrics_key: SecretStr | None = None
    """The same of a key that may only read, in all projects: that of Prometheus."""
    session_ttl_s: PositiveFloat = 12 * 3600.0
    """Seconds after which a browser must sign in again."""
    oidc_issuer: str | None = None
    """`iss` of the bearer tokens of an identity provider to accept."""
    oidc_audience: str | None = None
    """`aud` that such tokens have."""
    oidc_jwks_url: str | None = None
    """Where the provider publishes its keys."""
    oidc_roles_claim: str = "groups"
    """Claim whose values give roles; dots lead into objects."""
    oidc_roles: Annotated[dict[str, dict[str, RoleName]], _Json] = {}
    """Value of the claim -> project -> role, as in {"ml": {"*": "submitter"}}."""
    # ---- HTTP
    allowed_hosts: Annotated[list[str], _Json] = []
    """Names in the Host header that are answered, beside the loopback ones; with `auth=required`
    any, if none is given or the request has a key, or is a driver's first."""
    allowed_origins: Annotated[list[str], _Json] = []
    """Sites whose pages may call the API, as in https://tools.example."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Largest body of a request; of a JSON document it is 8 MiB at most."""
    code_retention_days: float = Field(default=30.0, ge=0)
    """Age at which uploads of code are deleted that no living job or sweep names (jobs that have
    run have copies); 0 keeps them."""
    code_max_bytes: int = Field(default=10 * 2**30, ge=2**20)
    """Most bytes of uploaded code that are kept, of 9900 uploads at most."""
    export_retention_days: float = Field(default=0.0, ge=0)
    """Age at which exports of jobs are deleted that nobody is making; 0 keeps them."""
    rate_limit_per_s: PositiveFloat = 50.0
    """Requests per second of one principal; local ones have no limit."""
    rate_limit_burst: int = Field(default=200, ge=1)
    """Requests that a principal may send at once."""
    attempt_rate_limit_per_s: PositiveFloat = 100.0
    """The same for the driver of one attempt."""
    attempt_rate_limit_burst: int = Field(default=1000, ge=1)
    """The same, at once."""
    max_open_requests: int = Field(default=100, ge=1)
    """Requests, streams and sockets a principal may have open; local ones as many as they like."""
    driver_ca_file: AbsolutePath | None = None
    """CA certificates (PEM), on the cluster's hosts, by which drivers check ours."""
    storage_roots: Annotated[list[StorageRoot] | None, _Json] = None
    """Folders, or URLs of them, below which data and checkpoints may lie; `runs_dir` always may. By
    default anywhere, but nowhere else with `auth=required`."""
    checkpoint_root: StorageRoot | None = None
    """Folder, or URL of one, where jobs keep their checkpoints that name no other; run storage by
    default. A job keeps the one that it was submitted with."""
    # ---- logs, webhooks, observability
    log_format: Literal["text", "json"] = "text"
    """How the service logs: for people, or a JSON object a line."""
    log_max_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Most that one process of a job may keep of its log on run storage; its beginning and its end
    stay."""
    otlp_endpoint: str | None = Field(
        default=None,
        validation_alias=AliasChoices(
            "otlp_endpoint", "SHARDLOOM_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
    )
    """OTLP/HTTP collector that takes traces, as in http://127.0.0.1:4318."""
    metrics_max_jobs: int = Field(default=1000, ge=0)
    """Live jobs that have series of their own in /metrics, about 30 lines each;
    `shardloom_hidden_jobs` counts the others."""
    webhook_allowed_networks: Annotated[list[IPvAnyNetwork], _Json] = []
    """Networks that webhooks may reach beside public ones, as in ["10.0.0.0/8"]."""
    webhook_poll_s: PositiveFloat = 1.0
    """Seconds between two polls for webhooks to send."""
    shutdown_timeout_s: int = Field(default=5, ge=1)
    """Longest wait for open requests at shutdown."""
