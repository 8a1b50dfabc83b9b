"""Emulated nodes in network namespaces of their own, and cutting the network between them.

Needs root and `ip`; `why_not` says what is missing. Storage stays shared: what is cut is
what agents and workers say to each other.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

from launcher.platforms.base import JobId
from launcher.platforms.local import LocalCluster, LocalNode

_SUBNET = "10.213.77"
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_T = TypeVar("_T")


def why_not() -> str | None:
    """Return why namespaces cannot be used here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    name = f"hf{uuid.uuid4().hex[:6]}"
    for args in (("netns", "add", name), ("link", "add", name, "type", "bridge")):
        done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            _ip("netns", "del", name, check=False)
            return f"`ip {' '.join(args)}` fails: {done.stderr.strip()}"
    _ip("link", "del", name)
    _ip("netns", "del", name)
    return None


class Network:
    """One namespace a node, joined by a bridge; a second bridge takes who is cut off."""

    def __init__(self, names: Iterable[str]) -> None:
        self._tag = uuid.uuid4().hex[:5]
        self._names = list(names)
        self._bridges = [f"hf{self._tag}a", f"hf{self._tag}b"]

    def __enter__(self) -> Self:
        try:
            for bridge in self._bridges:
                _ip("link", "add", bridge, "type", "bridge", "forward_delay", "0")
                _ip("link", "set", bridge, "up")
            for name in self._names:
                self._plug(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            _ip("netns", "del", self.namespace(name), check=False)
            _ip("link", "del", self._port(name), check=False)
        for bridge in self._bridges:
            _ip("link", "del", bridge, check=False)

    def namespace(self, name: str) -> str:
        return f"hf{self._tag}-{name}"

    def address(self, name: str) -> str:
        return f"{_SUBNET}.{1 + self._names.index(name)}"

    def cut(self, names: Iterable[str]) -> None:
        """Cut `names` off from the others; among themselves they still talk."""
        for name in names:
            _ip("link", "set", self._port(name), "master", self._bridges[1])

    def heal(self) -> None:
        """Join everybody again."""
        for name in self._names:
            _ip("link", "set", self._port(name), "master", self._bridges[0])

    def inside(self, name: str, call: Callable[[], _T]) -> _T:
        """Return what `call` returns in the namespace of `name`; its sockets stay there."""

        def entered() -> _T:
            with Path("/run/netns", self.namespace(name)).open() as file:
                failed = ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET)
            assert not failed, f"cannot enter the namespace of {name}"
            return call()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(entered).result()

    def _port(self, name: str) -> str:
        return f"hf{self._tag}p{self._names.index(name)}"

    def _plug(self, name: str) -> None:
        space, port = self.namespace(name), self._port(name)
        _ip("netns", "add", space)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", port, "master", self._bridges[0], "up")
        _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")


def cluster_in(
    network: Network,
    run_dir: Path,
    *,
    run_id: str,
    num_nodes: int,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LocalCluster:
    """Return a cluster whose agents live in the namespaces of `network`.

    Args:
        network: it has the nodes of a LocalCluster.
        run_dir: of the run.
        run_id: of the run.
        num_nodes: how many.
        options: more arguments of each agent.
        env: more variables of each agent.
    """
    job = JobId(f"cut-{os.getpid()}-{uuid.uuid4().hex[:6]}")

    def command(node: LocalNode) -> list[str]:
        return [
            *("ip", "netns", "exec", network.namespace(node.name)),
            *("env", "GLOO_SOCKET_IFNAME=eth0", *(f"{k}={v}" for k, v in (env or {}).items())),
            *(sys.executable, "-P", "-m", "elastic_trainer.agent"),
            *("--run-dir", str(run_dir), "--node", node.name),
            *("--local-addr", network.address(node.name)),
            *("--job", job, "--attempt", "1", *options),
        ]

    return LocalCluster(
        run_dir, run_id=run_id, job_id=job, attempt=1, num_nodes=num_nodes, command=command
    )


def _ip(*args: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"
