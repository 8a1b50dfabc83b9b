"""Networks as they are: real agents and workers on nodes whose network is odd in some way."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass

import pytest
from fault_matrix import Layout, events, losses, story, write_job
from namespaces import Network, why_not

from launcher.local import job as local_job
from launcher.platforms.base import JobId
from launcher.platforms.local import LocalCluster
from launcher.runs import run_dir as run_dirs

LAYOUT = Layout("dp2", "{dp: auto}", nodes=2)
STEPS = 4
DEADLINE_S = 200.0
OWN = ("127.", "[::1]", "[::ffff:127.")
PORTS, LOCAL_PORTS = "29400-29449", "29450 29499"
pytestmark = pytest.mark.timeout(400)

# Run on each node before its agent; $1 is its name, $2 its number.
NAME = 'hostname "$1"; printf "127.0.0.1 localhost\\n127.0.1.1 %s\\n" "$1" >hosts.$1'
NAME += "; mount --bind hosts.$1 /etc/hosts"
IPV6 = "ip addr flush dev eth0 scope global; ip -6 addr add fd00:77::$2/64 dev eth0 nodad"
# gloo and NCCL have no setting for ports: the kernel's range must lie in what is let through.
FIREWALL = f"""\
echo {LOCAL_PORTS} >/proc/sys/net/ipv4/ip_local_port_range
nft -f - <<N
table inet guard {{
  chain input {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    tcp dport 29400-29499 accept
  }}
}}
N
"""
# A veth whose other end is down has no carrier; the default route leads through it.
DEAD = """\
ip link add dead0 type veth peer name off0
ip link set dead0 up
ip addr add 10.99.0.$2/24 dev dead0
ip route add default via 10.99.0.254 dev dead0
"""
SECOND = """\
ip link add link eth0 name data0 type macvlan mode bridge
ip link set data0 up
ip addr add 10.88.0.$2/24 dev data0
"""


@dataclass(frozen=True, slots=True)
class Case:
    """An odd network."""

    name: str
    setup: str
    prefix: str
    """What the agents' addresses must begin with."""
    sets: tuple[str, ...] = ()


CASES = (
    Case("ipv6-only-and-own-name-is-127.0.1.1", f"{NAME}\n{IPV6}", "fd00:77::"),
    Case("own-name-is-127.0.1.1-and-dead-interface", f"{NAME}\n{DEAD}", "10.213.77."),
    Case("firewall", FIREWALL, "10.213.77.", (f"network.ports={PORTS}",)),
    Case("cidr", SECOND, "10.88.0.", ("network.cidr=10.88.0.0/16",)),
    Case("interface", SECOND, "10.88.0.", ("network.interface=data0",)),
)


@pytest.fixture(scope="module")
def rights():
    if reason := why_not():
        pytest.skip(reason)


def cluster_in(network, prepared, folder, setup):
    """Return agents in the namespaces, each after its node's `setup`."""
    job = JobId(f"net-{os.getpid()}-{uuid.uuid4().hex[:6]}")

    def command(node):
        agent = [
            *(sys.executable, "-P", "-m", "elastic_trainer.agent"),
            *("--run-dir", str(prepared.run_dir), "--node", node.name),
            *("--job", job, "--attempt", "1"),
        ]
        # The emulated cluster's environment names the loopback, these nodes have a network.
        text = f"set -e; cd {shlex.quote(str(folder))}\n{setup}\nunset GLOO_SOCKET_IFNAME\n"
        number = network.address(node.name).rpartition(".")[2]
        return [
            *("ip", "netns", "exec", network.namespace(node.name), "unshare", "-m", "-u"),
            *("sh", "-c", f'{text}shift 2; exec "$@"', "sh", node.name, number, *agent),
        ]

    return LocalCluster(
        prepared.run_dir,
        run_id=prepared.narrowed.run_id,
        job_id=job,
        attempt=1,
        num_nodes=LAYOUT.nodes,
        command=command,
    )


def connections(network, name):
    """Return (local address, peer) of the node's TCP connections to other nodes."""
    done = subprocess.run(
        ["ip", "netns", "exec", network.namespace(name), "ss", "-Htn", "state", "established"],
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = [line.split()[2:4] for line in done.stdout.splitlines()]
    return [(here, there) for here, there in pairs if not here.startswith(OWN)]


@pytest.mark.usefixtures("rights")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c in CASES[1:] else []) for c in CASES],
)
def test_agents_and_workers_meet(case, tmp_path):
    if case.setup is FIREWALL and shutil.which("nft") is None:
        pytest.skip("a firewall needs nft: apt-get install nftables")
    job = write_job(tmp_path, LAYOUT, steps=STEPS)
    prepared = local_job.prepare_new(
        job,
        nodes=None,
        faults=(),
        sets=(*case.sets, "elastic.min_nodes=2"),
        run_dir=tmp_path / "run",
        stamp="net",
    )
    run_dir = prepared.run_dir
    run_dirs.write_attempt(run_dir, prepared.rendered, prepared.narrowed)
    (tmp_path / "err").write_text("")
    names = [f"node{i}" for i in range(LAYOUT.nodes)]
    seen = set()
    with (
        Network(names) as network,
        cluster_in(network, prepared, tmp_path, case.setup) as cluster,
    ):
        cluster.start()
        deadline = time.monotonic() + DEADLINE_S
        while cluster.alive():
            assert time.monotonic() < deadline, story(tmp_path, "not done in time")
            seen.update(pair for name in names for pair in connections(network, name))
            time.sleep(0.05)
        assert set(cluster.codes().values()) == {0}, story(tmp_path, "")
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))
    addresses = [event["address"] for event in events(run_dir, "agent.started")]
    assert len(addresses) == LAYOUT.nodes
    assert all(address.startswith(case.prefix) for address in addresses), addresses
    assert seen
    odd = {pair for pair in seen if not all(case.prefix in end for end in pair)}
    assert not odd
