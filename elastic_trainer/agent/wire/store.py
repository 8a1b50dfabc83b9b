"""The torch TCPStore that the workers of an epoch meet at, hosted by an agent."""

from __future__ import annotations

import socket
from datetime import timedelta

from elastic_trainer.agent.wire.network import listen

EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  as torch's own
"""All of this machine's addresses."""


def parse_ports(text: str | None) -> range:
    """Read `low-high` (both included); None means a port that the system picks.

    Raises:
        ValueError: not such a range.
    """
    if text is None:
        return range(1)
    low, dash, high = text.partition("-")
    try:
        ports = range(int(low), int(high if dash else low) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports.start < 1 or ports.stop > 65536:
        raise ValueError(f"network.ports: {text!r} is not a range like 29400-29499")
    return ports


class EpochStore:
    """Hosts one store at a time: fresh for every epoch, so no key of an old one is read.

    It listens on the node's own address only, unless workers know it by another name. `open` may
    be called from another thread than `close`, but not at the same time.

    Args:
        address: numeric address of this node.
        ports: ports to try in turn; `range(1)` lets the system pick.
        timeout_s: how long a client waits for a key.
        called: name of this machine for `MASTER_ADDR`; the store then listens on all addresses, as
            torchrun's does. None: the address.
    """

    def __init__(
        self,
        address: str,
        ports: range = range(1),
        *,
        timeout_s: float = 300.0,
        called: str | None = None,
    ) -> None:
        self._address, self._ports, self._timeout_s = address, ports, timeout_s
        self._called = called or address
        self._listens_on = EVERYWHERE if called else address
        self._store: object | None = None
        self._next = 0

    def open(self, epoch: int) -> tuple[str, int]:
        """Close the store of the epoch before and open that of `epoch`.

        Returns:
            Address and port for `MASTER_ADDR` and `MASTER_PORT`.

        Raises:
            OSError: no port of the range is free.
        """
        from torch.distributed import TCPStore

        assert epoch >= 0
        self.close()
        listener = self._listen()
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            use_libuv=True,
            master_listen_fd=listener.detach(),  # the store owns it from here
        )
        return self._called, port

    def close(self) -> None:
        """Stop serving; clients that still wait get an error."""
        self._store = None  # the last reference: torch has no other way

    def _listen(self) -> socket.socket:
        # Another port than last time, so that a worker too late meets nobody.
        listener = listen(self._listens_on, self._ports, first=self._next)
        if len(self._ports) > 1:
            self._next = self._ports.index(listener.getsockname()[1]) + 1
        return listener
