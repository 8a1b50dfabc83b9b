"""A node's own addresses, and the one under which its peers reach it. Never by a name.

A host's name often means 127.0.1.1 on the host itself, and nothing elsewhere; so names are not
looked up at all. IPv4 goes before IPv6 where an interface has both, as gloo takes it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SIOCGIFADDR: Final = 0x8915  # linux/sockios.h
_SIOCGIFFLAGS: Final = 0x8913
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40  # linux/if.h
_UNUSABLE: Final = 0x40 | 0x08
"""IFA_F_TENTATIVE, IFA_F_DADFAILED (linux/if_addr.h): nothing can be bound to such an address."""
_PROBES: Final = (
    (socket.AF_INET, "192.0.2.1"),  # RFC 5737: never a real host
    (socket.AF_INET6, "2001:db8::1"),  # RFC 3849
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface."""

    name: str
    addresses: tuple[str, ...]
    """Numeric; those that peers on other nodes can use."""
    running: bool = True
    """Up, and with a link."""
    loopback: bool = False

    def __str__(self) -> str:
        """Return it as messages name it."""
        down = "" if self.running else " (no link)"
        return f"{self.name}={'/'.join(self.addresses)}{down}"


def choose(
    found: Sequence[Interface],
    *,
    interface: str = "auto",
    cidr: str | None = None,
    routed: Sequence[str] = (),
) -> str:
    """Return the address under which peers are to reach a node. Pure.

    It is in network `cidr`, else of `interface`; `auto`: that of the default route, which starts
    from one of `routed` (IPv4 first), else the first that has a link.

    Raises:
        ValueError: none fits; the message lists what there is.
    """
    listed = ", ".join(map(str, found)) or "none"
    all_of = [(one, address) for one in found for address in one.addresses]
    if cidr is not None:
        network = ipaddress.ip_network(cidr, strict=False)
        fits = [(one, a) for one, a in all_of if ipaddress.ip_address(a) in network]
        if not fits:
            raise ValueError(f"network.cidr: no address of this node is in {cidr}; it has {listed}")
        return _first_running(fits, f"network.cidr: {cidr}", listed)
    if interface != "auto":
        fits = [(one, a) for one, a in all_of if one.name == interface]
        if not fits:
            message = f"network.interface: no {interface} with an address here; have {listed}"
            raise ValueError(message)
        return _first_running(fits, f"network.interface: {interface}", listed)
    live = [one for one in found if one.running and not one.loopback]
    usable = [address for one in live for address in one.addresses]
    # A route may lead through an interface whose cable is out.
    return next((address for address in routed if address in usable), (*usable, "127.0.0.1")[0])


def _first_running(fits: Sequence[tuple[Interface, str]], asked: str, listed: str) -> str:
    running = [address for one, address in fits if one.running]
    if not running:
        raise ValueError(f"{asked}: {fits[0][0].name} has no link on this node; it has {listed}")
    return running[0]


def with_links(found: Sequence[Interface], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return an address of each of the interfaces `names` that has a link, and the others. Pure."""
    here = {one.name: one.addresses[0] for one in found if one.running}
    return [here[n] for n in names if n in here], [n for n in names if n not in here]


def local_address(*, interface: str = "auto", cidr: str | None = None) -> str:
    """Return the numeric address under which peers reach this node, as `choose` does."""
    return choose(interfaces(), interface=interface, cidr=cidr, routed=_routed())


def interface_of(address: str) -> str | None:
    """Return the interface that has `address`; None when that is not known."""
    if address.startswith("127."):
        return "lo"
    return next((one.name for one in interfaces() if address in one.addresses), None)


def interfaces() -> list[Interface]:
    """Return this node's interfaces that have addresses, in the kernel's order."""
    ipv6: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):  # a kernel without IPv6
        ipv6 = parse_if_inet6(Path("/proc/self/net/if_inet6").read_text(encoding="ascii"))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            addresses = list(ipv6.get(name, ()))
            with contextlib.suppress(OSError):  # no IPv4 address there
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                addresses.insert(0, socket.inet_ntoa(answer[20:24]))
            flags = 0
            with contextlib.suppress(OSError):  # gone meanwhile
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
                flags = struct.unpack("16xH", answer[:18])[0]
            up = _IFF_UP | _IFF_RUNNING
            if addresses:
                found.append(
                    Interface(
                        name=name,
                        addresses=tuple(addresses),
                        running=flags & up == up,
                        loopback=bool(flags & _IFF_LOOPBACK),
                    )
                )
    return found


def parse_if_inet6(text: str) -> dict[str, list[str]]:
    """Read /proc/net/if_inet6: interface -> its IPv6 addresses that other nodes can reach.

    Link-local ones are left out: they mean nothing without the interface of who uses them.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) != 6:  # address, index, prefix length, scope, flags, name
            continue
        address, _, _, scope, flags, name = words
        if int(scope, 16) == 0 and not int(flags, 16) & _UNUSABLE:
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(address, 16))))
    return found


def _routed() -> list[str]:
    """Return the addresses that the default routes start from; nothing is sent."""
    found = []
    for family, target in _PROBES:
        with (
            contextlib.suppress(OSError),  # no such route, or no such family
            socket.socket(family, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((target, 9))
            found.append(str(probe.getsockname()[0]))
    return found


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
