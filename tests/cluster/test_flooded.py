"""Strangers drip, flood and stall every port of a run while one of its nodes dies."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import threading
import time

import psutil
import pytest
from live_run import family, live_run, signal_all
from test_agents_served import free_port

from elastic_trainer.worker.secret import MAGIC

HELD, DRIPPING, NEW = 90, 8, 1
"""Connections to each port, those of them that drip, and how many come at most each 0.1 s."""
FLOOD_EVERY_S = 0.01
SLOWER = 1.5
WORDS = [b"GET /metrics HTTP/1.1\r\n\r\n", MAGIC + b"n" * 64, b"\xff" * 64, b""]
BEGINNINGS = [b"GET /metrics HTTP/1.1\r\n", MAGIC[:4]]


def ports_of(agents):
    """Return the addresses at which the agents that live listen now."""
    found = set()
    for agent in agents.values():
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(agent).net_connections("tcp")
            found |= {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}
    return found


class Strangers:
    """They come again when they are hung up on, and find new ports within 0.2 s."""

    def __init__(self, agents):
        self._agents, self._ended = agents, threading.Event()
        self._threads = [
            threading.Thread(target=each) for each in (self._look, self._hold, self._flood)
        ]
        self.ports, self.came = ports_of(agents), 0

    def __enter__(self):
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        for each in self._threads:
            each.join()

    def _look(self):
        while not self._ended.wait(0.2):
            self.ports = ports_of(self._agents)

    def _dial(self, address, words):
        sock = socket.socket()
        sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            sock.connect(address)
            sock.sendall(words)
            self.came += 1
        sock.setblocking(False)
        return sock

    def _hold(self):
        """Keep connections to each port; some of them say a byte now and then."""
        held, beginnings = {}, itertools.cycle(BEGINNINGS)
        while not self._ended.wait(0.1):
            for address in self.ports:
                there = held.setdefault(address, [])
                cut = [sock for sock in there if is_cut(sock)]
                there[:] = [sock for sock in there if sock not in cut]
                for sock in cut:
                    sock.close()
                for _ in range(min(NEW, HELD - len(there))):
                    there.append(self._dial(address, next(beginnings)))
                for sock in there[:DRIPPING]:
                    with contextlib.suppress(OSError):
                        sock.send(b"x")
        for sock in itertools.chain(*held.values()):
            sock.close()

    def _flood(self):
        """Come and go; the cores are the workers' too."""
        for words in itertools.cycle(WORDS):
            for address in self.ports:
                self._dial(address, words).close()
                self._ended.wait(FLOOD_EVERY_S)
            if self._ended.wait(FLOOD_EVERY_S):
                break


def is_cut(sock):
    try:
        return sock.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def recovery(run, victim):
    """Kill a node; return the seconds to the next epoch's first step, once a few more are done."""
    before, begun = run.events("epoch.formed")[-1].epoch, time.time()
    signal_all(family(run.agents()[victim]), signal.SIGKILL)
    run.until(run.stepped_after(before), "the others go on")
    [first, *_] = [e for e in run.events("step.completed") if (e.epoch or 0) > before]
    run.until(lambda: len(run.events("step.completed", first.epoch)) > 5, "and go on")
    return first.t_unix - begun


def recoveries(folder, *, disturbed):
    """Kill the coordinator of three nodes and then another; return the seconds of both."""
    folder.mkdir()
    sets = [f"network.metrics_port={free_port()}"]
    with live_run(folder, sets=sets) as run, contextlib.ExitStack() as stack:
        run.until_steady()
        agents, coordinator = run.agents(), run.events("epoch.formed")[-1].fields["coordinator"]
        if disturbed:
            strangers = stack.enter_context(Strangers(agents))
            assert len(strangers.ports) == 3 * 3 + 1, "three an agent, and the epoch's store"
            run.until(lambda: strangers.came > 600, "strangers have come")
        other = min(agents.keys() - {coordinator})
        found = [recovery(run, victim) for victim in (coordinator, other)]
        run.finish()
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nodes_are_replaced_as_fast_whatever_strangers_do(tmp_path):
    calm = recoveries(tmp_path / "calm", disturbed=False)
    struck = recoveries(tmp_path / "struck", disturbed=True)
    assert sum(struck) < SLOWER * sum(calm), (calm, struck)
