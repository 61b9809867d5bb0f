"""The SDK's calls about logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from service.api.schemas import LogLine, LogsOut
from service.client_http import Connection, Params
from service.client_retry import PATIENCE_S


@dataclass(frozen=True)
class LogQuery:
    """Which lines of a job's logs are wanted; what is left away lets everything through.

    `attempt` is an id, the newest by default; `level` as in `warning`; `text` is looked for
    whatever the case, and `*` in it stands for anything. Times are Unix seconds. `tail` looks at
    the last lines of each log only.
    """

    attempt: str | None = None
    source: str | None = None
    ranks: Sequence[int] = ()
    level: str | None = None
    text: str | None = None
    since: float | None = None
    until: float | None = None
    tail: int | None = None

    @property
    def params(self) -> Params:
        """Parameters of the request."""
        return {
            "attempt": self.attempt,
            "source": self.source,
            "rank": [str(rank) for rank in self.ranks] or None,
            "level": self.level,
            "q": self.text or None,
            "since": self.since,
            "until": self.until,
            "tail": self.tail,
        }


class LogCalls(Connection):
    """Calls about logs."""

    def logs(self, job: str, *, after: str | None = None, query: LogQuery | None = None) -> LogsOut:
        """A piece of a job's logs; `after` takes the `cursor` of an earlier answer."""
        params = {**(query or LogQuery()).params, "after": after}
        return self._get(_path(job), LogsOut, {**params, "tail": None} if after else params)

    def read_logs(
        self,
        job: str,
        *,
        source: str | None = None,
        tail: int | None = None,
        query: LogQuery | None = None,
    ) -> LogsOut:
        """All log lines so far, asked for piece by piece: of a source, or those of a `query`."""
        query = query or LogQuery(source=source, tail=tail)
        answer = piece = self.logs(job, query=query)
        lines = list(answer.lines)
        while piece.lines or piece.more:
            piece = self.logs(job, after=piece.cursor, query=query)
            lines += piece.lines
        return piece.model_copy(update={"lines": lines})

    def follow_logs(
        self,
        job: str,
        *,
        source: str | None = None,
        tail: int | None = None,
        query: LogQuery | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Iterator[LogLine]:
        """Log lines as they are written, until the job has ended; survives broken connections.

        A service that does not answer is asked again for `patience_s`.
        """
        query = query or LogQuery(source=source, tail=tail)
        for event in self._stream(_path(job), query.params, patience_s):
            yield self._parse_event(event, LogLine)

    def download_logs(self, job: str, target: Path, *, attempt: str | None = None) -> Path:
        """Save all logs of a job, or of one attempt, in a file: ZIP, or gzipped text for `.gz`.

        Raises OSError if it cannot be written; a file that is there is replaced when all is read.
        """
        form = "gzip" if target.suffix == ".gz" else "zip"
        params = {"format": form, **({"attempt": attempt} if attempt else {})}
        return self._save(f"{_path(job)}:download", params, target)


def _path(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}/logs"
