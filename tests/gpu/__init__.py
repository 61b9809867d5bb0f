"""Tests that need CUDA GPUs; they are skipped, with the reason, where there is none.

With Ray there too, `SHARDLOOM_RAY_HOSTS=1 NCCL_MULTI_RANK_GPU_ENABLE=1 pytest -m slow
tests/integration/ray/test_replica_groups.py` runs groups that are failure domains on one GPU.
"""

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA GPU: torch.cuda.is_available() is False",
    ),
]
