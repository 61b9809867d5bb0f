"""Going on from an older checkpoint than the newest, because somebody chose one.

    service ──► RUN_DIR/rewind.json {"checkpoint", "attempt_index"}    read by the workers

What earlier attempts saved after the chosen checkpoint is *superseded*: it is not resumed from any
more, and is removed once an attempt of the new line has committed a checkpoint of its own. Until
then nothing is lost: without the file the newest checkpoint counts again.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

logger = logging.getLogger(__name__)


class Rewind(BaseModel):
    """Attempts from number `attempt_index` on go on from the folder named `checkpoint`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    checkpoint: str
    attempt_index: int = Field(ge=0)

    def supersedes(self, name: str) -> bool:
        """Whether the checkpoint in folder `name` is of the line that was left."""
        chosen, saved = _step_and_attempt(self.checkpoint), _step_and_attempt(name)
        if chosen is None or saved is None or name == self.checkpoint:
            return False
        return saved[0] >= chosen[0] and saved[1] < self.attempt_index


def read_rewind(path: Path) -> Rewind | None:
    """The choice in a file; None where nobody made one. One that cannot be read is none."""
    try:
        return Rewind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("%s is ignored: %s", path, error)
        return None


def _step_and_attempt(name: str) -> tuple[int, int] | None:
    """Step and attempt index in the name of a checkpoint's folder."""
    found = re.match(r"step-(\d+)-a(\d+)-", name)
    return (int(found[1]), int(found[2])) if found else None
