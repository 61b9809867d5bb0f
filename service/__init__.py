"""Control plane of Shardloom: REST API, reconciler, dashboard, SDK and CLI."""

from __future__ import annotations
