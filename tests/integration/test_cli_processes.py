"""Ending families of real processes."""

from __future__ import annotations

import subprocess
import sys

from service.local_process import end_family, family, identify, is_alive, process_table

# A child that ignores SIGTERM and a grandchild in a session of its own.
PARENT = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


def start_parent() -> subprocess.Popen[str]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    return parent


def test_a_whole_family_ends_with_its_root():
    with start_parent() as parent:
        root = identify(parent.pid)
        members = family(root, process_table())
        assert len(members) == 3
        assert end_family(root, grace_s=5.0) == set()
        assert not any(is_alive(member) for member in members)


def test_orphans_of_a_killed_root_are_ended_as_well():
    with start_parent() as parent:
        root = identify(parent.pid)
        members = family(root, process_table())
        parent.kill()
        parent.wait()
        orphans = {member for member in members if is_alive(member)}
        assert len(orphans) == 2
        same_session = orphans & family(root, process_table())
        assert len(same_session) == 1
        assert end_family(root, grace_s=5.0) == set()
        assert not any(is_alive(member) for member in same_session)
        for other in orphans - same_session:
            assert end_family(other, grace_s=5.0) == set()
