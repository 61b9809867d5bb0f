"""Calls of the SDK about exports of models."""

from __future__ import annotations

import shutil
import tarfile
import uuid
from pathlib import Path
from urllib.parse import quote

from service.api.export_schemas import ExportOut, RequestExport
from service.api.schemas import Page
from service.client_errors import ExportFailed
from service.client_http import Connection
from trainer.export.artifact import check_files, read_manifest
from trainer.export.errors import ArtifactError
from trainer.spec.export import Quantization

EXPORT_TIMEOUT_S = 6 * 3600.0


class ExportCalls(Connection):
    """Ask for exports, wait for them, download them, delete them."""

    def request_export(
        self,
        job: str,
        *,
        checkpoint: str = "newest",
        quantize: Quantization = "int8",
        idempotency_key: str | None = None,
    ) -> ExportOut:
        """Ask for an export of a checkpoint: `newest`, `best` or a step.

        Raises `NotFound` if the job has no such checkpoint, `Conflict` while another is not done.
        """
        body = RequestExport.model_construct(checkpoint=checkpoint, quantize=quantize)
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        response = self._with_retries(
            lambda: self._http.post(_path(job), json=body.model_dump(), headers=headers)
        )
        return self._parse(response, ExportOut)

    def exports(self, job: str) -> list[ExportOut]:
        """Exports of a job in the order of asking, done or not."""
        return self._get(_path(job), Page[ExportOut]).items

    def export(self, job: str, export_id: str) -> ExportOut:
        """One export; raises `NotFound`."""
        return self._get(_path(job, export_id), ExportOut)

    def wait_for_export(
        self, job: str, export_id: str, *, timeout_s: float = EXPORT_TIMEOUT_S, poll_s: float = 0.5
    ) -> ExportOut:
        """Block until an export is done; raises `ExportFailed`."""
        deadline = self._clock() + timeout_s
        while True:
            found = self.export(job, export_id)
            if found.status == "succeeded":
                return found
            if found.status == "failed":
                raise ExportFailed(export_id, found.message)
            if self._clock() >= deadline:
                raise ExportFailed(export_id, f"it was not done within {timeout_s:g} s")
            self._sleep(poll_s)

    def download_export(self, job: str, export_id: str, to: Path) -> Path:
        """Save an export as the new folder `to`, checked file by file; returns `to`.

        Raises `Conflict` until it is done, `ExportFailed` where what came is not whole, and
        OSError (FileExistsError where `to` exists).
        """
        if to.exists():
            raise FileExistsError(f"{to} exists already")
        to.parent.mkdir(parents=True, exist_ok=True)
        staging = to.with_name(f".{to.name}.{uuid.uuid4().hex[:8]}.partial")
        staging.mkdir()
        tar = staging.with_suffix(".tar")
        try:
            self._save(_path(job, f"{export_id}/archive"), {}, tar)
            with tarfile.open(tar) as archive:
                _unpack(archive, staging)
            check_files(staging, read_manifest(staging))
            return staging.rename(to)
        except (tarfile.TarError, ArtifactError) as error:
            raise ExportFailed(export_id, f"the download is not whole: {error}") from error
        finally:
            tar.unlink(missing_ok=True)
            shutil.rmtree(staging, ignore_errors=True)

    def delete_export(self, job: str, export_id: str) -> None:
        """Delete an export, done or not; one that is being made is given up. Raises `NotFound`."""
        self._once(lambda: self._http.delete(_path(job, export_id)))


def _unpack(archive: tarfile.TarFile, to: Path) -> None:
    """Take files out, below `to` only; raises `tarfile.ReadError` for anything else.

    By hand, as Pythons before 3.11.4 (Debian 12 has 3.11.2) know no filter that sees to it.
    """
    root = to.resolve()
    for member in archive:
        place = (root / member.name).resolve()
        source = archive.extractfile(member) if member.isfile() else None
        if source is None or not place.is_relative_to(root):
            if member.isdir():
                continue
            raise tarfile.ReadError(f"it holds {member.name!r}, which is no file of an export")
        place.parent.mkdir(parents=True, exist_ok=True)
        with source, place.open("xb") as target:
            shutil.copyfileobj(source, target)


def _path(job: str, rest: str = "") -> str:
    path = f"/v1/jobs/{quote(job, safe='')}/exports"
    return f"{path}/{rest}" if rest else path
