"""When a submission that Kubernetes could not take is worth another try.

The reconciler looks every second; a quota or a right is mended in minutes. A hundred jobs that wait
for it must not be hundreds of requests a second to the API server, nor as many writes of ours:
`Backend.may_submit` is asked before anything is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service.errors import BackendUnreachable

_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 30.0
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class _Trouble:
    message: str
    num_times: int
    until: float


class Patience:
    """Pauses that grow with the failures in a row of each attempt; `clock` gives seconds.

    The second try follows at once: the first may have been bad luck.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._troubles: dict[str, _Trouble] = {}

    def is_over(self, attempt_id: str) -> bool:
        """Whether the pause after the last try has passed."""
        before = self._troubles.get(attempt_id)
        return before is None or self._clock() >= before.until

    @contextmanager
    def trying(self, attempt_id: str) -> Iterator[None]:
        """Around a try; raises the `BackendUnreachable` of the one before while it is too early."""
        before = self._troubles.get(attempt_id)
        if before is not None and not self.is_over(attempt_id):
            raise BackendUnreachable(before.message)
        try:
            yield
        except BackendUnreachable as error:
            self._note(attempt_id, str(error), before.num_times + 1 if before else 1)
            raise
        self._troubles.pop(attempt_id, None)

    def _note(self, attempt_id: str, message: str, num_times: int) -> None:
        if len(self._troubles) > _MAX_REMEMBERED:
            self._troubles.clear()
        doublings = min(num_times - 2, 10)
        pause_s = 0.0 if num_times == 1 else min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0**doublings)
        self._troubles[attempt_id] = _Trouble(message, num_times, self._clock() + pause_s)
