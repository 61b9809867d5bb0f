"""Training side of Shardloom: engine, data, models, worker loop and driver."""

from __future__ import annotations
