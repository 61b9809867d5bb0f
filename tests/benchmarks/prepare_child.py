"""One preparation in a process of its own, for the prepare benchmark.

python -m tests.benchmarks.prepare_child ours|published|careful SOURCE OUT

Prints one line of JSON: `wall_s` without start-up and imports, `peak_bytes` of resident memory
over the process's life, and `base_bytes`, which it held before it began.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

_BYTES_PER_KB = 1024


def main(side: str, source: Path, out: Path) -> None:
    prepare = method_of(side)
    base_bytes = memory_bytes("VmRSS")
    started = time.perf_counter()
    prepare(source, out)
    wall_s = time.perf_counter() - started
    # The kernel's own peak of this program. getrusage's would count the parent's before exec.
    peak_bytes = memory_bytes("VmHWM")
    print(json.dumps({"wall_s": wall_s, "peak_bytes": peak_bytes, "base_bytes": base_bytes}))


def method_of(side: str) -> Callable[[Path, Path], object]:
    """What a side calls; it imports nothing of the other."""
    if side == "ours":
        from trainer.datasets.movielens.prepare import prepare_movielens

        return prepare_movielens
    from tests.benchmarks.prepare_pandas import prepare

    return partial(prepare, style=side)


def memory_bytes(name: str) -> int:
    """A number of /proc/self/status: VmHWM is the most that was ever resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * _BYTES_PER_KB
    raise SystemExit(f"/proc/self/status has no {name}; the benchmark needs Linux")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
