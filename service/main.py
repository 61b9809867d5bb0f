"""Composition root: the one place that knows every concrete class of the control plane."""

from __future__ import annotations

from fastapi import FastAPI

from service.backends.base import Backend
from service.settings import Settings
from service.store.base import JobStore


def create_app(settings: Settings, store: JobStore, backend: Backend) -> FastAPI:
    """Wire the REST API, the reconciler and the dashboard over `store` and `backend`."""
    app = FastAPI(title="Shardloom", version="0.1.0")
    app.state.settings = settings
    app.state.store = store
    app.state.backend = backend
    return app
