"""Errors about what jobs read and leave (`service.errors` has the whole picture).

NotFound            LogNotFound              log_not_found
                    CheckpointNotFound       checkpoint_not_found
                    TraceNotFound            trace_not_found
                    ExportNotFound           export_not_found
Conflict            TracePending             trace_pending
                    ExportPending            export_pending
                    ExportNotReady           export_not_ready
                    ExportRefused            export_refused
                    ExportUnavailable        export_unavailable
ServiceError        CodeStoreFull       507  code_store_full
"""

from __future__ import annotations

from collections.abc import Sequence

from service.errors import Conflict, NotFound, ServiceError


class LogNotFound(NotFound):
    """A job has no log of this name."""

    code = "log_not_found"

    def __init__(self, source: str, sources: Sequence[str]) -> None:
        known = ", ".join(sources) or "none yet"
        super().__init__(f"no log is named '{source}'; the attempt has: {known}")


class CheckpointNotFound(NotFound):
    """A job has no such checkpoint, or none at all."""

    code = "checkpoint_not_found"

    def __init__(self, job_id: str, wanted: str, steps: Sequence[int]) -> None:
        known = ", ".join(str(step) for step in steps) or "none"
        super().__init__(f"job {job_id} has no checkpoint {wanted}; steps that it has: {known}")


class TraceNotFound(NotFound):
    """A job has no trace of this name, or its file is gone."""

    code = "trace_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"no trace is named '{name}', or its file is gone; GET /v1/jobs/JOB/traces lists them"
        )


class ExportNotFound(NotFound):
    """A job has no export of this id."""

    code = "export_not_found"

    def __init__(self, job_id: str, export_id: str) -> None:
        super().__init__(
            f"job {job_id} has no export '{export_id}'; GET /v1/jobs/JOB/exports lists them"
        )


class TracePending(Conflict):
    """An earlier request for a trace was not answered yet."""

    code = "trace_pending"

    def __init__(self, trace_id: str, names: Sequence[str]) -> None:
        super().__init__(
            f"trace {trace_id} is still being recorded; wait until {', '.join(names)} is written"
        )


class ExportPending(Conflict):
    """An earlier export of the job is not done yet."""

    code = "export_pending"

    def __init__(self, job_id: str, export_id: str) -> None:
        self.export_id = export_id
        super().__init__(
            f"export {export_id} of job {job_id} is not done yet; wait for it, then ask again"
        )


class ExportNotReady(Conflict):
    """An export that is not done, or failed, has nothing to download."""

    code = "export_not_ready"

    def __init__(self, export_id: str, status: str, message: str) -> None:
        cause = f": {message}" if message else ""
        super().__init__(f"export {export_id} is {status}{cause}")


class ExportRefused(Conflict):
    """Exporting the job would run its user's code on the service's host."""

    code = "export_refused"

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id} trains a module of its user's own (model.module), whose code does not "
            "run on this service's host; export on a host of the cluster with "
            "`shardloom export --run-dir DIR --to DIR`"
        )


class ExportUnavailable(Conflict):
    """The Python that would make exports beside the service has not what they need."""

    code = "export_unavailable"

    def __init__(self, python: str, missing: str) -> None:
        super().__init__(
            f"this service makes no exports: its Python ({python}, SHARDLOOM_TRAINER_PYTHON) "
            f"cannot, as {missing}. Run it from the image of deploy/Dockerfile.service-export, or "
            "where the trainer is installed; or let jobs export where they train with "
            "`export: {on_success: true}`, and finished ones on a host of the cluster with "
            "`shardloom export --run-dir DIR --to DIR`"
        )


class CodeStoreFull(ServiceError):
    """No more uploads of code are kept."""

    status = 507
    code = "code_store_full"
    title = "Code store full"
