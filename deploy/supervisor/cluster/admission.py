"""Decides whether a host may join: by what it says of itself, and which hosts there are. No clock, no network."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from deploy.supervisor.cluster.messages import JoinRefusal, JoinRequest
from deploy.supervisor.cluster.model_fingerprint import ModelFingerprint
from deploy.supervisor.cluster.tokens import TokenState
from shared.addresses import is_loopback
from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import NodeId, checked_instance
from shared.protocol import OWN, SpokenProtocols, incompatibility

MAX_CLOCK_OFFSET = 1.0
"""Seconds. Two things go from host to host by the wall's clock: the age of a resumable stream, whose deadline another
host's gateway judges, and the date in a chat template, which a request that is tried again may get from another host.
Logs of several hosts are read by it, too. Hosts that keep time by NTP are far below this (etcd warns at 1 s, too)."""
MAX_NODE_NAME = 32
"""Characters: names of processes begin with it, and have 64 at most."""


class ClusterMember(Struct, frozen=True):
    """A host that was let in, whether it is there or not."""

    address: str
    route_port: int

    @property
    def route(self) -> str:
        """HOST:PORT of its nats-server."""
        return f"[{self.address}]:{self.route_port}" if ":" in self.address else f"{self.address}:{self.route_port}"


class AdmissionRules(Struct, frozen=True, kw_only=True):
    """What the first host compares a new one with."""

    node: NodeId
    """The first host's own name."""
    address: str
    model: ModelFingerprint
    protocols: SpokenProtocols = OWN
    block_size: int = DEFAULT_BLOCK_SIZE


def token_refusal(state: TokenState, identity: str, node: NodeId) -> JoinRefusal | None:
    """Why a token lets nobody in; None where it does."""
    if state == "valid":
        return None
    why = "it has expired" if state == "expired" else "it is unknown here, or was revoked"
    return JoinRefusal("token", identity[:16], f"{why}; `baton token` on {node} makes another")


def join_refusal(
    request: JoinRequest,
    rules: AdmissionRules,
    members: Mapping[NodeId, ClusterMember],
    alive: Mapping[NodeId, str],
) -> JoinRefusal | None:
    """Why a host with a valid token is not let in; None where it is. `members` were let in before, `alive` are the
    hosts heard of just now, with their addresses."""
    return (
        _name_refusal(request, rules, members, alive)
        or _address_refusal(request, rules)
        or _protocol_refusal(request, rules)
        or _model_refusal(request, rules)
        or _clock_refusal(request)
    )


def _name_refusal(
    request: JoinRequest,
    rules: AdmissionRules,
    members: Mapping[NodeId, ClusterMember],
    alive: Mapping[NodeId, str],
) -> JoinRefusal | None:
    field, node = "--node", request.node
    try:
        checked_instance(node)
    except ValueError:
        return JoinRefusal(field, repr(node[:80]), f"1 to {MAX_NODE_NAME} of A-Z a-z 0-9 _ - are allowed")
    if len(node) > MAX_NODE_NAME:
        return JoinRefusal(field, node, f"1 to {MAX_NODE_NAME} of A-Z a-z 0-9 _ - are allowed")
    if node == rules.node:
        return JoinRefusal(field, node, f"the first host at {rules.address} has this name; give another")
    if node in alive:
        return JoinRefusal(
            field, node, f"a host of this name is a member, and there, at {alive[NodeId(node)]}; give another name"
        )
    former = members.get(NodeId(node))
    if former is not None and former.address != request.address:
        return JoinRefusal(
            field,
            node,
            f"this is the name of the member at {former.address}, which is away; give another name, or join from there",
        )
    return None


def _address_refusal(request: JoinRequest, rules: AdmissionRules) -> JoinRefusal | None:
    """On one machine hosts may join by its loopback, if the first one is there, too."""
    if is_loopback(request.address) and not is_loopback(rules.address):
        return unreachable(request, rules.node, "it is the loopback of each host")
    return None


def _protocol_refusal(request: JoinRequest, rules: AdmissionRules) -> JoinRefusal | None:
    theirs = SpokenProtocols(request.min_protocol, request.protocol)
    why = incompatibility(theirs, rules.protocols)
    if why is not None:
        return JoinRefusal("protocol", str(theirs), f"{rules.node} speaks {rules.protocols}; install the same release")
    if request.block_size != rules.block_size:
        return JoinRefusal(
            "--block-size", str(request.block_size), f"{rules.block_size} tokens, as on {rules.node}; one for a stack"
        )
    return None


def _model_refusal(request: JoinRequest, rules: AdmissionRules) -> JoinRefusal | None:
    return None if request.model is None else model_difference(request.model, rules.model, rules.node)


def model_difference(theirs: ModelFingerprint, ours: ModelFingerprint, node: str) -> JoinRefusal | None:
    """Why a host's model is not that of the first host `node`; None where it is."""
    for part in ("config", "tokenizer", "weights"):
        there, here = getattr(theirs, part), getattr(ours, part)
        if there != here:
            return JoinRefusal(
                "--model", f"{part} {there}", f"{here}, as on {node}: the two hosts have different models"
            )
    return None


def _clock_refusal(request: JoinRequest) -> JoinRefusal | None:
    offset = request.clock_offset
    if abs(offset) - max(0.0, request.clock_uncertainty) <= MAX_CLOCK_OFFSET:
        return None
    where = "behind" if offset > 0 else "ahead"
    return JoinRefusal(
        "clock", f"{abs(offset):.1f} s {where}", f"at most {MAX_CLOCK_OFFSET:g} s; set both hosts' clocks by NTP"
    )


REACHED_IN = 3.0
"""Seconds within which the first host must reach a new one."""


def unreachable(request: JoinRequest, node: NodeId, why: str) -> JoinRefusal:
    """The refusal of a host that does not answer where it says that it is."""
    return JoinRefusal(
        "--advertise-address",
        f"{request.address} (--route-port {request.route_port})",
        f"{node} cannot reach it ({why}); an address and a port that all other hosts reach",
    )


# Settings of the first host's services that another host does not take over.


OWN_TO_A_HOST = frozenset(
    {
        "bind",
        "cluster",
        "database_file",
        "directory",
        "federation_address",
        "federation_model",
        "federation_state",
        "journal",
        "kv_ssd",
        "kv_ssd_size",
        "keys_file",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "metrics_host",
        "metrics_port",
        "node",
        "numa",
        "threads",
        "host",
        "port",
        "kvstore_memory",
        # Secrets that a host gets in another way, or brings itself.
        "api_keys",
        "database",
        "federation_url",
        "kv_connector_extra_config",
        "kv_tiers",
        "overflow_key",
        "redis_url",
    }
)
OWN_PREFIXES = ("nats_", "transfer_")


def shared_settings(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Those that hold on every host: without addresses, files, and what depends on the machine."""
    return {
        service: {
            key: value for key, value in values.items() if key not in OWN_TO_A_HOST and not key.startswith(OWN_PREFIXES)
        }
        for service, values in settings.items()
    }
