"""Makes the secrets of compose.yaml, once: `python -m deploy.make_env`.

`deploy/.env`, readable by its owner only, is what `docker compose -f deploy/compose.yaml` takes its
variables from. Values are random: there is no default that an installation could be left at. A
file that is there stays as it is; names that it lacks, as after an upgrade, are added.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from dotenv import dotenv_values

from service.files import write_private

_FOLDER = Path(__file__).parent
_SECRETS = (
    "POSTGRES_PASSWORD",
    "SHARDLOOM_SECRET_KEY",
    "RAY_AUTH_TOKEN",
    "MINIO_ROOT_USER",
    "MINIO_ROOT_PASSWORD",
    "GRAFANA_PASSWORD",
)
_NUM_BYTES = 24


def make_env(folder: Path) -> list[str]:
    """Add what `.env` in `folder` lacks; returns the names that were made.

    The file of the key that Prometheus reads metrics with is made as well, and is empty.
    """
    env = folder / ".env"
    text = env.read_text() if env.exists() else ""
    # To Compose an empty one is missing.
    known = dotenv_values(env, interpolate=False)
    missing = [name for name in _SECRETS if not known.get(name)]
    added = "".join(f"{name}={secrets.token_hex(_NUM_BYTES)}\n" for name in missing)
    if added:
        joint = "" if not text or text.endswith("\n") else "\n"
        write_private(env, text + joint + added)
    (folder / "secrets").mkdir(mode=0o700, exist_ok=True)
    key = folder / "secrets" / "metrics-key"
    if not key.exists():
        key.touch()
        # Prometheus runs as another user; the folder keeps others of this machine out.
        key.chmod(0o644)
    return missing


if __name__ == "__main__":
    made = make_env(_FOLDER)
    print(f"{_FOLDER / '.env'}: {', '.join(made) if made else 'nothing is missing'}")
