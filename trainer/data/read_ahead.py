"""One thread that makes batches before they are wanted."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

NUM_PREFETCHED = 4
"""Batches that are made ahead."""

Task = ParamSpec("Task")
Made = TypeVar("Made")


class ReadAhead:
    """Runs tasks in the order given; `wait_s` is the time in seconds spent waiting for them."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        # One worker runs the tasks in order, so that they may share a reader.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    def submit(
        self, task: Callable[Task, Made], *args: Task.args, **kwargs: Task.kwargs
    ) -> Future[Made]:
        """Run `task` after those submitted before."""
        return self._thread.submit(task, *args, **kwargs)

    def wait_for(self, made: Future[Made]) -> Made:
        """The result of a task, or what it raised."""
        begun = time.perf_counter()
        result = made.result()
        self.wait_s += time.perf_counter() - begun
        return result

    def close(self) -> None:
        """End the thread; tasks that have not begun are dropped. Harmless when called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)
