"""A network of the user's own on a real Ray: shipped with the job, trained, its errors told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.domain.models import JobStatus
from tests.conftest import EXAMPLE_SPEC
from tests.harness.stack import Stack
from trainer.protocol.code_archive import pack
from trainer.spec.parse import apply_overrides

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXAMPLES = EXAMPLE_SPEC.parent
TWO_WORKERS = (
    "parallelism.workers=2",
    "parallelism.shard_group_size=2",
    "parallelism.sync=null",
    "training.epochs=1",
    "training.max_steps=12",
    "training.report_every_steps=4",
    "training.validate_every_steps=12",
    "data.batch_size=32",
    "retry.max_failures=3",
)


def document(data: Path, code: str) -> dict[str, Any]:
    """The shipped example on two workers with the code of this id."""
    text = (EXAMPLES / "movielens-module.yaml").read_text()
    changes = (f"data.path={data}", f"model.code={code}", *TWO_WORKERS)
    changed: dict[str, Any] = apply_overrides(yaml.safe_load(text), changes)
    return changed


def test_shipped_code_is_trained_and_a_bug_in_it_is_shown_by_its_own_lines(
    stack: Stack, small_movielens: Path, tmp_path: Path
) -> None:
    good = stack.client.upload_code(pack(EXAMPLES / "code"))
    first = stack.client.submit(document(small_movielens, good.id))
    trained = stack.wait_for_end(first.id)
    assert trained.status is JobStatus.SUCCEEDED, trained.message
    assert trained.progress.step == 12
    assert "validation/rmse" in trained.latest_metrics

    folder = tmp_path / "two_towers"
    folder.mkdir()
    for path in (EXAMPLES / "code" / "two_towers").glob("*.py"):
        source = path.read_text().replace("vectors[:, self.user_places]", "vectors[:, [999]]")
        (folder / path.name).write_text(source)
    bad = stack.client.upload_code(pack(tmp_path))
    second = stack.client.submit(document(small_movielens, bad.id))
    failed = stack.wait_for_end(second.id)
    assert (failed.status, failed.reason) == (JobStatus.FAILED, "user_code")
    assert failed.num_attempts == 1
    (attempt,) = stack.client.attempts(failed.id)
    told = attempt.evidence["traceback"]
    assert "two_towers/model.py" in told
    assert "vectors[:, [999]]" in told
    assert told.splitlines()[-1].startswith("IndexError")
    assert "torch/nn" not in told
