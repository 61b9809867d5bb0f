"""Goodput, work at risk and phases of a step, read from the newest metrics of a job, and what was
predicted of them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from service.domain.models import Prediction
from trainer.layout.cost import MemoryUse
from trainer.protocol.events import PHASES

# Of one job; a table or a task of a model brings a few. However many tables there are, they leave
# room for what is reported after them.
MAX_METRICS, MAX_OF_TABLES = 2000, 1000
_MAX_NAME_CHARS = 200
# Those of a position of the sharding groups, `phase/lookup_s/0`.
OF_POSITION = re.compile(r"(phase|memory)/\w+/\d+")
SHARE, LOST_PREFIX, AT_RISK = "goodput/share", "goodput/lost_s/", "risk/steps_undurable"
# Causes of lost time in words, where the coordinator's names are other ones.
_CAUSES = {"redo": "lost work", "hang": "hangs", "checkpoint": "checkpoints"}


def watched_names(watched: str) -> tuple[str, ...]:
    """Names of what a job watches: on validation, before that in training, else its loss."""
    return f"validation/{watched}", f"train/{watched}", "train/loss"


def admitted(known: Collection[str], names: Iterable[str]) -> list[str]:
    """Those of `names` that a job may have beside its `known` ones: it reports what it likes.

    Those of tables come last.
    """
    new = [name for name in names if name not in known and len(name) <= _MAX_NAME_CHARS]
    of_tables = [name for name in new if _is_of_table(name)]
    if of_tables:
        num_left = max(0, MAX_OF_TABLES - sum(map(_is_of_table, known)))
        new = [name for name in new if not _is_of_table(name)] + of_tables[:num_left]
    return new[: max(0, MAX_METRICS - len(known))]


def _is_of_table(name: str) -> bool:
    return name.startswith("table/")


@dataclass(frozen=True)
class Goodput:
    """Share of the groups' time that trained rows that count, in [0, 1], and what took the rest.

    `lost_s` has (cause in words, group-seconds), the most first, without those that took nothing.
    """

    share: float
    lost_s: tuple[tuple[str, float], ...]

    @property
    def lost_shares(self) -> tuple[tuple[str, float], ...]:
        """(cause in words, its share of the groups' time): with `share` they add up to 1."""
        total_s = sum(seconds for _, seconds in self.lost_s)
        return tuple((cause, (1 - self.share) * lost / total_s) for cause, lost in self.lost_s)


def goodput_of(metrics: Mapping[str, float]) -> Goodput | None:
    """The goodput among a job's newest metrics; None before it is reported."""
    share = metrics.get(SHARE)
    if share is None or not math.isfinite(share):
        return None
    lost_s = {
        name.removeprefix(LOST_PREFIX): seconds
        for name, seconds in metrics.items()
        if name.startswith(LOST_PREFIX) and seconds > 0
    }
    named = ((_CAUSES.get(cause, cause.replace("_", " ")), lost_s[cause]) for cause in lost_s)
    return Goodput(share, tuple(sorted(named, key=lambda item: (-item[1], item[0]))))


def steps_at_risk(metrics: Mapping[str, float]) -> int | None:
    """Steps that no checkpoint has yet; None where that is not known."""
    steps = metrics.get(AT_RISK)
    if steps is None or not math.isfinite(steps):
        return None
    # A job may tell any number, of which products are no floats.
    return round(max(0, min(steps, 2**53)))


def phase_shares(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(phase, seconds of a step), the longest first; without those that took no time."""
    found = [(phase, metrics.get(f"phase/{phase}_s", 0.0)) for phase in PHASES]
    return sorted((item for item in found if item[1] > 0), key=lambda item: -item[1])


# What is compared: phases of the planner (`trainer.layout.cost`), whose backward pass is part of
# each, and those that workers measure, who tell one of all, and nothing of their own Python.
_PHASES = {
    "input dist": (("input_dist",), ("input_dist",)),
    "forward and backward": (
        ("lookup", "output_dist", "dense", "host"),
        ("lookup", "output_dist", "dense", "backward", "optimizer"),
    ),
    "sync": (("sync",), ("sync",)),
}
STEP_PHASES = tuple(chain.from_iterable(planned for planned, _ in _PHASES.values()))
# Parts of memory as the planner names them, reserve left out.
MEMORY_PARTS = tuple(
    part for field in fields(MemoryUse) if (part := field.name.removesuffix("_bytes")) != "reserve"
)
# On GPUs what tensors took; of the host the planner says nothing there.
_PEAKS = ("memory/peak_allocated_bytes", "memory/peak_rss_bytes")


@dataclass(frozen=True)
class Compared:
    """A quantity as it was predicted and as it was measured last, None where it never was.

    `unit` is `per_s`, `s`, `steps`, `bytes` or `ratio`.
    """

    name: str
    unit: str
    predicted: float
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: 1 is a perfect plan."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


def measured_against(found: Sequence[Compared]) -> tuple[float, float | None] | None:
    """(measured over predicted time of a step without waits for data, bytes that the fullest rank
    took more); None where no phase was measured, and the bytes where memory was not.
    """
    phases = [each for each in found if each.unit == "s" and each.name != "step"]
    predicted_s = sum(each.predicted for each in phases)
    measured_s = sum(each.measured or 0.0 for each in phases)
    if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
        return None
    extra = [
        each.measured - each.predicted
        for each in found
        if each.unit == "bytes" and each.measured is not None
    ]
    return measured_s / predicted_s, extra[0] if extra else None


def compared(prediction: Prediction, metrics: Mapping[str, float]) -> tuple[Compared, ...]:
    """What was predicted of workers, beside the newest metrics of their job."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}

    def seconds(phases: Iterable[str]) -> float | None:
        found = [finite[name] for phase in phases if (name := f"phase/{phase}_s") in finite]
        return sum(found) if found else None

    step = prediction.step_s
    peak = next((finite[name] for name in _PEAKS if name in finite), None)
    interval = finite.get("sync/every_steps")  # measured where it is tuned
    every_steps = prediction.sync_every_steps if interval is not None else None
    tuned = [Compared("sync interval", "steps", every_steps, interval)] if every_steps else []
    return (
        Compared("rows/s", "per_s", prediction.samples_per_s, finite.get("speed/rows_per_s")),
        Compared("step", "s", sum(step.values()), seconds(PHASES)),
        *(
            Compared(name, "s", sum(step.get(each, 0.0) for each in planned), seconds(measured))
            for name, (planned, measured) in _PHASES.items()
        ),
        *tuned,
        Compared("peak memory", "bytes", sum(prediction.memory_bytes.values()), peak),
        Compared(
            "lookup imbalance",
            "ratio",
            prediction.lookup_imbalance,
            finite.get("balance/lookup_time"),
        ),
    )
