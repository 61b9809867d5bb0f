"""Composition root: the one module that knows every concrete class of the control plane.

`python -m service.app` serves with the SHARDLOOM_* variables of `service.settings`. The exit code
is 2 for invalid settings, and 1 where the service cannot start.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from fastapi_offline import FastAPIOffline
from pydantic import ValidationError
from sqlalchemy import Engine
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.api import openapi
from service.api.authentication import AuthenticationMiddleware
from service.api.deps import Context, authorize
from service.api.errors import add_error_handlers, answer_unexpected
from service.api.middleware import (
    BodyLimitMiddleware,
    IdempotencyMiddleware,
    RequestLogMiddleware,
    TrustedHostMiddleware,
)
from service.api.routers import (
    artifacts,
    auth,
    drivers,
    jobs,
    plans,
    records,
    sweeps,
    system,
    webhooks,
)
from service.auth.crypto import master_keys_of
from service.auth.security import Security, write_given_keys
from service.backends.base import Backend, ClusterWatch
from service.backends.fake import FakeBackend
from service.backends.ray_jobs import RayJobsBackend
from service.client.credentials import LOCAL_FILE_NAME, write_local_token
from service.db.idempotency import IdempotencyStore
from service.db.jobs import JobStore
from service.db.projects import ProjectStore
from service.db.sweeps import SweepStore
from service.db.webhooks import WebhookStore
from service.errors import ServiceError
from service.files import make_private, make_writable
from service.jobs.export_runner import ExportRunner
from service.jobs.planning import GroupPlanner
from service.network import is_loopback, local_url
from service.observability import logging_setup
from service.observability.metrics import ServiceMetrics
from service.observability.tracing import Tracing
from service.reconciler.loop import Reconciler
from service.settings import Settings, faults_of
from service.storage import in_time
from service.sweeps.runner import SweepRunner
from service.webhooks.sender import WebhookSender

# Not __name__, which is __main__ when the module is run.
logger = logging.getLogger("service.app")
_BACKLOG = 2048
# The pages' transport takes a million itself, and by then has it all in memory.
MAX_SOCKET_MESSAGE_BYTES = 1_000_000
_SWITCH_INTERVAL_S = 0.0005
_KUBERNETES_TIMEOUT_S = 5.0
_HEAD_TIMEOUT_S = 10.0
# What fits into the first flight of TCP, of ten segments, comes no sooner where it is smaller.
_GZIP_FROM_BYTES = 14_000
# A higher level costs more time than its bytes are worth.
_GZIP_LEVEL = 4


def check_address(settings: Settings, *, has_credentials: bool) -> None:
    """Raise `ServiceError` where the service would let anybody on the network in, or nobody."""
    where = f"SHARDLOOM_HOST={settings.host}"
    if settings.auth != "required" and not is_loopback(settings.host):
        raise ServiceError(
            f"{where} can be reached from the network, and SHARDLOOM_AUTH={settings.auth} is for "
            "one machine: set SHARDLOOM_AUTH=required, or listen on 127.0.0.1"
        )
    if settings.auth == "required" and not has_credentials:
        raise ServiceError(
            f"{where} with SHARDLOOM_AUTH=required, but there is no API key yet, so that nobody "
            "could call: make the first one with `shardloom keys create NAME --admin`, which works "
            f"directly on the database: with SHARDLOOM_HOME={settings.home} and "
            "SHARDLOOM_DATABASE_URL as they are here. Or set SHARDLOOM_OIDC_ISSUER"
        )
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise ServiceError("SHARDLOOM_SSL_CERTFILE and SHARDLOOM_SSL_KEYFILE go together")
    provider = (settings.oidc_issuer, settings.oidc_audience, settings.oidc_jwks_url)
    if any(provider) and not all(provider):
        names = "SHARDLOOM_OIDC_ISSUER, SHARDLOOM_OIDC_AUDIENCE and SHARDLOOM_OIDC_JWKS_URL"
        raise ServiceError(f"{names} go together, or no token of the provider is taken")


def create_app(settings: Settings, store: JobStore, backend: Backend) -> FastAPI:
    """Wire the REST API, the reconciler and the dashboard over `store` and `backend`.

    Starting the app starts the reconciler; stopping it closes reconciler, store and backend.
    """
    telemetry = ServiceMetrics(max_jobs=settings.metrics_max_jobs)
    tracing = Tracing.from_settings(settings)
    telemetry.watch(store.engine)
    reconciler = Reconciler(store, backend, settings, telemetry, tracing=tracing)
    security = Security.open(settings, store.engine)
    sweep_store = SweepStore(store.engine)
    sweep_runner = SweepRunner(
        sweep_store, store, security.keys, settings, reconciler.wake, telemetry.job_ended
    )
    app = FastAPIOffline(
        title="Shardloom",
        summary="Elastic 2D-sparse training for recommendation models.",
        version=next((found.version for found in distributions(name="shardloom")), "unknown"),
        lifespan=partial(_lifespan, reconciler=reconciler, runner=sweep_runner),
        dependencies=[Depends(authorize)],
        redoc_url=None,
        static_url="/docs/assets",
        responses=openapi.RESPONSES,
    )
    exports = ExportRunner(store, settings, secrets_of=security.read_secrets)
    app.state.context = Context(
        settings,
        store,
        backend,
        telemetry,
        reconciler,
        security,
        WebhookStore(store.engine),
        tracing,
        ProjectStore(store.engine),
        exports,
        GroupPlanner(settings),
        ClusterWatch(backend),
        sweep_store,
        sweep_runner.wake,
    )
    add_error_handlers(app)
    for router in (
        jobs.router,
        plans.router,
        auth.router,
        drivers.claims_router,
        drivers.router,
        records.router,
        sweeps.router,
        webhooks.router,
        *artifacts.routers,
        *system.routers,
    ):
        app.include_router(router)
    if settings.dashboard:
        # Imported here because it takes a second that an API without pages need not spend.
        from service.dashboard.app import mount

        mount(app)
    _add_middleware(app, settings, security, telemetry, store.engine)
    openapi.install(app)
    return app


def _add_middleware(
    app: FastAPI, settings: Settings, security: Security, telemetry: ServiceMetrics, engine: Engine
) -> None:
    """What is around every request; the first one added is the innermost."""
    app.add_middleware(
        IdempotencyMiddleware, store=IdempotencyStore(engine), master=security.master
    )
    app.add_middleware(AuthenticationMiddleware, settings=settings, security=security)
    app.add_middleware(BodyLimitMiddleware, limit_bytes=settings.max_body_bytes)
    app.add_middleware(GZipMiddleware, minimum_size=_GZIP_FROM_BYTES, compresslevel=_GZIP_LEVEL)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "ETag", "Location", "Retry-After"],
        )
    app.add_middleware(TrustedHostMiddleware, settings=settings)
    # Starlette's own is around all of these: its answers would have no id and be counted nowhere.
    app.add_middleware(ServerErrorMiddleware, handler=answer_unexpected)
    app.add_middleware(RequestLogMiddleware, telemetry=telemetry)


@asynccontextmanager
async def _lifespan(
    app: FastAPI, *, reconciler: Reconciler, runner: SweepRunner
) -> AsyncIterator[None]:
    context: Context = app.state.context
    sender = WebhookSender(
        context.webhooks, context.security.master, context.settings, context.telemetry
    )
    parts: list[Any] = [context.planner, context.exports, sender, reconciler, runner]
    with ExitStack() as ends:
        ends.callback(context.store.close)
        ends.callback(context.backend.close)
        ends.callback(context.security.audit.flush)
        ends.callback(context.tracing.close)
        for part in parts:
            part.start()
            ends.callback(part.close)
        ends.callback(context.closing.set)
        yield


def build_app(settings: Settings) -> FastAPI:
    """The app over the store and backend that the settings name; raises `StoreUnavailable`."""
    make_private(settings.home)
    _check_checkpoint_root(settings)
    _check_run_storage(settings.runs_dir)
    store = JobStore.open(settings.database_url)
    return create_app(settings, store, _backend_of(settings))


def _check_checkpoint_root(settings: Settings) -> None:
    """Raise `ServiceError` where hosts that share no run storage had no place for checkpoints."""
    if not settings.runs_shared and not isinstance(settings.checkpoint_root, str):
        raise ServiceError(
            "SHARDLOOM_RUNS_SHARED=false leaves jobs no place for checkpoints; set "
            "SHARDLOOM_CHECKPOINT_ROOT to one in object storage, as s3://bucket/checkpoints"
        )


def _check_run_storage(folder: Path) -> None:
    """Raise `ServiceError` where it cannot be written; storage that hangs is waited for later."""
    try:
        in_time(folder, partial(make_writable, folder))
    except TimeoutError as error:
        logger.warning("run storage: %s", error)
    except OSError as error:
        raise ServiceError(
            f"run storage cannot be written: {error}; give the folder to the service's user (in "
            "Kubernetes: storage.setOwner of the chart), or set SHARDLOOM_RUNS_DIR to another one"
        ) from error


def _backend_of(settings: Settings) -> Backend:
    match settings.backend:
        case "fake":
            return FakeBackend(settings.home / "fake-cluster")
        case "kuberay":
            return _kuberay(settings)
        case "ray_jobs":
            return _ray_jobs(settings, settings.ray_address)


def _ray_jobs(settings: Settings, address: str, token: str | None = None) -> RayJobsBackend:
    given = settings.ray_auth_token
    return RayJobsBackend(
        address,
        auth_token=token or (given.get_secret_value() if given else None),
    )


def _kuberay(settings: Settings) -> Backend:
    # Imported here because the client of Kubernetes is large, and most services need none.
    from service.backends.kuberay.backend import (
        IsolatedProjectsBackend,
        KubeRayBackend,
        template_in,
    )
    from service.backends.kuberay.client import KubeApi
    from service.backends.kuberay.manifest import ClusterOptions

    def open_namespace(name: str) -> KubeApi:
        return KubeApi.open(settings.kubeconfig, name, _KUBERNETES_TIMEOUT_S)

    api = open_namespace(settings.kuberay_namespace)
    template = partial(template_in, settings.kuberay_template_file)
    options = ClusterOptions(
        settings.kuberay_namespace, settings.kuberay_ttl_s, settings.kuberay_queue
    )
    shared = _ray_jobs(settings, settings.ray_address) if settings.ray_address else None
    open_head = partial(_ray_jobs, settings)
    others = KubeRayBackend(api, shared, template, options, open_head)
    ray_token_of = master_keys_of(settings).ray_token
    isolated = {
        project: KubeRayBackend(
            open_namespace(name),
            None,
            template,
            replace(options, namespace=name, ray_token_of=ray_token_of),
            open_head,
        )
        for project, name in settings.kuberay_namespaces.items()
    }
    backend = IsolatedProjectsBackend(others, isolated) if isolated else others
    backend.start()
    return backend


class _HttpProtocol(HttpToolsProtocol):
    """Closes connections on which no request has begun for `_HEAD_TIMEOUT_S`, which uvicorn keeps.

    What comes of a body after its answer begins none either.
    """

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def handle_websocket_upgrade(self) -> None:
        self._stop_waiting()
        super().handle_websocket_upgrade()
        # Of a handshake with a body, or too many headers, nothing comes: uvicorn looks no further.
        if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._stop_waiting()
        self._closing = self.loop.call_later(_HEAD_TIMEOUT_S, self._close_if_idle)

    def _stop_waiting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()

    def _close_if_idle(self) -> None:
        # Before the first request there is none.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """Tells followed streams to end before it waits for open requests to finish."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: FastAPI = self.config.app  # type: ignore[assignment]
        app.state.context.closing.set()
        await super().shutdown(sockets)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; it binds its port before anything else is touched."""
    check_address(settings, has_credentials=True)
    # A request that comes back from the database waits this long for a thread that computes, and
    # does so many times: at Python's own 5 ms that adds up to most of an answer's time.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Streams and downloads hold descriptors; what is usual (1024) is for programs that use select.
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, 1 << 16)), most))
    with bind(settings.host, settings.port) as listener:
        app = build_app(settings)
        security: Security = app.state.context.security
        write_given_keys(security.keys, settings, time.time())
        has_key = security.keys.has_usable_key(time.time())
        can_sign_in = has_key or security.authenticator.verifier is not None
        check_address(settings, has_credentials=can_sign_in)
        logger.info(
            "Shardloom listens on %s, port %d; jobs report to %s",
            *listener.getsockname()[:2],
            settings.service_url,
        )
        _tell_local_token(settings, security.authenticator.local_token)
        # Or each full collection would stop all requests to look at all that is imported.
        gc.freeze()
        server = _Server(server_config(app, settings))
        # uvicorn has shut down in good order when it raises the signal again.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        if not server.started:
            raise ServiceError("the app did not start; the log above says why")


def _tell_local_token(settings: Settings, token: str | None) -> None:
    """Let the service's own user in, by the token of this start; raises OSError."""
    if settings.auth == "none":
        logger.warning(
            "SHARDLOOM_AUTH=none: whoever is on this machine may use the service, and run code as "
            "its user"
        )
    if settings.ssl_certfile and not settings.driver_ca_file:
        logger.warning(
            "SHARDLOOM_DRIVER_CA_FILE is not set: drivers check the service's certificate by "
            "public authorities, and cannot report to it where a private one signed it"
        )
    if token is None:
        (settings.home / LOCAL_FILE_NAME).unlink(missing_ok=True)
        return
    scheme = "https" if settings.ssl_certfile else "http"
    write_local_token(settings.home, local_url(settings.host, settings.port, scheme), token)


def server_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_HttpProtocol,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
        ws_max_size=MAX_SOCKET_MESSAGE_BYTES,
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises `ServiceError` if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    takes_both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=takes_both
        )
    except OSError as error:
        # `create_server` adds the address, which is told already.
        reason = str(error.strerror or error).partition(" (while")[0]
        raise ServiceError(
            f"cannot listen on {host}:{port} ({reason}); is another service running? Stop it or "
            "set SHARDLOOM_PORT to a free port"
        ) from error


def main() -> int:
    """Run the service with the settings of the environment; returns the exit code."""
    logging_setup.configure("text")
    try:
        settings = Settings()
        logging_setup.configure(settings.log_format)
        serve(settings)
    except ValidationError as error:
        for fault in faults_of(error):
            logger.error("%s", fault)
        return 2
    except (ServiceError, OSError) as error:
        logger.error("the service cannot start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
