"""NetworkPolicies let through what the services need, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from tests.support.kubernetes.manifests import OVERLAYS, rendered
from tests.support.kubernetes.network import Connection, Endpoint, is_allowed
from tests.support.kubernetes.pods import workloads

STRANGER = Endpoint("stranger", "elsewhere", {})
NEIGHBOUR = Endpoint("neighbour", "baton", {"app.kubernetes.io/name": "something-else"})
PROMETHEUS = Endpoint("prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
DNS = Endpoint("dns", "kube-system", {"k8s-app": "kube-dns"})
SYSTEM = Endpoint("system", "kube-system", {"k8s-app": "something-else"})
OUTSIDERS = (STRANGER, NEIGHBOUR, PROMETHEUS, DNS, SYSTEM)


def pods(overlay: str) -> list[Endpoint]:
    return [Endpoint(each.name, "baton", each.labels) for each in workloads(rendered(overlay))]


def open_connections(overlay: str) -> set[Connection]:
    """All that pass, of those from or to a pod of ours, at every port that any of them has and some more."""
    ours = pods(overlay)
    ports = {port for each in workloads(rendered(overlay)) for c in each.containers for port in c.ports.values()}
    pairs = [(a, b) for a, b in itertools.product((*ours, *OUTSIDERS), repeat=2) if a != b and (a in ours or b in ours)]
    asked = [(port, "TCP") for port in (*ports, 22, 53, 443)] + [(53, "UDP")]
    return {
        Connection(a.name, b.name, port, protocol)
        for a, b in pairs
        for port, protocol in asked
        if is_allowed(rendered(overlay), a, b, port, protocol)
    }


def servers(overlay: str) -> Mapping[str, list[str]]:
    """Host names in the containers' settings, by pod: `nats` in every service's."""
    found: dict[str, list[str]] = {}
    for workload in workloads(rendered(overlay)):
        for container in workload.containers:
            for name, value in container.environment(workload.pod_name, rendered(overlay)).items():
                if name == "BATON_NATS_URL":
                    found.setdefault(workload.name, []).append(value.removeprefix("nats://").partition(":")[0])
                if name == "BATON_KVSTORE_REDIS_URL_FILE":
                    found.setdefault(workload.name, []).append("redis")
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_exactly_what_is_needed_passes(overlay: str) -> None:
    everyone = (*(each.name for each in pods(overlay)), *(each.name for each in OUTSIDERS))
    services = servers(overlay)
    needed = {Connection(name, host, 6379 if host == "redis" else 4222) for name in services for host in services[name]}
    needed |= {Connection(name, "dns", 53, protocol) for name in services for protocol in ("TCP", "UDP")}
    needed |= {Connection(each.name, "gateway", 8000) for each in OUTSIDERS}
    if overlay == "multi-node":
        ports = {port for each in workloads(rendered(overlay)) for c in each.containers for port in c.ports.values()}
        ranks = itertools.permutations(("engine", "engine-worker"))
        needed |= {Connection(a, b, port) for a, b in ranks for port in ports}
    if overlay == "pools":
        stores = itertools.permutations(("engine", "prefill"))
        needed |= {Connection(a, b, port) for a, b in stores for port in (6224, 6225)}
    if overlay == "gpu":
        needed |= {Connection("prometheus", name, port) for name in services for port in (9090, 9091, 9092)}
    assert open_connections(overlay) == needed
    assert {each.source for each in needed} | {each.target for each in needed} <= set(everyone)
