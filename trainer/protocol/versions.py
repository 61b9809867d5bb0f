"""Start-up check that the packages which must match do match; reads metadata, imports none.

torch, fbgemm and torchrec are compiled against one another: a wrong combination fails much
later, in an operator that is missing. Ray is pinned because elastic training relies on its
Train V2 internals. A driver that is older than torch's CUDA fails at the first kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Each row was tested as a whole; the first is what `make setup` installs.
MATCHED_STACKS: tuple[dict[str, str], ...] = (
    {"torch": "2.13", "fbgemm-gpu": "1.8", "torchrec": "1.8", "ray": "2.60"},
    {"torch": "2.11", "fbgemm-gpu": "1.6", "torchrec": "1.6", "ray": "2.60"},
)
# The oldest driver of NVIDIA that runs programs of a major version of CUDA (docs.nvidia.com/deploy/
# cuda-compatibility: minor version compatibility).
OLDEST_DRIVER = {12: 525, 13: 580}
_CODE = Path(__file__).resolve().parents[1]


def installed_versions() -> dict[str, str]:
    """Versions of those pinned packages that are installed, without local parts (`+cpu`)."""
    found: dict[str, str] = {}
    for package in MATCHED_STACKS[0]:
        for name in (package, f"{package}-cpu"):  # fbgemm-gpu has a name for each device
            with contextlib.suppress(PackageNotFoundError):
                found.setdefault(package, version(name).partition("+")[0])
    return found


def check_versions(installed: Mapping[str, str] | None = None) -> list[str]:
    """Compare `installed` (default: this environment) with the matched stack of its torch.

    Says of each package that does not fit what is wrong and how to mend it; of this environment
    also whether the GPU driver is too old.
    """
    too_old = check_driver() if installed is None else None
    installed = installed_versions() if installed is None else installed
    stack = next(
        (row for row in MATCHED_STACKS if _fits(installed.get("torch"), row["torch"])),
        MATCHED_STACKS[0],
    )
    mismatches = []
    for package, wanted in stack.items():
        found = installed.get(package)
        if not _fits(found, wanted):
            state = f"{found} is installed" if found else "is missing"
            mismatches.append(
                f"{package} {state}, {wanted} is needed: run `make setup`, or "
                "pip install 'shardloom[trainer-cpu]' ('shardloom[trainer-gpu]' with CUDA)"
            )
    return mismatches + ([too_old] if too_old else [])


def check_driver() -> str | None:
    """What is wrong with the GPU driver here; None where it fits, or there is none, or no CUDA."""
    return driver_mismatch(cuda_of_torch(), _cuda_of_driver())


def driver_mismatch(cuda: str | None, driver: tuple[int, int] | None) -> str | None:
    """Why torch, built for `cuda`, cannot run on a driver for CUDA `driver`, and what to upgrade.

    Drivers run what was built for their own major version of CUDA or an older one.
    """
    if cuda is None or driver is None:
        return None
    major = int(cuda.partition(".")[0])
    if driver[0] >= major:
        return None
    oldest = OLDEST_DRIVER.get(major)
    return (
        f"torch is built for CUDA {cuda}, the NVIDIA driver here ends at CUDA {driver[0]}."
        f"{driver[1]}: upgrade the driver to {f'{oldest} or later' if oldest else 'a newer one'}"
    )


def cuda_of_torch() -> str | None:
    """The version of CUDA that torch is built for, as in 13.0; None for CPUs. Imports no torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text()
    version_line = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return version_line[1] if version_line else None


def _cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA that the driver of this machine knows; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


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


def _fits(found: str | None, wanted: str) -> bool:
    """Whether `found` is a patch release of the minor version `wanted`."""
    return found is not None and f"{found}.".startswith(f"{wanted}.")


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
