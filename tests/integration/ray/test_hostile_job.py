"""A job that does to the service what its code can, beside a healthy one, on a real Ray."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.domain.models import JobStatus
from tests.conftest import EXAMPLE_SPEC
from tests.harness.stack import Stack
from tests.harness.wait import scaled, wait_for
from trainer.protocol.code_archive import pack
from trainer.spec.parse import apply_overrides

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
# Runs where the module is imported, in every process of the job.
HOSTILE = """

def _attack():
    import contextlib, itertools, json, os, sys, threading, time, urllib.request
    from pathlib import Path

    def is_own(path):
        return json.loads(path.read_text())["spec"]["name"] == "hostile"

    (run_dir,) = (path.parent for path in Path(RUNS_DIR).glob("*/job.json") if is_own(path))
    (attempt,) = (run_dir / "attempts").glob("*-a0")
    outbox, logs = attempt / "outbox", attempt / "logs"

    def put(path, make):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)

    put(attempt / "growth-limit.json", os.mkfifo)
    put(attempt / "traces" / "spec-rank0.json.gz", os.mkfifo)
    put(run_dir / "exports" / "x-00000000" / "request.json", os.mkfifo)
    put(outbox / "workers-71.jsonl", os.mkfifo)
    put(outbox / "workers-72.jsonl", lambda path: path.symlink_to("/proc/self/environ"))
    note = json.dumps({"kind": "note", "time": 1.0, "level": "info", "message": "flood"})
    put(outbox / "workers-73.jsonl", lambda path: path.write_text((note + chr(10)) * 20_000))
    put(outbox / "workers-74.jsonl", lambda path: path.write_text("x" * (64 << 20) + chr(10)))

    def truncate(path):
        with path.open("wb") as file:
            file.truncate(1 << 40)

    put(outbox / "workers-75.jsonl", truncate)
    forged = {"spec": {"checkpoint": {"path": str(run_dir.parent)}}}
    trash = run_dir.parent / ".deleted-job-000000000000.0a"
    put(trash / "job.json", lambda path: path.write_text(json.dumps(forged)))

    def flip():
        log = logs / "rank-9.log"
        for number in itertools.count():
            with contextlib.suppress(OSError):
                log.unlink(missing_ok=True)
                log.symlink_to("/proc/self/environ") if number % 2 else log.write_text("mine\\n")
            time.sleep(0.001)

    def knock():
        url = SERVICE_URL + "/v1/attempts/job-000000000000-a0/secrets"
        while True:
            request = urllib.request.Request(url, headers={"Authorization": "Bearer forged"})
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=5)
            time.sleep(0.02)

    for target in (flip, knock):
        threading.Thread(target=target, daemon=True).start()
    for _ in range(1024):
        sys.stderr.write("y" * (1 << 20))  # one line of a GiB
    sys.stderr.write(chr(10))


_attack()
"""


def document(data: Path, code: str) -> dict[str, Any]:
    """The shipped example on two workers with the code of this id."""
    text = (EXAMPLES / "movielens-module.yaml").read_text()
    changes = (f"data.path={data}", f"model.code={code}", *TWO_WORKERS)
    changed: dict[str, Any] = apply_overrides(yaml.safe_load(text), changes)
    return changed


def test_a_healthy_job_and_the_service_do_not_notice_a_hostile_one(
    stack: Stack, small_movielens: Path, tmp_path: Path
) -> None:
    code = stack.client.upload_code(pack(EXAMPLES / "code"))
    runs_dir = stack._home / "runs"
    constants = f"\nRUNS_DIR, SERVICE_URL = {str(runs_dir)!r}, {stack.client.base_url!r}\n"
    folder = tmp_path / "two_towers"
    folder.mkdir()
    for path in (EXAMPLES / "code" / "two_towers").glob("*.py"):
        attack = constants + HOSTILE if path.name == "model.py" else ""
        (folder / path.name).write_text(path.read_text() + attack)
    bad = stack.client.upload_code(pack(tmp_path))

    hostile = stack.client.submit(document(small_movielens, bad.id) | {"name": "hostile"})
    trash = runs_dir / ".deleted-job-000000000000.0a"
    wait_for(trash.exists, "its code to run", 120)
    healthy = stack.client.submit(document(small_movielens, code.id))
    delays_s = []
    with httpx.Client(base_url=stack.client.base_url, trust_env=False, timeout=30) as http:
        while not stack.client.get_job(healthy.id).status.is_terminal:
            began = time.monotonic()
            assert http.get("/healthz").is_success
            delays_s.append(time.monotonic() - began)
            shown = http.get(f"/v1/jobs/{hostile.id}/logs", params={"rank": 9})
            assert "SHARDLOOM_HOME=" not in shown.text
            time.sleep(0.2)
    assert max(delays_s) < scaled(2)
    trained = stack.client.get_job(healthy.id)
    assert (trained.status, trained.num_attempts) == (JobStatus.SUCCEEDED, 1), trained.message
    assert trained.progress.step == 12
    assert "validation/rmse" in trained.latest_metrics
    # Its own driver may hang on the pipes.
    stack.client.cancel(hostile.id)
    wait_for(lambda: stack.client.get_job(hostile.id).status.is_terminal, "its end", 60)
    assert any("flood" in line.message for line in stack.client.iter_events(hostile.id))
    told = stack.client.events(hostile.id, limit=1000)
    assert not any("SHARDLOOM_HOME" in line.message for line in told)
    assert stack.client.delete(hostile.id).left == []
