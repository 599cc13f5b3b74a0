"""What a host that wants to join and the first host say to each other, over TLS: one JSON object a line.

`AuthorityRequest` goes over a connection that nobody has checked yet, everything else over one that is checked with the
authority that it answered with. Fields are added with defaults only: the hosts may be of different releases.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from deploy.supervisor.cluster.model_fingerprint import ModelFingerprint
from deploy.supervisor.core.plan import Counts
from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import ClusterName, ModelName, NodeId

MAX_LINE = 256 * 1024
"""Bytes of one message."""
EXCHANGE_SECONDS = 20.0
"""For all that a host and the first host say to each other."""


class TokenProof(Struct, frozen=True):
    """The secret part of a join token."""

    id: str
    secret: str


class AuthorityRequest(Struct, frozen=True, tag=True):
    """Asks for the certificate that the token names."""


class AuthorityReply(Struct, frozen=True, tag=True):
    """The certificate of the stack's authority, as PEM."""

    certificate: str


class StackQuery(Struct, frozen=True, tag=True):
    """Asks what stack this is, and what the time is there."""

    token: TokenProof


class StackFacts(Struct, frozen=True, tag=True):
    """The stack, as far as a host has to know it before it can join."""

    now: float
    """Unix seconds, when this was sent."""
    name: str
    node: NodeId
    """Of the first host."""
    served_model_name: ModelName
    model: str
    """Where the first host has its model."""
    dummy_weights: bool = False
    sends_model: bool = False
    """Whether a host that is let in can get the model from it."""
    block_size: int = DEFAULT_BLOCK_SIZE


class JoinRequest(Struct, frozen=True, tag=True, kw_only=True):
    """A host asks to be let in. It listens at `address` and `route_port` meanwhile."""

    token: TokenProof
    node: str
    address: str
    """Where the other hosts reach it."""
    route_port: int
    protocol: int
    """Newest version of the bus's messages that it understands; see `shared.protocol`."""
    min_protocol: int
    block_size: int
    """Tokens of a KV block."""
    model: ModelFingerprint | None
    """None: it has none, and gets it from hosts that are there."""
    clock_offset: float
    """Seconds that the first host's clock is ahead of its own."""
    clock_uncertainty: float
    """Seconds by which `clock_offset` may be wrong."""
    signing_request: str
    """PEM."""
    gateways: bool = False
    """Whether it will run gateways, which need the stack's API keys."""


class JoinRefusal(Struct, frozen=True, tag=True):
    """Why a host is not let in."""

    field: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field} {self.value}: {self.allowed}"


class FederationMembership(Struct, frozen=True, kw_only=True):
    """The federation that a stack is in, for gateways of another host."""

    cluster: ClusterName
    address: str
    """HOST:PORT by which the cluster is known to the others."""
    port: int
    """Of the new host's own federation server, where it does not choose another."""
    others: tuple[str, ...] = ()
    secret: str
    model: str
    """Fingerprint of the model's files, in hexadecimal."""


class StackMembership(Struct, frozen=True, tag=True, kw_only=True):
    """Everything that a host needs to be part of the stack. It keeps this, and comes back with it."""

    name: str
    first: str
    """The first host, for people: its name and address."""
    namespace: str
    served_model_name: ModelName
    model: str
    """As in `StackFacts`."""
    certificate: str
    """The new host's, as PEM."""
    secret: str
    """The passwords on the bus are derived from it."""
    routes: tuple[str, ...]
    """HOST:PORT of the nats-servers of all hosts so far."""
    reachable: tuple[str, ...] = ()
    """Those of `routes` that the new host has to reach: the others are away."""
    settings: Mapping[str, Mapping[str, str]]
    """Service → key → value: those of the first host that are not its alone."""
    counts: Counts
    """The first host's: for the ranks and stages of each engine."""
    pp_layers: tuple[int, ...] = ()
    outside_bus: tuple[str, ...] = ()
    """URLs of an external NATS server; empty: each host has its own."""
    redis_url: str | None = None
    api_keys: tuple[str, ...] = ()
    """For a host that runs gateways."""
    keys_file: bool = False
    """Whether the first host's gateways read a file of keys; other hosts' have to have the same one."""
    tls: bool = False
    """Whether the first host's gateways speak TLS; other hosts' have to, with certificates of their own."""
    drain_timeout: float
    orphan_timeout: float
    fingerprint: ModelFingerprint | None = None
    """Of the first host's model. None: a first host of an earlier release."""
    model_servers: tuple[str, ...] = ()
    """HOST:PORT where hosts send it, the first host first."""
    federation: FederationMembership | None = None


class HostMembership(Struct, frozen=True, kw_only=True):
    """What a host keeps: as whom it was let in, and of what it is a part."""

    node: NodeId
    address: str
    route_port: int
    stack: StackMembership


JoinMessage = AuthorityRequest | StackQuery | JoinRequest
JoinAnswer = AuthorityReply | StackFacts | StackMembership | JoinRefusal
