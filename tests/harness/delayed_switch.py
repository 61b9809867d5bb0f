"""A switch between ports of its network namespace, whose frames arrive late: DELAY_S PORT PORT...

For kernels without netem. Whole segments of up to 64 KB pass through as they are, so it takes a
tenth of a core for 50 MB/s in each direction. Says "ready", and ends when its input does.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

# Of linux/if_packet.h.
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_ALL_PROTOCOLS = 3
_BUFFER_BYTES = 64 * 2**20
# A frame begins with a virtio_net_hdr, which says what of it is left for hardware to do.
_TARGET, _SOURCE = slice(10, 16), slice(16, 22)


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    port.bind((name, 0))
    port.setblocking(False)
    return port


def switch(ports: list[socket.socket], delay_s: float) -> None:
    """Pass frames on until stdin ends."""
    late: deque[tuple[float, socket.socket, bytes]] = deque()  # (due, from where, frame)
    known: dict[bytes, socket.socket] = {}
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([sys.stdin, *ports], [], [], wait_s)
        if sys.stdin in ready:
            return
        for port in ready:
            with suppress(OSError):  # it has no more, or its link is down
                while frame := port.recv(2**17):
                    known[frame[_SOURCE]] = port
                    late.append((time.monotonic() + delay_s, port, frame))
        while late and late[0][0] <= time.monotonic():
            _, source, frame = late.popleft()
            target = known.get(frame[_TARGET])
            for port in [target] if target else [each for each in ports if each is not source]:
                with suppress(OSError):  # lost: its link is down, or its queue is full
                    port.send(frame)


if __name__ == "__main__":
    # Before what trains on the same cores, as a network is.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    opened = [open_port(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    switch(opened, float(sys.argv[1]))
