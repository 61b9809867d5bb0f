"""What all benchmarks share: paired runs, medians and ratios, the JSON file, the printed table.

A benchmark measures *ours* and a *peer* in pairs, one after the other, and swaps who goes first
from pair to pair, so that a machine that slows down or warms up treats both alike. The value of a
ratio is the median of ours over the median of the peer's; its spread is the lowest and highest
ratio of a single pair.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypedDict

from rich.console import Console, RenderableType
from rich.table import Table

Side = Literal["ours", "peer"]
Values = Mapping[str, float]
Measure = Callable[[], Values]

_DISTRIBUTIONS = ("torch", "torchrec", "ray")
_WIDTH = 140  # characters; folded cells would hide what a row is called
SKIPPED = 77  # exit code, as test harnesses know it
REPOSITORY = Path(__file__).parents[2]
_TAIL_CHARACTERS = 3000


class BenchmarkError(Exception):
    """A benchmark could not measure; the message says what failed and where to look."""


class BenchmarkSkipped(Exception):
    """This machine lacks what a benchmark needs; the message says what."""


@dataclass(frozen=True)
class Goal:
    """One ratio that a benchmark measures and what it should be.

    Both sides report their `measured` value, in `unit`, under this name.
    """

    key: str
    measured: str
    unit: str
    goal: float
    better: Literal["lower", "higher"]
    peer_name: str


@dataclass(frozen=True)
class Run:
    """One measured run of one side of pair number `pair` (from 0)."""

    pair: int
    side: Side
    values: Values


class Ratio(TypedDict):
    """A measured ratio as the JSON file holds it. `spread` is that of the single pairs."""

    value: float
    goal: float
    better: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    spread: list[float]


def order_of_pair(pair: int) -> tuple[Side, Side]:
    """Who runs first in pair number `pair`: the sides take turns."""
    return ("ours", "peer") if pair % 2 == 0 else ("peer", "ours")


def log(line: str) -> None:
    """Tell on stderr how far a benchmark is."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def run_pairs(num_pairs: int, ours: Measure, peer: Measure) -> list[Run]:
    """Measure both sides `num_pairs` times in turn, and log a line per run."""
    sides: dict[Side, Measure] = {"ours": ours, "peer": peer}
    runs = []
    for pair in range(num_pairs):
        for side in order_of_pair(pair):
            runs.append(Run(pair, side, sides[side]()))
            shown = ", ".join(f"{name} {value:.4g}" for name, value in runs[-1].values.items())
            log(f"pair {pair + 1}/{num_pairs} {side}: {shown}")
    return runs


def ratio_of(goal: Goal, runs: Iterable[Run]) -> Ratio:
    """Ours over the peer; raises `BenchmarkError` unless each pair has both sides."""
    measured: dict[Side, dict[int, float]] = {"ours": {}, "peer": {}}
    for run in runs:
        measured[run.side][run.pair] = run.values[goal.measured]
    ours, peer = measured["ours"], measured["peer"]
    if not ours or ours.keys() != peer.keys():
        raise BenchmarkError(f"{goal.key}: pairs {sorted(ours)} of ours, {sorted(peer)} of peer")
    of_pairs = [ours[pair] / peer[pair] for pair in ours]
    middle_ours, middle_peer = statistics.median(ours.values()), statistics.median(peer.values())
    return Ratio(
        value=middle_ours / middle_peer,
        goal=goal.goal,
        better=goal.better,
        ours=middle_ours,
        peer=middle_peer,
        peer_name=goal.peer_name,
        unit=goal.unit,
        spread=[min(of_pairs), max(of_pairs)],
    )


def is_met(ratio: Ratio) -> bool:
    if ratio["better"] == "lower":
        return ratio["value"] <= ratio["goal"]
    return ratio["value"] >= ratio["goal"]


@dataclass(frozen=True)
class BenchmarkReport:
    """Everything that one benchmark found. `rows` is a table beside the ratios, alike in keys."""

    benchmark: str
    settings: Mapping[str, Any]
    goals: Sequence[Goal]
    runs: Sequence[Run]
    rows: Sequence[Mapping[str, Any]] = ()

    def document(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """The report as the JSON file holds it; `machine` is where it was measured."""
        document = {
            "benchmark": self.benchmark,
            "machine": dict(machine),
            "settings": dict(self.settings),
            "ratios": {goal.key: ratio_of(goal, self.runs) for goal in self.goals},
            "runs": [asdict(run) for run in self.runs],
        }
        if self.rows:
            document["rows"] = [dict(row) for row in self.rows]
        return document


def describe_machine() -> dict[str, Any]:
    """The machine, how busy it is now, and the versions that a result belongs to."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in _DISTRIBUTIONS},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def table_of(document: Mapping[str, Any]) -> Table:
    peers = {f"peer: {ratio['peer_name']}" for ratio in document["ratios"].values()}
    table = Table(
        *("ratio", "value", "spread", "goal", "ours", "peer"),
        title=document["benchmark"],
        caption=", ".join(sorted(peers)),
    )
    for key, ratio in document["ratios"].items():
        color = "green" if is_met(ratio) else "red"
        low, high = ratio["spread"]
        table.add_row(
            key,
            f"[{color}]{value_text(ratio['value'])}",
            f"{value_text(low)} to {value_text(high)}",
            goal_text(ratio),
            f"{ratio['ours']:.4g} {ratio['unit']}",
            f"{ratio['peer']:.4g} {ratio['unit']}",
        )
    return table


def rows_table_of(document: Mapping[str, Any]) -> Table:
    rows = document["rows"]
    table = Table(*rows[0], title=document["benchmark"])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def value_text(value: float) -> str:
    """A ratio with three decimals, or six where three would show little of it."""
    return f"{value:.6f}" if 0 < abs(value) < 0.01 else f"{value:.3f}"


def goal_text(ratio: Ratio) -> str:
    """The goal in words: `at least 0.97`."""
    return f"{'at most' if ratio['better'] == 'lower' else 'at least'} {ratio['goal']:g}"


def run_child(*command: str, what: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints; raises `BenchmarkError` with `what` and the end of its stderr."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = done.stderr.strip()[-_TAIL_CHARACTERS:]
        raise BenchmarkError(f"{what} ended with {done.returncode}:\n{tail}")
    return done.stdout


def run_module(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None
) -> Any:
    """The JSON in the last line that a module of the benchmarks prints, run in its own process."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]
    printed = run_child(*command, what=" ".join(command[2:]), environment=environment)
    return json.loads(printed.splitlines()[-1])


def parser_of(description: str) -> argparse.ArgumentParser:
    """A command line that can write its report to a file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    return parser


def main(run: Callable[[int], BenchmarkReport], *, default_pairs: int, description: str) -> int:
    """Command line of a benchmark that needs no more than its pairs; returns the exit code."""
    parser = parser_of(description)
    parser.add_argument("--pairs", type=int, default=default_pairs, help="measured pairs of runs")
    options = parser.parse_args()
    return tell(options.json, lambda: run(options.pairs))


def tell(json_path: Path | None, run: Callable[[], BenchmarkReport]) -> int:
    """Write and print the report that `run` makes; the exit code as of `measure_and_tell`."""

    def measure(machine: dict[str, Any]) -> tuple[dict[str, Any], list[RenderableType]]:
        document = run().document(machine)
        rows = [rows_table_of(document)] if "rows" in document else []
        return document, [*rows, table_of(document)]

    return measure_and_tell(json_path, measure)


def measure_and_tell(
    json_path: Path | None,
    measure: Callable[[dict[str, Any]], tuple[dict[str, Any], Sequence[RenderableType]]],
) -> int:
    """Write the document that `measure` makes on a machine, and print the rest; the exit code.

    0 says that it measured, whatever the ratio; 1 that it could not, and why; `SKIPPED` that this
    machine lacks what it needs.
    """
    end_on_signal()
    machine = describe_machine()
    try:
        document, shown = measure(machine)
    except (BenchmarkError, AssertionError) as error:  # helpers of tests raise the latter
        log(f"the benchmark failed: {error}")
        return 1
    except BenchmarkSkipped as reason:
        log(f"skipped: {reason}")
        return SKIPPED
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    console = Console(width=_WIDTH)
    for each in shown:
        console.print(each)
    return 0


def end_on_signal() -> None:
    """Let SIGINT and SIGTERM unwind, so that what a benchmark started is brought down.

    Further ones are ignored: they would cut that short.
    """

    def unwind(signum: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + signum)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, unwind)
