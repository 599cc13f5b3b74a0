"""Which connections NetworkPolicies let through, by the rules of networking.k8s.io/v1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tests.support.kubernetes.manifests import Manifest, of_kind, selects

NAMESPACE = "kubernetes.io/metadata.name"


class Endpoint(NamedTuple):
    """A pod, as policies see it."""

    name: str
    namespace: str
    labels: Mapping[str, str]


class Connection(NamedTuple):
    source: str
    target: str
    port: int
    protocol: str = "TCP"


def is_allowed(
    manifests: tuple[Manifest, ...], source: Endpoint, target: Endpoint, port: int, protocol: str = "TCP"
) -> bool:
    """A connection needs a rule at both ends, at each one that any policy selects for its direction."""
    return all(
        _passes(manifests, own, other, direction, port, protocol)
        for own, other, direction in ((source, target, "Egress"), (target, source, "Ingress"))
    )


def _passes(
    manifests: tuple[Manifest, ...], own: Endpoint, other: Endpoint, direction: str, port: int, protocol: str
) -> bool:
    policies = [
        each
        for each in of_kind(manifests, "NetworkPolicy")
        if each["metadata"]["namespace"] == own.namespace
        and direction in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], own.labels)
    ]
    rules = [(each, rule) for each in policies for rule in each["spec"].get(direction.lower(), ())]
    peers: Literal["to", "from"] = "to" if direction == "Egress" else "from"
    return not policies or any(
        _has_port(rule, port, protocol)
        and (peers not in rule or any(_is_peer(peer, other, policy) for peer in rule[peers]))
        for policy, rule in rules
    )


def _has_port(rule: Manifest, port: int, protocol: str) -> bool:
    return "ports" not in rule or any(
        each["port"] <= port <= each.get("endPort", each["port"]) and each.get("protocol", "TCP") == protocol
        for each in rule["ports"]
    )


def _is_peer(peer: Mapping[str, Any], other: Endpoint, policy: Manifest) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], {NAMESPACE: other.namespace}):
            return False
    elif other.namespace != policy["metadata"]["namespace"]:
        return False
    return selects(peer.get("podSelector", {}), other.labels)
