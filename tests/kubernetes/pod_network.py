"""The network of the pods: a bridge of this machine, and an address of their own for each pod."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Self

_COMMANDS = ("ip", "unshare", "nsenter", "setpriv", "chroot", "mount", "openssl")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_NET = Path("/sys/class/net")


def why_not() -> str | None:
    """Return why pods cannot run here, with the way out; None: they can."""
    missing = [name for name in _COMMANDS if shutil.which(name, path=PATH) is None]
    if missing:
        return (
            f"the pods of the Kubernetes stand-in need {', '.join(missing)}: on Debian, apt-get "
            "install iproute2 util-linux openssl; or name a cluster by HOLDFAST_TEST_KUBECONFIG"
        )
    if os.geteuid() != 0:
        return (
            "the pods of the Kubernetes stand-in need root (namespaces): run the tests as root, "
            "or name a cluster by HOLDFAST_TEST_KUBECONFIG"
        )
    trial = "mount -t tmpfs t /tmp && mkdir /tmp/u /tmp/w /tmp/r && mount -t overlay o -o "
    trial += "lowerdir=/,upperdir=/tmp/u,workdir=/tmp/w /tmp/r"
    done = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "sh", "-c", trial],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if done.returncode:
        return f"the pods of the Kubernetes stand-in need namespaces: {done.stderr.strip()}"
    return None


class PodNetwork:
    """A bridge with 10.N.0.0/16 that no other one has; a context manager."""

    def __init__(self) -> None:
        self.bridge = ""
        self._subnet = ""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        remove_leftovers()
        for number in range(128, 200):
            # The name is the lock: a second bridge of the same name cannot be made.
            # An address of its own: else it is that of a port, and with each port that comes or
            # goes it may change, unknown to those who have the old one in their ARP tables.
            bridge = (f"hfk{number}", "address", f"02:68:66:6b:00:{number:02x}", "type", "bridge")
            if ip("link", "add", *bridge, "forward_delay", "0"):
                self.bridge, self._subnet = f"hfk{number}", f"10.{number}"
                break
        assert self.bridge, "no subnet is free: remove the bridges hfk*"
        assert ip("link", "set", self.bridge, "alias", str(os.getpid()))
        assert ip("addr", "add", f"{self.gateway}/16", "dev", self.bridge)
        assert ip("link", "set", self.bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        ip("link", "del", self.bridge)

    @property
    def gateway(self) -> str:
        """This machine's address, where the API server is."""
        return f"{self._subnet}.255.254"

    def next_address(self) -> str:
        """Return an address that no pod had before."""
        with self._lock:
            number = next(self._numbers)
        return f"{self._subnet}.{number // 250}.{1 + number % 250}"

    def plug(self, address: str, pid: int) -> None:
        """Give the network namespace of a process its eth0, on the bridge."""
        port = self.port(address)
        assert ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        assert ip("link", "set", port, "master", self.bridge, "up")

    def cut(self, address: str) -> None:
        """Take a pod's link down: nothing it says is heard any more, not even a FIN."""
        ip("link", "set", self.port(address), "down")

    def unplug(self, address: str) -> None:
        ip("link", "del", self.port(address))

    def port(self, address: str) -> str:
        third, fourth = address.split(".")[2:]
        return f"{self.bridge}p{third}-{fourth}"


def ip(*args: str) -> bool:
    """Run `ip`; return whether it worked."""
    done = subprocess.run(["ip", *args], capture_output=True, check=False, timeout=30)
    return done.returncode == 0


def remove_leftovers() -> None:
    """Remove the bridges of processes that were killed."""
    for path in _NET.glob("hfk*"):
        if not (path / "bridge").exists():
            continue
        try:
            owner = (path / "ifalias").read_text().strip()
        except OSError:
            continue  # another session removes it just now
        if owner and not Path(f"/proc/{owner}").exists():
            for port in _NET.glob(f"{path.name}p*"):
                ip("link", "del", port.name)
            ip("link", "del", path.name)
