"""Listening sockets in a range of ports; addresses; how many sockets there may be."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket

BACKLOG = 4096
"""Connections that may wait: all agents of a large job come at once."""


def listen(address: str, ports: range, *, first: int = 0) -> socket.socket:
    """Return a socket that listens on the first free port of `ports`.

    Args:
        address: numeric, IPv4 or IPv6.
        ports: tried in turn; `range(1)` lets the system pick.
        first: index in `ports` to begin with; the range is gone through once from there.

    Raises:
        OSError: no port is free, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for turn in range(len(ports)):
        port = ports[(first + turn) % len(ports)]
        try:
            return socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no free port in {ports.start}-{ports.stop - 1} on {address}: widen network.ports",
    )


def open_files() -> int:
    """Return how many files and sockets this process may have open, as far as it is allowed.

    The usual 1,024 would not do for the coordinator of a large job, so the limit is raised
    first as far as this user may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
