"""The log tail of a job's newest attempt, with a choice of source."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nicegui import ui

from service.dashboard.log_tail import LogTail, list_sources, read_tail
from trainer.run_dir import RunDir

MAX_LOG_LINES = 500


class LogView:
    """Follows one log file of one attempt; switches to a new attempt by itself."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._attempt_id: str | None = None
        self._tail = LogTail()
        with ui.element("div").classes("log-head"):
            self._source = ui.select([], on_change=self._restart).props("dense outlined borderless")
            self._source.props('aria-label="Log source"').classes("log-source")
            self._hint = ui.label().classes("log-hint")
        self._lines = ui.log(max_lines=MAX_LOG_LINES).classes("log-lines")

    async def refresh(self, attempt_id: str | None) -> None:
        """Show what was written since the last call, of the newest attempt."""
        if attempt_id != self._attempt_id:
            self._attempt_id = attempt_id
            self._restart()
        if attempt_id is None:
            self._hint.set_text("Logs appear once the job has been submitted to the cluster.")
            return
        logs_dir = self._run_dir.attempt(attempt_id).logs_dir
        self._show_sources(await asyncio.to_thread(list_sources, logs_dir))
        if self._source.value:
            await self._follow(logs_dir / f"{self._source.value}.log")

    def _show_sources(self, sources: list[str]) -> None:
        if sources != self._source.options:
            kept = self._source.value if self._source.value in sources else None
            self._source.set_options(sources, value=kept or next(iter(sources), None))
        self._hint.set_text("" if sources else "No log file has been written yet.")

    async def _follow(self, path: Path) -> None:
        before = self._tail
        tail = await asyncio.to_thread(read_tail, path, before, MAX_LOG_LINES)
        # The reader may have picked another source while the thread was reading.
        if before is not self._tail:
            return
        self._tail = tail
        for line in tail.lines:
            # An empty label has no height, and a blank line should keep its place.
            self._lines.push(line or "\u00a0")

    def _restart(self) -> None:
        self._tail = LogTail()
        self._lines.clear()
