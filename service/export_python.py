"""Whether the Python that makes exports beside this service has what they need.

The service's own image has not: it is small because of that (`deploy/Dockerfile.service`).
"""

from __future__ import annotations

import os
import subprocess

from service.settings import Settings

# What decides which packages a Python finds, and nothing else of our environment.
PYTHON_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
_NEEDED = ("torch", "torchrec", "fbgemm_gpu")
# Looks packages up without importing them.
_LOOK = (
    "import importlib.util as u, sys; "
    "print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
)
_TIMEOUT_S = 20.0


def missing_for_exports(settings: Settings) -> str:
    """What `trainer_python` lacks here, in words; empty if it can export."""
    try:
        done = subprocess.run(
            [settings.trainer_python, "-c", _LOOK, *_NEEDED],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            # As an export finds its packages (`service.exports.environment`), without its keys.
            env={name: os.environ[name] for name in PYTHON_VARIABLES if name in os.environ},
        )
    except FileNotFoundError:
        return "it is not there"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run ({error})"
    if done.returncode != 0:
        return f"it ends with code {done.returncode}"
    names = done.stdout.split()
    return f"it has no {', '.join(names)}" if names else ""
