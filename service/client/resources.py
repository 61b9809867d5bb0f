"""Calls of the SDK beside those of jobs: access and keys, exports, logs, sweeps, webhooks.

Mixins of `service.client.client.ShardloomClient`. Times are Unix seconds. Errors:
`service.client.errors`.
"""

from __future__ import annotations

import errno
import shutil
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from service.client.errors import ExportFailed
from service.client.transport import PATIENCE_S, Connection, items_of_pages, job_path, path_of
from service.domain.auth import AuditRecord
from service.schemas.admin import (
    DeliveryOut,
    KeyOut,
    NewKey,
    RoleName,
    WebhookCreated,
    WebhookOut,
    WhoAmI,
)
from service.schemas.common import Page
from service.schemas.jobs import ExportOut, JobDetail, LogLine, LogsOut
from service.schemas.sweeps import SweepDetail, SweepSummary
from trainer.export.artifact import ArtifactError, check_files, read_manifest
from trainer.spec.training import DEFAULT_QUANTIZATION, Quantization

EXPORT_TIMEOUT_S = 6 * 3600.0


class AuditFilters(TypedDict, total=False):
    """Which lines of the audit log are shown: those that fit everything given."""

    actor: str | None
    action: str | None
    object: str | None
    since: float | None
    refused: bool


class AccessCalls(Connection):
    def whoami(self) -> WhoAmI:
        """Who one is to the service; raises `NotSignedIn`."""
        return self._get("/v1/whoami", WhoAmI)

    def create_key(
        self, name: str, roles: Mapping[str, RoleName], *, expires_in_s: float | None = None
    ) -> NewKey:
        """Make an API key, whose text is in the answer and nowhere else."""
        body = {"name": name, "roles": dict(roles), "expires_in_s": expires_in_s}
        return self._request("POST", "/v1/keys", NewKey, json=body)

    def iter_keys(self) -> Iterator[KeyOut]:
        """Every API key, fetched page by page as they are consumed."""
        return items_of_pages(lambda after: self.list_keys(after=after))

    def list_keys(self, *, after: str | None = None, limit: int = 50) -> Page[KeyOut]:
        """One page of API keys, the revoked ones included."""
        return self._get("/v1/keys", Page[KeyOut], {"after": after, "limit": limit})

    def revoke_key(self, key_id: str) -> KeyOut:
        """End an API key; raises `NotFound`. Doing it again changes nothing."""
        return self._request("DELETE", path_of("keys", key_id), KeyOut, repeatable=True)

    def audit(
        self, *, after: str | None = None, limit: int = 100, **filters: Unpack[AuditFilters]
    ) -> Page[AuditRecord]:
        """One page of the audit log, newest first."""
        params: dict[str, Any] = {"after": after, "limit": limit, **filters}
        return self._get("/v1/audit", Page[AuditRecord], params)


class ExportCalls(Connection):
    def request_export(
        self,
        job: str,
        *,
        checkpoint: str = "newest",
        quantize: Quantization = DEFAULT_QUANTIZATION,
    ) -> ExportOut:
        """Ask for an export of a checkpoint: `newest`, `best` or a step.

        Raises `NotFound` if the job has no such checkpoint, `Conflict` while another is not done.
        """
        body = {"checkpoint": checkpoint, "quantize": quantize}
        return self._create(job_path(job, "exports"), ExportOut, body)

    def exports(self, job: str) -> list[ExportOut]:
        """Exports of a job in the order of asking, done or not."""
        return self._get(job_path(job, "exports"), Page[ExportOut]).items

    def export(self, job: str, export_id: str) -> ExportOut:
        """One export; raises `NotFound`."""
        return self._get(job_path(job, "exports", export_id), ExportOut)

    def wait_for_export(
        self, job: str, export_id: str, *, timeout_s: float = EXPORT_TIMEOUT_S, poll_s: float = 0.5
    ) -> ExportOut:
        """Block until an export is done; raises `ExportFailed`."""
        path = job_path(job, "exports", export_id)
        for found in self._polled(path, ExportOut, timeout_s, poll_s):
            if found.status == "succeeded":
                return found
            if found.status == "failed":
                raise ExportFailed(export_id, found.message)
        raise ExportFailed(export_id, f"it was not done within {timeout_s:g} s")

    def download_export(self, job: str, export_id: str, to: Path) -> Path:
        """Save an export as the new folder `to`, checked file by file; returns `to`.

        Raises `Conflict` until it is done, `ExportFailed` where what came is not whole, and
        OSError (FileExistsError where `to` exists).
        """
        if to.exists():
            raise FileExistsError(errno.EEXIST, "exists already", str(to))
        to.parent.mkdir(parents=True, exist_ok=True)
        staging = to.absolute().with_name(f".{to.name}.{uuid.uuid4().hex[:8]}.partial")
        staging.mkdir()
        packed = staging.with_suffix(".zip")
        try:
            self._download(job_path(job, "exports", export_id, "archive"), {}, packed)
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(staging)  # whose files lie below it, however they are named
            check_files(staging, read_manifest(staging))
            return staging.rename(to)
        except zipfile.BadZipFile as error:
            cause = f"{error}, or the service is of another version: use its CLI"
            raise ExportFailed(export_id, f"the download is not whole: {cause}") from error
        except ArtifactError as error:
            raise ExportFailed(export_id, f"the download is not whole: {error}") from error
        finally:
            packed.unlink(missing_ok=True)
            shutil.rmtree(staging, ignore_errors=True)

    def delete_export(self, job: str, export_id: str) -> None:
        """Delete an export, done or not; one that is being made is given up. Raises `NotFound`."""
        self._send("DELETE", job_path(job, "exports", export_id))


class LogFilters(TypedDict, total=False):
    """Which lines of a job's logs to read; what is left out filters nothing.

    `attempt` is an id, the newest by default; `level` as in `warning`; `text` is searched for
    case-insensitively, and `*` in it stands for anything. Times are Unix seconds. `tail` looks at
    the last lines of each log only.
    """

    attempt: str | None
    source: str | None
    ranks: Sequence[int]
    level: str | None
    text: str | None
    since: float | None
    until: float | None
    tail: int | None


def _log_params(filters: LogFilters) -> dict[str, Any]:
    names = {"ranks": "rank", "text": "q"}
    return {names.get(name, name): value for name, value in filters.items()}


class LogCalls(Connection):
    def logs(self, job: str, *, after: str | None = None, **filters: Unpack[LogFilters]) -> LogsOut:
        """A piece of a job's logs; `after` takes the `cursor` of an earlier answer."""
        behind = {"after": after, "tail": None} if after else {}
        return self._get(job_path(job, "logs"), LogsOut, {**_log_params(filters), **behind})

    def read_logs(self, job: str, **filters: Unpack[LogFilters]) -> LogsOut:
        """All log lines so far, asked for piece by piece."""
        piece = self.logs(job, **filters)
        lines = list(piece.lines)
        while piece.more:
            piece = self.logs(job, after=piece.cursor, **filters)
            lines += piece.lines
        return piece.model_copy(update={"lines": lines})

    def follow_logs(
        self, job: str, *, patience_s: float = PATIENCE_S, **filters: Unpack[LogFilters]
    ) -> Iterator[LogLine]:
        """Log lines as they are written, until the job has ended; survives broken connections.

        A service that does not answer is asked again for `patience_s`.
        """
        path = job_path(self._id_of(job, patience_s), "logs")
        yield from self._stream(path, LogLine, _log_params(filters), patience_s)

    def _id_of(self, job: str, patience_s: float) -> str:
        """The id of a job that is followed: a newer one may get its name meanwhile."""
        return self._get(job_path(job), JobDetail, patience_s=patience_s).id

    def download_logs(self, job: str, target: Path, *, attempt: str | None = None) -> Path:
        """Save all logs of a job, or of one attempt, in a ZIP archive.

        Raises OSError if it cannot be written; a file that is there is replaced when all is read.
        """
        return self._download(f"{job_path(job, 'logs')}:download", {"attempt": attempt}, target)


class SweepCalls(Connection):
    def create_sweep(
        self,
        spec: Mapping[str, Any],
        parameters: Sequence[Mapping[str, Any]],
        *,
        metric: str,
        force: bool = False,
        **options: Any,
    ) -> SweepDetail:
        """Start a search; raises `InvalidRequest` with the faulty fields.

        `force` starts it also where the tables of no trial fit the cluster's workers.

        Parameters have a `path`, and `values` or `low` and `high` (with `log` compared by ratio).
        Options: `direction`, `search`, `num_trials`, `num_parallel`, `seed`, `early_stopping`,
        and `secrets`, which all trials have.
        """
        body = {"spec": dict(spec), "parameters": list(parameters), "metric": metric, **options}
        return self._create("/v1/sweeps", SweepDetail, body, force=force)

    def sweeps(self) -> Iterator[SweepSummary]:
        """Every sweep, newest first, fetched page by page as they are consumed."""
        return items_of_pages(
            lambda after: self._get("/v1/sweeps", Page[SweepSummary], {"after": after})
        )

    def get_sweep(self, sweep: str) -> SweepDetail:
        """Read a sweep with its trials; raises `NotFound`."""
        return self._get(path_of("sweeps", sweep), SweepDetail)

    def follow_sweep(self, sweep: str, *, poll_s: float = 2.0) -> Iterator[SweepDetail]:
        """A sweep with its trials every `poll_s`, until it has ended; raises `NotFound`."""
        for found in self._polled(path_of("sweeps", sweep), SweepDetail, None, poll_s):
            yield found
            if found.status.is_terminal:
                return

    def cancel_sweep(self, sweep: str) -> SweepDetail:
        """Start no more trials and cancel those under way; raises `Conflict` if it has ended."""
        return self._request("POST", f"{path_of('sweeps', sweep)}:cancel", SweepDetail)

    def delete_sweep(self, sweep: str) -> None:
        """Forget a sweep that has ended; the jobs of its trials stay. Raises `Conflict`."""
        self._send("DELETE", path_of("sweeps", sweep))


class WebhookCalls(Connection):
    def create_webhook(
        self,
        url: str,
        *,
        project: str = "default",
        kinds: Sequence[str] = (),
        description: str = "",
    ) -> WebhookCreated:
        """Send timeline events to a URL; the answer has the secret, which is not shown again."""
        body = {"url": url, "project": project, "kinds": list(kinds), "description": description}
        return self._request("POST", "/v1/webhooks", WebhookCreated, json=body)

    def webhooks(self, *, project: str | None = None) -> list[WebhookOut]:
        """Webhooks of a project, or all, oldest first."""
        return self._get("/v1/webhooks", Page[WebhookOut], {"project": project}).items

    def change_webhook(self, webhook: str, **changes: Any) -> WebhookOut:
        """Change `url`, `kinds`, `description` or `is_active`; raises `NotFound`."""
        # Asking twice for the same changes nothing.
        return self._request(
            "PATCH", path_of("webhooks", webhook), WebhookOut, repeatable=True, json=changes
        )

    def delete_webhook(self, webhook: str) -> None:
        """Forget a webhook and what was not delivered yet; raises `NotFound`."""
        self._send("DELETE", path_of("webhooks", webhook))

    def rotate_webhook(self, webhook: str) -> WebhookCreated:
        """Give a webhook a new secret, which the answer has."""
        return self._request("POST", f"{path_of('webhooks', webhook)}:rotate", WebhookCreated)

    def try_webhook(self, webhook: str) -> DeliveryOut:
        """Queue a test message."""
        return self._request("POST", f"{path_of('webhooks', webhook)}:test", DeliveryOut)

    def deliveries(self, webhook: str, *, state: str | None = None) -> Iterator[DeliveryOut]:
        """Messages to a webhook, newest first, fetched page by page as they are consumed."""
        path = path_of("webhooks", webhook, "deliveries")
        return items_of_pages(
            lambda after: self._get(path, Page[DeliveryOut], {"after": after, "state": state})
        )

    def redeliver(self, webhook: str, delivery: int) -> DeliveryOut:
        """Send a message again, with the same id; raises `NotFound`."""
        path = path_of("webhooks", webhook, "deliveries", str(delivery))
        return self._request("POST", f"{path}:redeliver", DeliveryOut)
