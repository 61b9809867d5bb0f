"""How long something has been lacking."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Shortage:
    """Whether something has been lacking for `grace_s`; says so once."""

    grace_s: float
    _since: float | None = None
    _is_told: bool = False

    def lasts(self, is_short: bool, now: float) -> bool:
        """Whether the time has come to tell."""
        if not is_short:
            self._since, self._is_told = None, False
            return False
        self._since = now if self._since is None else self._since
        is_due = not self._is_told and now - self._since >= self.grace_s
        self._is_told |= is_due
        return is_due
