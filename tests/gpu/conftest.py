"""Skips every test of this folder where torch sees no GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch.cuda.is_available() is False")
