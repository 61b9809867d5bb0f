"""What importing loads: a driver and a client must not pay for torch.

That a worker does not pay for Ray and plotting is in `data/test_process.py`.
"""

from __future__ import annotations

import subprocess
import sys

# What the control plane and the driver import.
LIGHT = (
    "service.client",
    "shardloom",
    "trainer.driver.main",
    "trainer.elastic.coordinator.server",
    "trainer.checkpoint.files",
    "trainer.protocol.events",
    "trainer.export.artifact",
    "trainer.layout.scaling",
    "trainer.spec",
)
# What the driver imports once it knows how to train.
LATE_IN_DRIVER = (
    "ray.train.v2.api.data_parallel_trainer",
    "trainer.driver.torch_backend",
    "trainer.driver.job_runner",
    "trainer.driver.group_runner",
    "trainer.driver.coordinator_actor",
)
WATCHED = ("torch", "torchrec", "ray", "matplotlib", "rfc3987_syntax")
# What the SDK, the CLI and the commands for data load neither: extras of the package.
SERVER = ("fastapi", "nicegui", "numpy", "polars", "pyarrow", "pydantic_settings", "sqlalchemy")


def test_imports_load_only_what_they_need() -> None:
    steps: list[tuple[tuple[str, ...], tuple[str, ...], list[str]]] = [
        # Each loads no more than the steps before it, and what is named.
        (("shardloom", "service.cli.main", "trainer.datasets.cli"), WATCHED + SERVER, []),
        (LIGHT, WATCHED, []),
        (LATE_IN_DRIVER, WATCHED, ["ray"]),
    ]
    code = "import sys, importlib"
    for modules, watched, _ in steps:
        code += f"; [importlib.import_module(n) for n in {modules!r}]"
        code += f"; print([m for m in {watched!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [repr(loaded) for _, _, loaded in steps]
