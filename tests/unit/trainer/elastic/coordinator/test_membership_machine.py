"""Membership under any order of messages, losses, hangs and restarts of the coordinator itself."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.harness.properties import examples
from tests.unit.trainer.elastic.coordinator.elastic_world import EPOCHS, ROWS, World
from trainer.coordination.sync_tuner import Observation
from trainer.spec.parallelism import SyncSpec

GROUPS, SPARE = st.integers(0, 2), 3
SPEEDS = st.sampled_from([0.5, 1.0, 4.0])


class MembershipMachine(RuleBasedStateMachine):
    """Three groups, and a spare, train a small data set while everything goes wrong."""

    @initialize(
        overlaps=st.booleans(),
        speeds=st.tuples(SPEEDS, SPEEDS, SPEEDS),
        sync_s=st.sampled_from([0.0, 1.0]),
    )
    def start(self, overlaps, speeds, sync_s):
        sync = SyncSpec(every_steps="auto", tuner={"min_steps": 4, "max_steps": 16})
        self.world = World(overlaps=overlaps, on_divergence="rebroadcast", sync=sync)
        self.world.synced = Observation(step_s=1.0, sync_s=sync_s, density=0.5)
        self.world.speeds = dict(enumerate(speeds))
        self.world.tend()

    def pick(self, index: int):
        groups = self.world.lives()
        return groups[index % len(groups)] if groups else None

    @rule(num_turns=st.integers(1, 20))
    def exchange(self, num_turns):
        self.world.exchange(num_turns)

    @rule(index=GROUPS)
    def deliver_one(self, index):
        group = self.pick(index)
        if group and group.outbox and group.id.group not in self.world.hung:
            self.world.deliver(group)

    @rule(index=GROUPS)
    def hear_one(self, index):
        group = self.pick(index)
        if group and group.inbox and not group.is_fenced and group.id.group not in self.world.hung:
            group.hear()

    @rule()
    def end_copies(self):
        self.world.copy_all()

    @rule(group=GROUPS)
    def kill_group(self, group):
        if group in self.world.groups and self.world.end is None:
            self.world.kill(group)

    @rule()
    def tend(self):
        if self.world.end is None:
            self.world.tend()

    @rule(group=GROUPS)
    def hang(self, group):
        self.world.hung.add(group)

    @rule(index=GROUPS)
    def refuse_next_round(self, index):
        group = self.pick(index)
        if group:
            group.will_refuse = True

    @rule(seconds=st.sampled_from([0.1, 0.6, 6.0]))
    def wait(self, seconds):
        self.world.wait(seconds)

    @rule()
    def restart_coordinator(self):
        if self.world.end is None:
            self.world.start_coordinator()

    @rule(index=GROUPS)
    def reconnect(self, index):
        group = self.pick(index)
        if group and not (group.is_fenced or group.is_dismissed or group.is_through):
            group.connect()

    @rule()
    def lose_all(self):
        if self.world.end is None:
            for group in list(self.world.groups):
                self.world.kill(group)
            self.world.start_coordinator()
            self.world.tend()

    @rule()
    def save(self):
        self.world.save()

    @rule()
    def validate(self):
        self.world.validation_due = self.world.end is None

    @rule(epoch=st.integers(0, EPOCHS - 1), row=st.integers(0, ROWS - 1))
    def poison(self, epoch, row):
        if len(self.world.poison) < 2:
            self.world.poison.add((epoch, row))

    @rule(rank=st.integers(0, 1))
    def spoil(self, rank):
        self.world.spoilt.add((2, rank))

    @rule()
    def start_spare(self):
        life = self.world.groups.get(SPARE)
        if life and (life.is_fenced or life.is_dismissed):
            self.world.kill(SPARE)
        if self.world.end is None and SPARE not in self.world.groups:
            self.world.start_group(SPARE, "spare")

    @rule(group=GROUPS)
    def drop(self, group):
        life = self.world.groups.get(group)
        if life and self.world.end is None:
            now = self.world.now
            self.world.act(self.world.membership.drop(group, life.id.incarnation, "driver", now))

    @rule(
        groups=st.sets(GROUPS | st.just(SPARE), min_size=1),
        leaving=st.dictionaries(GROUPS | st.just(SPARE), st.sampled_from(["resize", "drain"])),
    )
    def want(self, groups, leaving):
        self.world.want(*groups, leaving=leaving)

    @invariant()
    def copies_are_equal(self):
        """Of the syncs that two current copies know, each was applied by both, or by neither."""
        applied = [group.applied for group in self.world.current()]
        for one in applied:
            for other in applied:
                behind = min(max(one, default=0), max(other, default=0))
                assert {c: r for c, r in one.items() if c <= behind} == {
                    c: r for c, r in other.items() if c <= behind
                }

    @invariant()
    def validations_are_whole(self):
        """Each validation row was measured by one group."""
        for shares in self.world.joined:
            assert shares == {(place, len(shares)) for place in range(len(shares))}

    def teardown(self):
        self.world.run_to_end()
        self.world.check_rows()


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(
    max_examples=examples(40, fast=12),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
