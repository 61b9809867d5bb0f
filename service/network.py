"""Addresses and ports of this machine, and URLs of what listens on them. IPv4 interfaces; Linux.

Functions that look for an address raise `NoAddress`, whose message says why there is none.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import socket
import struct

# A wildcard address is a place to listen on, not one to connect to.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """URL under which this machine reaches a service that listens on `host` and `port`."""
    reachable = _LOOPBACK_OF.get(host, host)
    name = f"[{reachable}]" if ":" in reachable else reachable
    return f"{scheme}://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or a host of this name."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Of <linux/sockios.h> and struct ifconf and ifreq of <net/if.h>, on 64-bit Linux.
_SIOCGIFCONF = 0x8912
_IFCONF = struct.Struct("iL")
_IFREQ = struct.Struct("16s4x4s16x")
_MAX_ADDRESSES = 1024
# Of the range that documentation uses: nothing is sent, only the default route is looked up.
_FAR_AWAY = "192.0.2.1"


class NoAddress(Exception):
    """This machine has no address of the kind that was asked for; the message says why."""


def own_addresses() -> dict[str, str]:
    """Name of the interface by each IPv4 address that this machine has."""
    buffer = array.array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    where, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, _IFCONF.pack(len(buffer), where))
    num_bytes, _ = _IFCONF.unpack(answer)
    rows = _IFREQ.iter_unpack(buffer.tobytes()[:num_bytes])
    # An address that was added under a label, as eth0:1, is reached through eth0.
    return {
        socket.inet_ntoa(address): name.rstrip(b"\0").decode().partition(":")[0]
        for name, address in rows
    }


def address_towards(host: str = _FAR_AWAY) -> str:
    """The address of this machine from which its packets to `host` come; raises `NoAddress`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # UDP: sends nothing
        except OSError as error:
            reason = error.strerror or str(error)
            raise NoAddress(f"no route leads from this machine to {host} ({reason})") from None
        address: str = probe.getsockname()[0]
    return address


def interface_of(address: str) -> str:
    """Interface that has an address which other machines can reach; raises `NoAddress`."""
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        raise NoAddress(f"{address} is not an IPv4 address, as 10.0.0.1") from None
    if parsed.is_loopback or parsed.is_unspecified:
        raise NoAddress(f"{address} cannot be reached from other machines")
    own = own_addresses()
    if address not in own:
        there = ", ".join(each for each in own if not each.startswith("127.")) or "none"
        raise NoAddress(f"{address} is not an address of this machine; it has {there}")
    return own[address]


def port_fault(host: str, port: int) -> str | None:
    """Why nobody can listen on a port of this machine, as a clause; None if one can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use by another program"
            if error.errno == errno.EACCES:
                return f"port {port} needs privileges that you lack"
            raise
    return None
