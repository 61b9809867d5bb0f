"""Start-up check that the packages which must match do match; reads metadata, imports none.

torch, fbgemm and torchrec are compiled against one another: a wrong combination fails much
later, in an operator that is missing. Ray is pinned because elastic training relies on its
Train V2 internals.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What `make setup` installs.
STACK = {"torch": "2.13", "fbgemm-gpu": "1.8", "torchrec": "1.8", "ray": "2.60"}
_CODE = Path(__file__).resolve().parents[1]


def installed_versions() -> dict[str, str]:
    """Versions of those pinned packages that are installed, without local parts (`+cpu`)."""
    found: dict[str, str] = {}
    for package in STACK:
        for name in (package, f"{package}-cpu"):  # fbgemm-gpu has a name for each device
            with contextlib.suppress(PackageNotFoundError):
                found.setdefault(package, version(name).partition("+")[0])
    return found


def check_versions(installed: Mapping[str, str] | None = None) -> list[str]:
    """Compare `installed` (default: this environment) with `STACK`.

    Says of each package that does not fit what is wrong and how to mend it.
    """
    installed = installed_versions() if installed is None else installed
    mismatches = []
    for package, wanted in STACK.items():
        found = installed.get(package)
        if not f"{found}.".startswith(f"{wanted}."):
            state = f"{found} is installed" if found else "is missing"
            mismatches.append(
                f"{package} {state}, {wanted} is needed: run `make setup`, or pip install "
                "'shardloom[trainer-gpu]'; without CUDA pip install 'shardloom[trainer-cpu]', then "
                f"pip install --no-deps torchrec=={STACK['torchrec']}.0"
            )
    return mismatches


@cache
def versions_here() -> dict[str, str]:
    """What is to be the same on all machines of a job: packages, and a digest of our code.

    Two check-outs may say the same version. Python and Ray are compared by Ray itself.
    """
    digest = hashlib.sha256()
    for path in sorted(_CODE.rglob("*.py")):
        digest.update(path.relative_to(_CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return installed_versions() | {"Shardloom's code": digest.hexdigest()[:12]}


def unlike_driver(driver: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What a worker's machine has in another version than its driver's, a clause for each."""
    return [
        f"{name} is {here.get(name, 'missing')} here, {driver.get(name, 'missing')} at the driver"
        for name in sorted({*driver, *here})
        if here.get(name) != driver.get(name)
    ]


def main() -> int:
    """Print the pinned versions, or every mismatch with its mend; the exit code says which."""
    mismatches = check_versions()
    for mismatch in mismatches:
        print(mismatch)
    if not mismatches:
        print(", ".join(f"{name} {text}" for name, text in installed_versions().items()))
    return 1 if mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
