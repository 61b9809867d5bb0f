"""Composition root: the one place that knows every concrete class of the control plane.

python -m service.main      with the SHARDLOOM_* variables of `service.settings`
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import uvicorn
from fastapi import Depends, FastAPI
from pydantic import ValidationError
from sqlalchemy import Engine
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from service import logging_setup
from service.api import (
    audit,
    code,
    exports,
    jobs,
    keys,
    lifecycle,
    logs,
    openapi,
    projects,
    queue,
    records,
    resizing,
    secrets,
    system,
    traces,
    webhooks,
)
from service.api.auth import authorize
from service.api.context import Context
from service.api.gate import Gate
from service.api.measuring import Measuring
from service.api.middleware import BodyLimit, KnownHosts, RequestIds, SafeHeaders
from service.api.problems import add_error_handlers
from service.api.repeats import Repeats
from service.backends.base import Backend
from service.backends.fake import FakeBackend
from service.backends.ray_jobs import RayJobsBackend
from service.errors import PortInUse, ServiceError
from service.exports import ExportRunner
from service.reconciler import Reconciler
from service.security.bundle import Security
from service.security.files import make_private
from service.security.hosts import check_address
from service.settings import Settings
from service.store.answers import AnswerStore
from service.store.projects import ProjectStore
from service.store.sql import SqlJobStore
from service.store.wal import WalKeeper
from service.store.webhooks import WebhookStore
from service.telemetry import Telemetry
from service.tracing import Tracing
from service.webhook_sender import WebhookSender

# Not __name__, which is __main__ when the module is run.
logger = logging.getLogger("service.main")

_BACKLOG = 2048
_SWITCH_INTERVAL_S = 0.0005
_GZIP_FROM_BYTES = 1024
# What a higher level saves in bytes it costs in time.
_GZIP_LEVEL = 4


def create_app(settings: Settings, store: SqlJobStore, backend: Backend) -> FastAPI:
    """Wire the REST API, the reconciler and the dashboard over `store` and `backend`.

    Starting the app starts the reconciler; stopping it closes reconciler, store and backend.
    """
    telemetry = Telemetry(max_jobs=settings.metrics_max_jobs)
    tracing = Tracing.from_settings(settings)
    telemetry.watch(store.engine)
    reconciler = Reconciler(store, backend, settings, telemetry, tracing=tracing)
    app = FastAPI(
        title="Shardloom",
        summary="Elastic 2D-sparse training for recommendation models.",
        version="0.1.0",
        lifespan=partial(_lifespan, reconciler=reconciler, wal=WalKeeper(store.engine)),
        dependencies=[Depends(authorize)],
    )
    security = Security.open(settings, store, store.engine)
    app.state.context = Context(
        settings,
        store,
        backend,
        telemetry,
        reconciler.wake,
        lambda: reconciler.has_died,
        security,
        WebhookStore(store.engine),
        tracing,
        ProjectStore(store.engine),
        ExportRunner(store, settings, secrets_of=security.open_secrets),
    )
    add_error_handlers(app)
    for module in (jobs, keys, audit, secrets, resizing, records, logs, traces, webhooks, system):
        app.include_router(module.router)
    for module in (code, exports, lifecycle, queue, projects):
        app.include_router(module.router)
    if settings.dashboard:
        # Imported here because it takes a second that an API without pages need not spend.
        from service.dashboard.pages import mount

        mount(app, store, settings, reconciler.wake)
    _add_middleware(app, settings, security, telemetry, store.engine)
    openapi.install(app)
    return app


def _add_middleware(
    app: FastAPI, settings: Settings, security: Security, telemetry: Telemetry, engine: Engine
) -> None:
    """What is around every request; the first one added is the innermost."""
    app.add_middleware(Repeats, store=AnswerStore(engine), master=security.master)
    app.add_middleware(Gate, settings=settings, security=security)
    app.add_middleware(BodyLimit, limit_bytes=settings.max_body_bytes)
    app.add_middleware(GZipMiddleware, minimum_size=_GZIP_FROM_BYTES, compresslevel=_GZIP_LEVEL)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "ETag", "Location", "Retry-After"],
        )
    app.add_middleware(KnownHosts, settings=settings)
    app.add_middleware(SafeHeaders)
    app.add_middleware(Measuring, telemetry=telemetry)
    app.add_middleware(RequestIds)


@asynccontextmanager
async def _lifespan(app: FastAPI, *, reconciler: Reconciler, wal: WalKeeper) -> AsyncIterator[None]:
    context: Context = app.state.context
    context.security.forget_orphans()
    sender = WebhookSender(
        context.webhooks, context.security.master, context.settings, context.telemetry
    )
    wal.start()
    reconciler.start()
    sender.start()
    context.exports.start()
    try:
        yield
    finally:
        context.closing.set()
        reconciler.close()
        sender.close()
        context.exports.close()
        wal.close()
        context.tracing.close()
        context.security.close()
        context.backend.close()
        context.store.close()


def build_app(settings: Settings) -> FastAPI:
    """The app over the store and backend that the settings name; raises `StoreUnavailable`."""
    make_private(settings.home)
    store = SqlJobStore.open(settings.database_url)
    return create_app(settings, store, _backend_of(settings))


def _backend_of(settings: Settings) -> Backend:
    if settings.backend == "fake":
        return FakeBackend(settings.home / "fake-cluster")
    if settings.backend == "kuberay":
        return _kuberay(settings)
    return _ray_jobs(settings, settings.ray_address)


def _ray_jobs(settings: Settings, address: str) -> RayJobsBackend:
    token = settings.ray_auth_token
    return RayJobsBackend(
        address,
        auth_token=token.get_secret_value() if token else None,
        timeout_s=settings.backend_timeout_s,
        submit_timeout_s=settings.submit_timeout_s,
    )


def _kuberay(settings: Settings) -> Backend:
    # Imported here because the client of Kubernetes is large, and most services need none.
    from service.backends.kuberay import KubeRayBackend
    from service.backends.kuberay_api import KubeApi
    from service.backends.kuberay_manifest import ClusterOptions
    from service.backends.kuberay_template import FileTemplate, LiveTemplate

    namespace, path = settings.kuberay_namespace, settings.kuberay_template_file
    options = ClusterOptions(namespace, settings.kuberay_ttl_s, settings.kuberay_queue)
    api = KubeApi.open(settings.kubeconfig, namespace, settings.backend_timeout_s)
    backend = KubeRayBackend(
        api,
        _ray_jobs(settings, settings.ray_address) if settings.ray_address else None,
        FileTemplate(path) if path else LiveTemplate(api, settings.kuberay_template_cluster),
        options,
        partial(_ray_jobs, settings),
    )
    backend.start()
    return backend


class _Server(uvicorn.Server):
    """Tells followed streams to end before it waits for open requests to finish."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams, then stop as uvicorn does."""
        app: FastAPI = self.config.app  # type: ignore[assignment]
        app.state.context.closing.set()
        await super().shutdown(sockets)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; raises `PortInUse` before anything else is touched."""
    check_address(settings, has_credentials=True)
    # A request that comes back from the database waits this long for a thread that computes, and
    # does so many times: at Python's own 5 ms that adds up to most of an answer's time.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with bind(settings.host, settings.port) as listener:
        app = build_app(settings)
        check_address(settings, has_credentials=_has_credentials(app))
        config = uvicorn.Config(
            app,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.shutdown_timeout_s,
        )
        logger.info("Shardloom listens on %s", settings.service_url)
        server = _Server(config)
        # uvicorn has shut down in good order when it raises the signal again.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        if not server.started:
            raise ServiceError("the app did not start; the log above says why")


def _has_credentials(app: FastAPI) -> bool:
    """Whether anybody could sign in."""
    context: Context = app.state.context
    return context.security.authenticator.knows_provider or context.security.keys.has_usable_key(
        time.time()
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises `PortInUse` if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted service must not wait for old connections to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUse(host, port, error.strerror or str(error)) from error
    return listener


def main() -> int:
    """Run the service with the settings of the environment; returns the exit code."""
    logging_setup.configure("text")
    try:
        settings = Settings()
        logging_setup.configure(settings.log_format)
        serve(settings)
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(str(part) for part in fault["loc"]).upper()
            logger.error("SHARDLOOM_%s: %s", name, fault["msg"])
        return 2
    except (ServiceError, OSError) as error:
        logger.error("the service cannot start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
