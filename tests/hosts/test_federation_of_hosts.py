"""A cluster of several hosts in a federation: each host's gateways take part, and go on when the first host is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.cluster.conversations import QUESTIONS
from tests.support.cluster.namespace_hosts import CHANGE_DEADLINE, Host, Hosts, Streams

NO_STORE = "--kvstore-memory=0"
SECRET = {"BATON_FEDERATION_SECRET": "known to both clusters and to nobody else"}
FORWARDED = "baton_gateway_forwarded_total"
TOKENS = 40


def clusters(host: Host) -> dict[str, tuple[str, int]]:
    """What a host's gateway knows: the state and the number of gateways of each cluster."""
    done = host.baton("cluster", "list", "--json")
    assert done.returncode == 0, done.stderr
    return {each["name"]: (each["state"], each.get("gateways", 1)) for each in json.loads(done.stdout)["clusters"]}


def until(true: Callable[[], bool], hosts: Hosts) -> None:
    deadline = time.monotonic() + CHANGE_DEADLINE
    while not true():
        assert time.monotonic() < deadline, hosts.last_words()


def kill_gateways(*hosts: Host) -> None:
    """At once, so that none can tell another."""
    for pid in [
        host.state.processes[name].pid for host in hosts for name in host.state.processes if "gateway-" in name
    ]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_a_joined_hosts_gateway_takes_part_and_stays_when_the_first_host_is_lost(hosts: Hosts) -> None:
    a, b, other = hosts["a"], hosts["b"], hosts["c"]
    eu = ("--cluster=eu", f"--federation-address={a.address}")
    us = ("--cluster=us", f"--federation-address={other.address}", f"--federate={a.address}")
    for host, options in ((a, eu), (other, us)):
        where = (f"--advertise-address={host.address}", f"--node={host.name}", *host._serving())
        host.start("up", NO_STORE, "--gateways=1", *where, *options, environment=SECRET)
    b.join(a.token(), NO_STORE, *b.with_everything())
    until(lambda: clusters(other) == {"us": ("here", 1), "eu": ("ready", 2)}, hosts)
    until(lambda: clusters(b) == {"eu": ("here", 1), "us": ("ready", 1)}, hosts)
    expected = Streams(other, QUESTIONS[:2], TOKENS).texts()

    # Drained, and still so when all processes that know it were killed.
    assert other.baton("cluster", "drain", "eu").returncode == 0
    kill_gateways(a, b)
    a.until_ready("gateway-1", "b-gateway-1")
    for host in (a, b):
        until(lambda host=host: clusters(host).get("us") == ("ready", 1), hosts)  # type: ignore[misc]
        assert clusters(host)["eu"][0] == "drained"
        assert Streams(host, QUESTIONS[:2], TOKENS).texts() == expected
        assert host.metric(FORWARDED) >= len(expected)

    # The first host is gone: the other one still sends what comes to it, and takes what is sent.
    a.lose_power()
    until(lambda: clusters(other)["eu"] == ("drained", 1), hosts)
    forwarded = b.metric(FORWARDED)
    assert Streams(b, QUESTIONS[:2], TOKENS).texts() == expected
    assert b.metric(FORWARDED) == forwarded + len(expected)
    assert b.baton("cluster", "undrain", "eu").returncode == 0
    assert other.baton("cluster", "drain", "us").returncode == 0
    forwarded = other.metric(FORWARDED)
    assert Streams(other, QUESTIONS[:2], TOKENS).texts() == expected
    # More, where the cluster's own bus has not yet noticed the loss and hands an attempt to a part on the lost host.
    assert other.metric(FORWARDED) >= forwarded + len(expected)
