"""What a process writes reaches its log on run storage, however the process ends."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.jobs.logs import LogPiece, LogPosition, list_sources, read_new
from tests.harness.wait import scaled
from trainer.protocol.run_dir import AttemptDir

_PROCESS = """
import logging, os, sys
from pathlib import Path
from trainer.driver.process_log import start_log
start_log(Path(sys.argv[1]))
logging.getLogger("trainer.x").info("by logging")
print("by print")
os.system("echo by a child")
os.write(2, b"by native code\\n")
"""
_ENDS = {
    "exit": "",
    "raise": "raise RuntimeError('unexpected')",
    "abort": "os.abort()",
    "kill": "os.write(1, b'last\\n' * 5000); os.kill(os.getpid(), 9)",
}


def _run(files: AttemptDir, end: str, env: dict[str, str] | None = None) -> str:
    """Run a process that ends by this code; returns what it wrote to where it was started."""
    command = [sys.executable, "-c", _PROCESS + end, str(files.log_path("rank-0"))]
    # Its standard error ends when the last copy of it is closed: that of the pump.
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), env=env)
    return done.stderr


def _lines(files: AttemptDir) -> list[LogPiece]:
    return list(read_new(files, LogPosition("a"), list_sources(files), is_final=True))


@pytest.mark.parametrize("end", _ENDS)
def test_everything_is_in_the_log_whatever_ends_the_process(tmp_path: Path, end: str) -> None:
    files = AttemptDir(tmp_path)
    shown = _run(files, _ENDS[end])
    texts = [piece.text for piece in _lines(files)]
    assert texts[0].endswith("INFO trainer.x: by logging")
    assert texts[1:4] == ["by print", "by a child", "by native code"]
    assert "\n".join(texts) == shown.rstrip("\n")
    if end == "abort":
        assert texts[4] == "Fatal Python error: Aborted"
        assert {piece.head.level for piece in _lines(files)[4:]} == {logging.CRITICAL}
    if end == "kill":
        assert texts[4:] == ["last"] * 5000
    if end == "raise":
        assert texts[-1] == "RuntimeError: unexpected"
        assert _lines(files)[-1].head.level == logging.ERROR


@pytest.mark.slow
def test_a_process_that_writes_too_much_does_not_fill_the_disk(tmp_path: Path) -> None:
    """What stays of such a log is in tests/unit/trainer/protocol/test_log_pump.py."""
    flood = "for n in range(20000): os.write(1, b'%06d ' % n + b'x' * 93 + b'\\n')"
    _run(AttemptDir(tmp_path), flood, {**os.environ, "SHARDLOOM_LOG_MAX_BYTES": "400000"})
    kept_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.log"))
    assert 300_000 < kept_bytes < 400_000 + 4 * 2**16
