"""Groups as the coordinator sees them: copies alive, donors, and how long a recovery took."""

from __future__ import annotations

import pytest

from trainer.elastic.chronicle import Chronicle
from trainer.elastic.protocol import Arrive, Hello, Ledger
from trainer.elastic.roster import Group, choose_donor, choose_start, copies_alive, disagreement
from trainer.elastic.rounds import form_round


def group(number: int, *hosts: str, origin: str = "seed-0", commit: int = 0) -> Group:
    """A current group with one rank on each host."""
    made = None
    for rank, host in enumerate(hosts or ("a",)):
        hello = Hello(
            group=number,
            incarnation=0,
            rank=rank,
            num_ranks=max(len(hosts), 1),
            host=host,
            pid=1,
            donor="",
            origin=origin,
            standing="initial",
            ledger=Ledger(commit=commit),
        )
        made = made or Group(hello, now=0.0)
        made.greet(hello)
    assert made
    made.standing = "current"
    return made


def test_copies_on_one_host_are_lost_together():
    groups = [group(0, "a", "b"), group(1, "a", "c"), group(2, "a", "d")]
    assert copies_alive(groups) == (3, 1), "all first ranks are on host a"
    assert copies_alive([group(0, "a"), group(1, "b")]) == (2, 2)
    assert copies_alive([]) == (0, 0)


def test_a_group_that_copies_is_no_copy():
    listener = group(1, "b")
    listener.standing = "listening"
    assert copies_alive([group(0, "a"), listener]) == (1, 1)


def test_listeners_spread_over_the_donors_and_stay_with_theirs():
    donors, listeners = [group(0), group(1)], [group(2), group(3), group(4)]
    groups = {each.group: each for each in donors + listeners}
    for listener in listeners:
        listener.donor = choose_donor(listener, donors, groups).group
    assert [listener.donor for listener in listeners] == [1, 0, 1]
    assert choose_donor(listeners[1], donors, groups).group == 0
    assert choose_donor(listeners[0], donors[:1], groups).group == 0, "its donor is gone"


def test_a_run_begins_from_the_most_commits_and_then_from_what_most_hold():
    most = [group(0, origin="x"), group(1, origin="y"), group(2, origin="y")]
    assert [each.group for each in choose_start(most)] == [1, 2]
    assert [each.group for each in choose_start([*most, group(3, commit=1)])] == [3]


def test_ranks_of_a_group_must_come_with_the_same():
    pair = group(0, "a", "a")
    for rank, leases in enumerate([(1,), (1,)]):
        pair.ranks[rank].request = Arrive(standing="current", commit=1, leases=leases, num_rows=4)
    assert disagreement(pair) is None
    pair.ranks[1].request = Arrive(standing="current", commit=1, leases=(2,), num_rows=4)
    assert "different leases" in (disagreement(pair) or "")


@pytest.mark.parametrize(
    ("weights", "expected", "loss"),
    [
        ((None, None), [4.0, 12.0], 2.0),
        ((30.0, 2.0), [30.0, 2.0], 1.0),
        # Both trained, if on rows that do not count: their copies must become equal again.
        ((0.0, 0.0), [4e-9, 12e-9], 32.0 / 16e-9),
    ],
)
def test_copies_weigh_their_rows_or_the_weights_of_these(weights, expected, loss):
    groups = [group(0), group(1)]
    for each, num_rows, weight in zip(groups, (4, 12), weights, strict=True):
        each.ranks[0].request = Arrive(
            standing="current", commit=1, num_rows=num_rows, weight=weight, sums={"loss": 16.0}
        )
    opened = form_round(1, 1, 2, groups, [])
    assert [member.weight for member in opened.members] == pytest.approx(expected)
    assert opened.means == pytest.approx({"loss": loss})


def test_a_pause_is_what_a_recovery_took_beyond_the_usual():
    chronicle = Chronicle(rows_per_step=10)
    for now in (1.0, 2.0, 3.0):
        chronicle.try_round()
        assert chronicle.commit(generation=1, commit=int(now), now=now) is None
    chronicle.try_round()
    chronicle.trouble("connection", 3.5, syncs_lost=1)
    chronicle.trouble("group 1 was lost", 3.6)
    chronicle.try_round()
    recovered = chronicle.commit(generation=2, commit=4, now=4.5)
    assert recovered
    assert recovered.pause_s == pytest.approx(0.5)
    assert (recovered.cause, recovered.syncs_lost, recovered.num_tries) == ("connection", 1, 2)
    assert chronicle.commit(generation=2, commit=5, now=5.5) is None


def test_steps_are_at_risk_until_a_checkpoint_holds_them():
    chronicle = Chronicle(rows_per_step=10)
    for commit in range(1, 5):
        chronicle.remember(Ledger(commit=commit, rows_trained=100 * commit))
    values = chronicle.metrics(Ledger(commit=4, rows_trained=400, checkpoint_commit=3), 1, 0.0)
    assert values["risk/steps_undurable"] == 10
    values = chronicle.metrics(Ledger(commit=4, rows_trained=400, checkpoint_commit=4), 1, 0.0)
    assert values["risk/steps_undurable"] == 0
