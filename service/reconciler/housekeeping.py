"""Retention: deletes old metric points once a minute, and what else is old once an hour."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from service.db.auth import KeyStore
from service.db.engine import write_in_background
from service.db.jobs import JobStore
from service.db.metrics import prune
from service.db.sweeps import SweepStore
from service.db.webhooks import WebhookStore
from service.errors import StoreUnavailable
from service.jobs.actions import finish_deletions
from service.jobs.code_archives import remove_old_code
from service.jobs.exports import remove_all_deleted, remove_old_exports
from service.settings import Settings

logger = logging.getLogger(__name__)
_INTERVAL_S = 60.0
_CLOSE_S = 2.0
# Files are looked at in all run folders.
_FILES_INTERVAL_S = 3600.0
_DAY_S = 86_400.0
_DELIVERY_DAYS = 14.0
# Those of a job are kept before it is.
_ORPHAN_AGE_S = 3600.0


class Housekeeper:
    """Deletes what the settings do not keep: metric points, deliveries of webhooks, uploads of
    code, exports; secrets of no job; and what deletions that were cut off have left.

    `clock` gives Unix seconds.
    """

    def __init__(self, store: JobStore, settings: Settings, clock: Callable[[], float]) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._files_at = clock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Begin to run once a minute, in a thread of its own: storage may hang."""
        self._thread.start()

    def close(self) -> None:
        """Run no more; what is cut off is found again."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        write_in_background()
        while not self._closing.wait(_INTERVAL_S):
            try:
                self.run()
            except Exception:  # left for the next time
                logger.exception("cannot finish housekeeping, trying again")

    def run(self) -> None:
        """Delete what is due; what fails is left for the next time."""
        store, settings, now = self._store, self._settings, self._clock()
        days, max_points = settings.metric_retention_days, settings.metric_max_points_per_series
        prune_due = partial(prune, store.engine, days=days, max_points=max_points, now=now)
        self._remove("metric points", prune_due)
        # Later than that it is due only where the clock was set back.
        if 0 < self._files_at - now <= _FILES_INTERVAL_S:
            return
        self._files_at = now + _FILES_INTERVAL_S
        orphans = partial(KeyStore(store.engine).forget_orphans, now - _ORPHAN_AGE_S)
        self._remove("secrets of no job", orphans)
        deliveries = partial(WebhookStore(store.engine).prune, now - _DELIVERY_DAYS * _DAY_S)
        self._remove("deliveries of webhooks", deliveries)
        old_code = partial(remove_old_code, settings, now, self._named_code)
        self._remove("uploads of code", old_code)
        self._remove("exports", partial(remove_old_exports, settings, now))
        self._remove("deleted exports", partial(remove_all_deleted, settings))
        self._remove("deleted jobs", partial(finish_deletions, store, settings))

    def _remove(self, what: str, remove: Callable[[], int | None]) -> None:
        try:
            num_removed = remove()
        except (StoreUnavailable, OSError) as error:
            logger.warning("cannot remove old %s, trying again: %s", what, error)
            return
        if num_removed:
            logger.info("removed %d %s past their retention", num_removed, what)

    def _named_code(self) -> set[str]:
        codes = {job.spec.model.code for job in self._store.list_live_jobs()}
        sweeps = SweepStore(self._store.engine).list_live()
        codes |= {sweep.spec["model"].get("code") for sweep in sweeps}
        return {code for code in codes if code is not None}
