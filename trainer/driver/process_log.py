"""The log of one process of an attempt: everything that it prints, from whatever language."""

from __future__ import annotations

import faulthandler
import logging
import os
import subprocess
import sys
import time
import warnings
from functools import cache
from pathlib import Path

from trainer.protocol import log_pump

DEFAULT_MAX_BYTES = 256 * 2**20
_PUMP = Path(log_pump.__file__)


def start_log(path: Path) -> None:
    """Copy standard output and error, of native code too, to `path` on run storage.

    SHARDLOOM_LOG_MAX_BYTES bounds what is kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _divert(path, int(os.environ.get("SHARDLOOM_LOG_MAX_BYTES", DEFAULT_MAX_BYTES)))
    except (OSError, subprocess.SubprocessError) as error:
        # Ray's own log goes on, so training does, too.
        print(f"{path} is not written: {error}", file=sys.stderr)
    faulthandler.enable(all_threads=True)
    logging.basicConfig(
        level=logging.ERROR,  # TorchRec and FBGEMM log pages at every start
        stream=sys.stderr,
        force=True,
    )
    # Lines as the service reads them back: time in UTC, level, logger, text.
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    logging.getLogger("trainer").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")


@cache
def _outside() -> int:
    """A copy of the original file descriptor 2, for logs that follow one another."""
    return os.dup(2)


def _divert(path: Path, max_bytes: int) -> None:
    """Redirect file descriptors 1 and 2 to a pump, which copies to `path` and the original 2."""
    outside = _outside()
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", str(_PUMP), str(path), str(max_bytes)]
    # Returns once the pump has detached itself: Ray would end a child.
    subprocess.run(command, stdin=reading, stdout=subprocess.DEVNULL, stderr=outside, check=True)
    os.close(reading)
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
