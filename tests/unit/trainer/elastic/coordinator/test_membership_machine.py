"""Membership under any order of messages, losses, hangs and restarts of the coordinator itself."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.harness.properties import examples
from tests.unit.trainer.elastic.coordinator.elastic_world import EPOCHS, ROWS, World
from trainer.coordination.sync_tuner import Observation
from trainer.spec.parallelism import SyncSpec

GROUPS, SPARE = st.integers(0, 2), 3
SPEEDS = st.sampled_from([0.5, 1.0, 4.0])
fault = precondition(lambda machine: machine.has_faults)


class MembershipMachine(RuleBasedStateMachine):
    """Three groups, and a spare, train a small data set while everything goes wrong."""

    @initialize(
        overlaps=st.booleans(),
        speeds=st.tuples(SPEEDS, SPEEDS, SPEEDS),
        sync_s=st.sampled_from([0.0, 1.0]),
        has_faults=st.booleans(),
        commit=st.integers(0, 2),
    )
    def start(self, overlaps, speeds, sync_s, has_faults, commit):
        self.has_faults = has_faults
        sync = SyncSpec(every_steps="auto", tuner={"min_steps": 4, "max_steps": 16})
        self.world = World(overlaps=overlaps, on_divergence="rebroadcast", sync=sync)
        self.world.synced = Observation(step_s=1.0, sync_s=sync_s, density=0.5)
        self.world.speeds = dict(enumerate(speeds))
        self.world.tend()
        self.world.run_to_commit(commit)

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

    @fault
    @rule(group=GROUPS)
    def kill_group(self, group):
        if group in self.world.groups and self.world.end is None:
            self.world.kill(group)

    @rule()
    def tend(self):
        if self.world.end is None:
            self.world.tend()

    @fault
    @rule(group=GROUPS)
    def hang(self, group):
        self.world.hung.add(group)

    @fault
    @rule(index=GROUPS)
    def refuse_next_round(self, index):
        group = self.pick(index)
        if group:
            group.will_refuse = True

    @rule(seconds=st.sampled_from([0.1, 0.6, 6.0]))
    def wait(self, seconds):
        self.world.wait(seconds)

    @fault
    @rule()
    def restart_coordinator(self):
        if self.world.end is None:
            self.world.start_coordinator()

    @rule(index=GROUPS)
    def reconnect(self, index):
        group = self.pick(index)
        if group and not (group.is_fenced or group.is_dismissed or group.is_through):
            group.connect()

    @fault
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

    @fault
    @rule(epoch=st.integers(0, EPOCHS - 1), row=st.integers(0, ROWS - 1))
    def poison(self, epoch, row):
        if len(self.world.poison) < 2:
            self.world.poison.add((epoch, row))

    @fault
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

    @fault
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
    def without_a_fault_all_train_on(self):
        """No group is lost as stale or has to copy, and there is nothing to recover from."""
        told = self.world.told  # who waits before it is heard may be silent for too long
        lost = [each for each in told("group_lost") if each.reason != "stale"]
        if self.has_faults or lost:
            return
        assert not told("group_lost") and not told("recovered")
        standings = {group.group: group.standing for group in self.world.status.groups}
        left = {each.group for each in told("group_left")}
        joined = {each.group for each in told("group_joined")} - left
        assert {standings[group] for group in joined} <= {"current"}

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
    max_examples=examples(60, fast=20),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
