"""The service as a process that is killed at a fixed point of its work.

    python -m tests.harness.killed_service POINT

starts `python -m service.app` with its store and backend wrapped. POINT is `before` or `after`,
then a call and its number, as in `before store.update_job:2`: the process sends itself SIGKILL when
the second call of `update_job` begins, in whatever thread. `after` is once the call has returned,
before its caller goes on. What is left is what a crash of the machine at that point would leave.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from service import app


@dataclass
class KillPoint:
    """The place where the process ends, and how often it was reached."""

    when: str
    target: str
    call: str
    number: int
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def parse(cls, text: str) -> KillPoint:
        """Raises `ValueError` for anything but `before|after store|backend.CALL[:NUMBER]`."""
        pattern = r"(before|after) (store|backend|webhooks)\.(\w+)(?::(\d+))?"
        if not (found := re.fullmatch(pattern, text)):
            raise ValueError(f"no kill point: {text!r}")
        when, target, call, number = found.groups()
        return cls(when, target, call, int(number or 1))

    def is_reached(self) -> bool:
        """Count a call; whether it is the one."""
        with self._lock:
            self._count += 1
            return self._count == self.number


class Stepping:
    """Passes everything on to `target`, but ends the process at the point."""

    def __init__(self, target: Any, point: KillPoint) -> None:
        self._target = target
        self._point = point

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name != self._point.call:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            is_here = self._point.is_reached()
            if is_here and self._point.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = found(*args, **kwargs)
            if is_here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def wrap(point: KillPoint) -> None:
    """Have the service composed over a wrapped store, backend or webhook outbox."""
    if point.target == "webhooks":
        made = app.WebhookStore
        app.WebhookStore = lambda engine: Stepping(made(engine), point)  # type: ignore[misc,assignment]
        return
    create_app = app.create_app

    def create_wrapped(settings: Any, store: Any, backend: Any) -> Any:
        if point.target == "store":
            store = Stepping(store, point)
        else:
            backend = Stepping(backend, point)
        return create_app(settings, store, backend)

    app.create_app = create_wrapped


if __name__ == "__main__":
    wrap(KillPoint.parse(sys.argv[1]))
    sys.exit(app.main())
