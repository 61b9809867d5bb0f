"""The tuner of `parallelism.sync.every_steps: auto`: from what was measured to the next interval.

Short intervals keep the copies close, so of those that the spec allows, each twice the one before,
it wants the shortest with which training waits for syncs at most `time_share` of its time. Of N
steps and the sync after them that is sync_s / (sync_s + N step_s).

    longer    the share is above time_share
    shorter   with half the steps it would be at most half of time_share
    back      the longer interval spared a step less than a fifth of its part of a sync, sync_s / N,
              as more rows are touched: no longer one until a step's part has doubled
    back      validation is worse than it was at a shorter interval: no longer one any more

Where groups are failure domains a loss undoes half an interval of a group, on average: of its time
a share of N step_s / 2 times its losses per second. Longer then has to spare more than that grows,
and it goes shorter, too, where that spares three times what the syncs cost. Where all workers are
one failure domain a failure undoes what follows the newest checkpoint, whatever the interval.

Twice the steps halve a step's part at best, and a factor of 2 lies between going longer and going
back shorter: measurements that are off by less than a third never move it to and fro. Whatever they
are, a move wants three quarters of the reports since the last decision to say so: of 3 all, and of
twice as many after each change of direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Annotated

from pydantic import Field

from trainer.protocol.events import PHASES, SyncIntervalChanged
from trainer.spec.parallelism import SyncSpec

_LEAST_SAVING = 0.2  # of a step's part of a sync, for which a longer interval is worth its while
_LOSS_MARGIN = 3  # times what more syncs cost, which fewer undone steps have to be worth
_WORSE = 1.005  # times the least validation error
_NUM_REPORTS = 3
_MAX_DOUBLINGS = 5

Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Observation:
    """Of a report, means: seconds of a step without its sync, and of a sync as far as training
    waited for it; the share of a rank's rows that a sync averaged; how often a second of its
    training a group is lost."""

    step_s: Measured
    sync_s: Measured
    density: Measured
    losses_per_s: Measured = 0.0

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Observation | None:
        """What a report's metrics say; None where no sync was timed since the last one."""
        if "sync/time_s" not in values:
            return None
        step_s = sum(values[f"phase/{phase}_s"] for phase in PHASES if phase != "sync")
        return cls(step_s, values["sync/time_s"], values["sync/density"])

    def share(self, every_steps: int) -> float:
        """Of the time that training waits for syncs, if one took as long as this."""
        whole_s = self.sync_s + every_steps * self.step_s
        return self.sync_s / whole_s if whole_s else 0.0

    def undone(self, every_steps: int) -> float:
        """Of the time of a group that trains, what is undone by losses."""
        return self.losses_per_s * every_steps * self.step_s / 2


@dataclass(frozen=True)
class TunerState:
    """Where the tuning of a run stands; checkpoints keep it.

    Before the last move there was a sync every `previous` steps; of a move to more of them that has
    not been judged `step_part_s` is what a step then had of a sync, in seconds. No more than
    `ceiling` steps are tried until that is twice `ceiling_part_s`, and no more than `best_ceiling`
    ever. `best` is the least validation error, found with `best_every_steps`.
    """

    every_steps: int
    previous: int | None = None
    step_part_s: float | None = None
    num_turns: int = 0
    ceiling: int | None = None
    ceiling_part_s: float = 0.0
    best_ceiling: int | None = None
    best: float | None = None
    best_every_steps: int = 0

    @property
    def num_reports(self) -> int:
        """That a decision is made of, each with a timed sync."""
        return _NUM_REPORTS << min(self.num_turns, _MAX_DOUBLINGS)

    def moved(self, every_steps: int, step_part_s: float | None = None) -> TunerState:
        """After a move; one to more steps is judged by `step_part_s`."""
        turns = self.previous is not None and (
            (every_steps > self.every_steps) != (self.every_steps > self.previous)
        )
        return replace(
            self,
            every_steps=every_steps,
            previous=self.every_steps,
            step_part_s=step_part_s,
            num_turns=self.num_turns + turns,
        )


@dataclass(frozen=True)
class Decision:
    """What follows an observation; `reason` in words where the interval moves, else empty."""

    state: TunerState
    reason: str = ""


def after_reports(state: TunerState, seen: Sequence[Observation], spec: SyncSpec) -> Decision:
    """What to do about the interval after what was `seen` in `state.num_reports`."""
    now, longer, shorter = state.every_steps, 2 * state.every_steps, state.every_steps // 2
    typical = Observation(*map(median, zip(*map(astuple, seen), strict=True)))
    num_doubted = len(seen) // 4
    part_s, wanted = typical.sync_s / now, spec.tuner.time_share
    waited = (
        f"training waits {typical.share(now):.1%} of its time for syncs ({_ms(typical.sync_s)} "
        f"each, a step takes {_ms(typical.step_s)})"
    )
    before_s = state.step_part_s
    if before_s is not None and part_s > (1 - _LEAST_SAVING) * before_s:
        state = replace(state, ceiling=state.previous, ceiling_part_s=before_s)
        reason = (
            f"{typical.density:.0%} of the rows are touched in {now} steps, so that a sync grew to "
            f"{_ms(typical.sync_s)}: {_ms(part_s)} of it for each step, hardly less than the "
            f"{_ms(before_s)} before"
        )
        assert state.previous is not None, "what is judged is a move"
        return Decision(state.moved(state.previous), reason)
    state = replace(state, step_part_s=None)
    if state.ceiling is not None and part_s > 2 * state.ceiling_part_s:
        state = replace(state, ceiling=None)
    limits = [each for each in (state.ceiling, state.best_ceiling) if each is not None]
    may_be_longer = longer in spec.intervals and longer <= min(limits, default=longer)
    is_spared = typical.share(now) - typical.share(longer) > typical.undone(now)
    is_slow = sorted(each.share(now) for each in seen)[num_doubted] > wanted
    if may_be_longer and is_slow and is_spared:
        reason = f"{waited}; at most {wanted:.1%} are wanted"
        return Decision(state.moved(longer, part_s), reason)
    would_be = sorted(each.share(shorter) for each in seen)[-1 - num_doubted]
    if shorter in spec.intervals and would_be <= wanted / 2:
        reason = (
            f"{waited}; with half the steps between them it will hardly be above {would_be:.1%}, "
            f"and may be {wanted:.1%}"
        )
        return Decision(state.moved(shorter), reason)
    cost = typical.share(shorter) - typical.share(now)
    if shorter in spec.intervals and typical.undone(shorter) > _LOSS_MARGIN * cost:
        reason = (
            f"lost groups undo {typical.undone(now):.1%} of what is trained, half of which a sync "
            f"every {shorter} steps spares, for {cost:.1%} more of the time"
        )
        return Decision(state.moved(shorter), reason)
    return Decision(state)


def after_validation(state: TunerState, error: float) -> Decision:
    """What to do about the interval after a validation that found `error`, 0 being perfect."""
    if error != error:
        return Decision(state)
    if state.best is None or error < state.best:
        return Decision(replace(state, best=error, best_every_steps=state.every_steps))
    at_best = state.best_every_steps
    if error <= _WORSE * state.best or state.every_steps <= at_best:
        return Decision(state)
    reason = (
        f"the validation error is {error:.5g}, and was {state.best:.5g} with a sync every "
        f"{at_best} steps"
    )
    return Decision(replace(state, best_ceiling=at_best).moved(at_best), reason)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


class SyncTuner:
    """The sync interval of one rank, which is the same on all, or of groups, at their coordinator.

    Rank 0 decides: `wanted` goes to all ranks with their next report, which `agree` to it, and
    `take_effect` after the sync that follows. A fixed interval is one that never moves.
    """

    def __init__(self, spec: SyncSpec, num_mixed: int = 1) -> None:
        """So many reports after a move are about the interval before, too."""
        self._spec, self._num_mixed = spec, num_mixed
        self.state = TunerState(spec.intervals[0])
        self._seen: list[Observation] = []
        self._num_to_skip = 0
        self._decision: Decision | None = None
        self._agreed = self.every_steps

    @property
    def every_steps(self) -> int:
        return self.state.every_steps

    @property
    def wanted(self) -> int:
        """The interval that there shall be."""
        return self._decision.state.every_steps if self._decision else self.every_steps

    def resume(self, state: TunerState | None) -> None:
        if state is not None and state.every_steps in self._spec.intervals:
            self.state, self._agreed = state, state.every_steps

    def reported(self, seen: Observation | None) -> None:
        """Take in a report, which may say nothing."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return
        if seen is None or self._decision:
            return
        self._seen.append(seen)
        if len(self._seen) < self.state.num_reports:
            return
        decision = after_reports(self.state, self._seen, self._spec)
        self._seen.clear()
        self._decide(decision)

    def validated(self, error: float) -> None:
        if not self._decision:
            self._decide(after_validation(self.state, error))

    def _decide(self, decision: Decision) -> None:
        if decision.state.every_steps == self.every_steps:
            self.state = decision.state
        else:
            self._decision = decision

    def agree(self, every_steps: int) -> None:
        """All ranks know what is wanted."""
        self._agreed = every_steps

    def take_effect(self, now: float, step: int) -> SyncIntervalChanged | None:
        """Move the interval to what was agreed; where it moves, what rank 0 tells of it."""
        before, decision = self.every_steps, self._decision
        if self._agreed == before:
            return None
        self._seen.clear()
        self._num_to_skip, self._decision = self._num_mixed, None
        if decision is None:
            self.state = replace(self.state, every_steps=self._agreed)
            return None
        self.state = decision.state
        return SyncIntervalChanged(
            time=now,
            step=step,
            every_steps_before=before,
            every_steps=self.every_steps,
            reason=decision.reason,
        )
