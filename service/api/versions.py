"""ETags of jobs: a change may ask that the job still be as its reader saw it (RFC 9110, If-Match).

A job's version rises with what is decided about it, not with its progress, so that a tag says
whether status, requests and attempts are still the same.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Header, Response

from service.api.schemas import JobDetail
from service.api.views import detail_of
from service.domain import Job
from service.job_errors import VersionUnknown
from service.settings import Settings

_TAG = re.compile(r'"(\d{1,18})"')


def wanted_version(
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            description="`ETag` of the job as it was read: 412 if it has changed since.",
            examples=['"7"'],
        ),
    ] = None,
) -> int | None:
    """The version that a change is meant for; None where any will do.

    Raises `VersionUnknown` for a tag that was never given out.
    """
    if if_match is None or if_match.strip() == "*":
        return None
    found = _TAG.fullmatch(if_match.strip())
    if found is None:
        raise VersionUnknown(if_match)
    return int(found[1])


VersionDep = Annotated[int | None, Depends(wanted_version)]


def tagged(job: Job, settings: Settings, response: Response) -> JobDetail:
    """A job as the body of an answer, whose ETag is its version."""
    response.headers["ETag"] = f'"{job.version}"'
    return detail_of(job, settings)
