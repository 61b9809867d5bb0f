"""Run every benchmark: one JSON file each, and a Markdown table of all ratios.

python -m tests.benchmarks.all --out DIR
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.report import SKIPPED, end_on_signal, goal_text, is_met, log, value_text

NAMES = (
    *("overhead", "startup", "pipeline", "sparse_sync", "two_d", "ne_parity"),
    *("ne_resize", "recovery", "resize", "goodput", "checkpoint_stall", "control_plane"),
    *("dashboard", "coordinator_scale", "paper_tables", "plan_accuracy", "prepare", "loader"),
    *("quality", "gpu_step"),
)


def run_all(out: Path) -> int:
    """Run each benchmark in a process of its own; the exit code is 1 if any could not measure."""
    codes = {}
    for name in NAMES:
        log(f"benchmark {name}")
        codes[name] = run_benchmark(name, out / f"{name}.json")
    done = [name for name, code in codes.items() if code == 0]
    failed = [name for name, code in codes.items() if code not in (0, SKIPPED)]
    documents = [json.loads((out / f"{name}.json").read_text()) for name in done]
    (out / "README.md").write_text(markdown_of(documents, failed))
    log(f"table in {out / 'README.md'}")
    return 1 if failed else 0


def run_benchmark(name: str, json_path: Path) -> int:
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--json", str(json_path)]
    # In a session of its own, so that a Ctrl-C reaches it once: from here.
    child = subprocess.Popen(command, start_new_session=True)
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def markdown_of(documents: Iterable[Mapping[str, Any]], failed: Iterable[str] = ()) -> str:
    """A Markdown page with a table of all ratios; `failed` names what could not measure."""
    documents = list(documents)
    lines = [
        "# Benchmarks",
        "",
        "A ratio is the median of ours over the median of the peer's, in pairs of runs that take",
        "turns; the spread is the lowest and highest ratio of a single pair. ne_parity and",
        "ne_resize give |ours - peer| / peer of means over seeds, with the signed of single seeds.",
        "",
        "| benchmark | ratio | value | goal | | ours | peer | spread |",
        "|---|---|---|---|---|---|---|---|",
        *(line for document in documents for line in _rows_of(document)),
        *(f"| {name} | could not measure | | | failed | | | |" for name in failed),
        "",
    ]
    if documents:
        machine = documents[0]["machine"]
        lines += [
            f"Machine: {machine['cpu']}, {machine['num_cores']} cores, "
            f"{machine['memory_bytes'] / 2**30:.0f} GiB; Python {machine['python']}, "
            f"torch {machine['torch']}, torchrec {machine['torchrec']}, ray {machine['ray']}.",
            "",
        ]
    return "\n".join(lines)


def _rows_of(document: Mapping[str, Any]) -> list[str]:
    rows = []
    for key, ratio in document["ratios"].items():
        verdict = "met" if is_met(ratio) else "missed"
        low, high = ratio["spread"]
        unit = ratio["unit"]
        rows.append(
            f"| {document['benchmark']} | {key} | {value_text(ratio['value'])} "
            f"| {goal_text(ratio)} | {verdict} | {ratio['ours']:.6g} {unit} "
            f"| {ratio['peer']:.6g} {unit} ({ratio['peer_name']}) "
            f"| {value_text(low)} to {value_text(high)} |"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    options = parser.parse_args()
    end_on_signal()
    options.out.mkdir(parents=True, exist_ok=True)
    return run_all(options.out)


if __name__ == "__main__":
    sys.exit(main())
