"""TorchRec models that a job spec can name."""

from __future__ import annotations
