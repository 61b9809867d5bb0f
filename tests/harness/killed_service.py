"""The service as a process that is killed at a fixed point of its work.

    python -m tests.harness.killed_service FILE

starts `python -m service.app` with its store, backend and webhook outbox wrapped. While there is a
FILE, it names a point: `before` or `after`, then a call and its number, as in
`before store.update_job:2`: the process sends itself SIGKILL when the second call of `update_job`
since then begins, in whatever thread. `after` is once the call has returned, before its caller goes
on. What is left is what a crash of the machine at that point would leave, but for FILE.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service import app

Noted = Callable[[str], None]


class KillPoint:
    """Where the process ends, as a file says, and how often that was reached."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._count = 0
        self._lock = threading.Lock()

    def pass_by(self, place: str) -> None:
        """Count a call; the process ends if it is the one."""
        with self._lock:
            if not self._file.exists():
                return
            wanted, _, number = self._file.read_text().partition(":")
            if wanted != place:
                return
            self._count += 1
            if self._count == int(number or 1):
                self._file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


class Stepping:
    """Passes everything on to `target`; `before` and `after` get the name of each call of it."""

    def __init__(self, target: Any, before: Noted, after: Noted = lambda name: None) -> None:
        self._target, self._before, self._after = target, before, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(name)
            result = found(*args, **kwargs)
            self._after(name)
            return result

        return call


def wrap(point: KillPoint) -> None:
    """Have the service composed over a wrapped store, backend and webhook outbox."""
    create_app, webhooks = app.create_app, app.WebhookStore

    def stepping(target: Any, owner: str) -> Any:
        return Stepping(
            target,
            before=lambda name: point.pass_by(f"before {owner}.{name}"),
            after=lambda name: point.pass_by(f"after {owner}.{name}"),
        )

    def create_wrapped(settings: Any, store: Any, backend: Any) -> Any:
        return create_app(settings, stepping(store, "store"), stepping(backend, "backend"))

    app.create_app = create_wrapped
    app.WebhookStore = lambda engine: stepping(webhooks(engine), "webhooks")  # type: ignore[misc,assignment]


if __name__ == "__main__":
    wrap(KillPoint(Path(sys.argv[1])))
    sys.exit(app.main())
