"""The log tail of a job's newest attempt, with a choice of source."""

from __future__ import annotations

import asyncio

from nicegui import ui

from service.logs import LogPiece, LogPosition, list_sources, read_new, tail_position
from trainer.run_dir import AttemptDir, RunDir

MAX_LOG_LINES = 500


class LogView:
    """Follows one log of one attempt; switches to a new attempt by itself."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._attempt_id: str | None = None
        self._position: LogPosition | None = None
        self._suggested: str | None = None
        with ui.element("div").classes("log-head"):
            self._source = ui.select([], on_change=self._restart).props("dense outlined")
            self._source.props('aria-label="Log source"').classes("log-source")
            self._hint = ui.label().classes("log-hint")
        self._lines = ui.log(max_lines=MAX_LOG_LINES).classes("log-lines")

    async def refresh(self, attempt_id: str | None, *, is_final: bool) -> None:
        """Show what is new; `is_final` says that nobody writes to the logs any more."""
        if attempt_id != self._attempt_id:
            self._attempt_id = attempt_id
            self._restart()
        if attempt_id is None:
            self._hint.set_text("Logs appear once the job has been submitted to the cluster.")
            return
        files = self._run_dir.attempt(attempt_id)
        self._show_sources(await asyncio.to_thread(list_sources, files))
        if self._source.value:
            await self._follow(files, attempt_id, self._source.value, is_final)

    def _show_sources(self, sources: list[str]) -> None:
        if sources != self._source.options:
            is_ours = self._source.value == self._suggested
            self._suggested = suggested_source(sources)
            kept = self._source.value if self._source.value in sources and not is_ours else None
            self._source.set_options(sources, value=kept or self._suggested)
        self._source.set_visibility(bool(sources))
        self._hint.set_text("" if sources else "No log has been written yet.")

    async def _follow(
        self, files: AttemptDir, attempt_id: str, source: str, is_final: bool
    ) -> None:
        before = self._position
        start, pieces = await asyncio.to_thread(_read, files, attempt_id, source, before, is_final)
        # The reader may have picked another source while the thread was reading.
        if before is not self._position or source != self._source.value:
            return
        self._position = pieces[-1].position if pieces else start
        for piece in pieces[-MAX_LOG_LINES:]:
            # An empty label has no height, and a blank line should keep its place.
            self._lines.push(piece.text or "\N{NO-BREAK SPACE}")

    def _restart(self) -> None:
        self._position = None
        self._lines.clear()


def suggested_source(sources: list[str]) -> str | None:
    """The log to show until the reader picks one: a rank 0's, where training can be watched."""
    ranks = (source for source in sources if source.endswith("rank-0"))
    return next(ranks, next(iter(sources), None))


def _read(
    files: AttemptDir, attempt_id: str, source: str, position: LogPosition | None, is_final: bool
) -> tuple[LogPosition, list[LogPiece]]:
    """Where reading began and what follows; without a position, from the file's last lines."""
    start = position or tail_position(files, attempt_id, source, MAX_LOG_LINES)
    return start, list(read_new(files, start, source, is_final=is_final))
