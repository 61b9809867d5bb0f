"""Start-up check that the packages which must match do match; reads metadata, imports none.

torch, fbgemm and torchrec are compiled against one another: a wrong combination fails much
later, in an operator that is missing. Ray is pinned because elastic training relies on its
Train V2 internals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

# Each row was tested as a whole; the first is what `make setup` installs.
MATCHED_STACKS: tuple[dict[str, str], ...] = (
    {"torch": "2.13", "fbgemm-gpu": "1.8", "torchrec": "1.8", "ray": "2.60"},
    {"torch": "2.11", "fbgemm-gpu": "1.6", "torchrec": "1.6", "ray": "2.60"},
)


@dataclass(frozen=True)
class Mismatch:
    """A package whose installed version (`found`, None if absent) is not the one `wanted`."""

    package: str
    found: str | None
    wanted: str

    @property
    def message(self) -> str:
        """What is wrong and how to mend it."""
        state = f"{self.found} is installed" if self.found else "is missing"
        return (
            f"{self.package} {state}, {self.wanted} is needed: run `make setup`, or "
            "pip install 'shardloom[trainer-cpu]' ('shardloom[trainer-gpu]' with CUDA)"
        )


def installed_versions() -> dict[str, str]:
    """Versions of those pinned packages that are installed, without local parts (`+cpu`)."""
    found: dict[str, str] = {}
    for package in MATCHED_STACKS[0]:
        for name in (package, f"{package}-cpu"):  # fbgemm-gpu has a name for each device
            with contextlib.suppress(PackageNotFoundError):
                found.setdefault(package, version(name).partition("+")[0])
    return found


def check_versions(installed: Mapping[str, str] | None = None) -> list[Mismatch]:
    """Compare `installed` (default: this environment) with the matched stack of its torch.

    An empty list means that everything fits.
    """
    installed = installed_versions() if installed is None else installed
    stack = next(
        (row for row in MATCHED_STACKS if _fits(installed.get("torch"), row["torch"])),
        MATCHED_STACKS[0],
    )
    return [
        Mismatch(package, installed.get(package), wanted)
        for package, wanted in stack.items()
        if not _fits(installed.get(package), wanted)
    ]


def _fits(found: str | None, wanted: str) -> bool:
    """Whether `found` is a patch release of the minor version `wanted`."""
    return found is not None and f"{found}.".startswith(f"{wanted}.")


def main() -> int:
    """Print the pinned versions, or every mismatch with its mend; the exit code says which."""
    mismatches = check_versions()
    for mismatch in mismatches:
        print(mismatch.message)
    if not mismatches:
        print(", ".join(f"{name} {text}" for name, text in installed_versions().items()))
    return 1 if mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
