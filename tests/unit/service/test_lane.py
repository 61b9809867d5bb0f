"""One background thread computes at a time, and none is held up by one that is stuck."""

from __future__ import annotations

import threading

from service.lane import Lane


def test_a_second_thread_waits_until_the_first_leaves() -> None:
    lane, order = Lane(patience_s=60.0), []
    in_lane, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with lane.taken():
            in_lane.set()
            may_leave.wait()
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    in_lane.wait()
    may_leave.set()
    with lane.taken():
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_who_waits_for_somebody_else_makes_room() -> None:
    lane, entered = Lane(patience_s=60.0), threading.Event()

    def other() -> None:
        with lane.taken():
            entered.set()

    with lane.taken(), lane.aside():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
    thread.join()


def test_one_that_is_stuck_holds_nobody_up_for_good() -> None:
    lane, entered = Lane(patience_s=0.0), threading.Event()

    def other() -> None:
        with lane.taken(), lane.aside():
            entered.set()

    with lane.taken():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
        thread.join()
    # Who went ahead beside it has not given away room that was never its own.
    with lane.taken():
        assert not lane._room.acquire(blocking=False)
