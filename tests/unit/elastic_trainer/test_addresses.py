"""Which of a node's addresses its peers are told."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.wire.addresses import (
    Interface,
    choose,
    interface_of,
    interfaces,
    local_address,
    parse_if_inet6,
    with_links,
)

LO = Interface(name="lo", addresses=("127.0.0.1",), loopback=True)
ETH = Interface(name="eth0", addresses=("10.0.0.7", "fd00::7"))
IB = Interface(name="ib0", addresses=("192.168.3.7",))
DEAD = Interface(name="eth1", addresses=("10.9.0.7",), running=False)
IF_INET6 = """\
fd000000000000000000000000000007 02 40 00 80     eth0
fe80000000000000a8bbccfffeddee01 02 40 20 80     eth0
fd000000000000000000000000000008 02 40 00 c0     eth0
00000000000000000000000000000001 01 80 10 80       lo
fd000000000000000000000000000009 03 40 00 88     eth1
"""
ADDRESSES = st.ip_addresses(v=4).map(str)
INTERFACES = st.lists(
    st.builds(
        Interface,
        name=st.sampled_from(["lo", "eth0", "eth1", "ib0"]),
        addresses=st.lists(ADDRESSES, min_size=1, max_size=2).map(tuple),
        running=st.booleans(),
        loopback=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda one: one.name,
)


def test_what_the_job_file_says_is_taken():
    found = [LO, ETH, IB]
    assert choose(found, interface="ib0", routed=["10.0.0.7"]) == "192.168.3.7"
    assert choose(found, cidr="192.168.0.0/16", routed=["10.0.0.7"]) == "192.168.3.7"
    assert choose(found, cidr="fd00::/8") == "fd00::7"
    assert choose(found, interface="lo") == "127.0.0.1"


def test_interfaces_for_copies_keep_their_order_and_one_without_a_link_is_left_out():
    found = with_links([LO, ETH, DEAD, IB], ["ib0", "eth1", "eth7", "eth0"])
    assert found == (["192.168.3.7", "10.0.0.7"], ["eth1", "eth7"])


def test_without_a_word_the_default_route_decides_unless_its_cable_is_out():
    assert choose([LO, ETH, IB], routed=["192.168.3.7"]) == "192.168.3.7"
    assert choose([LO, DEAD, IB], routed=["10.9.0.7"]) == "192.168.3.7"
    assert choose([LO, DEAD, ETH], routed=[]) == "10.0.0.7", "compute nodes often have none"
    assert choose([LO, ETH], routed=["fd00::7"]) == "fd00::7"
    assert choose([LO]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"cidr": "172.16.0.0/12"}, r"network\.cidr: .* 172\.16\.0\.0/12\b.* lo="),
        ({"interface": "ib7"}, r"network\.interface: .*\bib7\b.* ib0=192\.168\.3\.7"),
        ({"interface": "eth1"}, r"network\.interface: eth1: eth1\b"),
        ({"cidr": "10.9.0.0/16"}, r"network\.cidr: 10\.9\.0\.0/16: eth1\b"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(asked, said):
    with pytest.raises(ValueError, match=said):
        choose([LO, ETH, IB, DEAD], **asked)


@given(INTERFACES, st.lists(ADDRESSES, max_size=2), st.sampled_from(["auto", "eth0", "ib0"]))
def test_the_answer_is_an_address_of_an_interface_with_a_link(found, routed, interface):
    held = {address for one in found if one.running for address in one.addresses}
    try:
        address = choose(found, interface=interface, routed=routed)
    except ValueError:
        assert interface != "auto"
        assert not any(one.name == interface and one.running for one in found)
        return
    assert address in held or (interface == "auto" and address == "127.0.0.1")


@given(INTERFACES, st.ip_addresses(v=4, network="10.0.0.0/8"), st.integers(8, 32))
def test_an_address_of_the_network_is_found_when_there_is_one(found, inside, length):
    network = ipaddress.ip_network((inside, length), strict=False)
    mine = Interface(name="mine", addresses=(str(inside),))
    address = choose([*found, mine], cidr=str(network))
    assert ipaddress.ip_address(address) in network


def test_ipv6_addresses_that_others_can_use():
    assert parse_if_inet6(IF_INET6) == {"eth0": ["fd00::7"]}
    assert parse_if_inet6("") == {}
    assert parse_if_inet6("garbage\n") == {}


def test_this_machines_own():
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("203.0.113.77") is None
    assert local_address(interface="lo") == "127.0.0.1"
    assert local_address(cidr="127.0.0.0/8") == "127.0.0.1"
    assert ipaddress.ip_address(local_address())
    (loopback,) = [one for one in interfaces() if one.loopback]
    assert loopback.running
