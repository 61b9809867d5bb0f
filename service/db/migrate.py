"""Schema migration as a step of its own: `shardloom migrate`.

Needs SHARDLOOM_DATABASE_URL only. The service migrates at start as well; this is for deployments
where a migration should be able to fail by itself (a Kubernetes Job, a compose service).
"""

from __future__ import annotations

import sys

from pydantic import ValidationError

from service.db.engine import migrate, newest_revision, open_engine
from service.errors import ServiceError
from service.settings import Settings, faults_of

UP_TO_DATE = 0
UNAVAILABLE = 3


def main() -> int:
    """Migrate; prints what was found and returns the exit code."""
    try:
        engine = open_engine(Settings().database_url)
        try:
            found = migrate(engine)
        finally:
            engine.dispose()
    except ValidationError as error:
        print(*faults_of(error), sep="\n", file=sys.stderr)
        return UNAVAILABLE
    except (ServiceError, OSError) as error:
        print(f"the database cannot be migrated: {error}", file=sys.stderr)
        return UNAVAILABLE
    wanted = newest_revision()
    if found == wanted:
        print(f"the database is at migration {wanted} already")
    else:
        print(f"migrated the database from {found or 'nothing'} to {wanted}")
    return UP_TO_DATE
