"""Messages between clusters: all that one stack's gateways say to those of another. Nothing else crosses."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.ids import ClusterName, Count, GatewayId, Incarnation, LoraId, ModelName
from shared.messages.tokenizer import Tokenize


class ModelRoom(Struct, frozen=True, array_like=True):
    """How many more requests the engines of one model would take at once."""

    model: ModelName
    fingerprint: bytes
    """Names its configuration, tokenizer and weights; empty where the cluster does not say."""
    room: Count
    """Places that are free."""
    places: Count
    """Places in all: sequences that its engines run at a time."""
    loras: tuple[LoraId, ...] = ()
    """The adapters that its engines may compute it with."""


class ClusterStatus(Struct, frozen=True, array_like=True, kw_only=True):
    """Each gateway of a cluster → all gateways of all clusters: what it can take. Once a second, and on a switch."""

    cluster: ClusterName
    address: str
    """Where other clusters reach its NATS server, HOST:PORT: two clusters of one name differ in it."""
    gateway: GatewayId
    incarnation: Incarnation
    since: float
    """When the first gateway of the cluster began to use the name, in Unix seconds, as far as this one has heard."""
    sent: float
    """Unix seconds, by which clocks are compared."""
    models: tuple[ModelRoom, ...]
    drained: bool = False
    """Whether new requests go to other clusters."""
    switched: float = 0.0
    """When that was said last, in Unix seconds; the newest word counts."""
    min_protocol: Count = 1
    protocol: Count = 1
    block_size: Count = 16


class ClusterRequest(Struct, frozen=True, array_like=True, tag=True):
    """gateway → one gateway of another cluster: serve this attempt, and send me what comes of it. It is not forwarded
    again."""

    cluster: ClusterName
    """The sender's; `tokenize.gateway` is the sender."""
    address: str
    """The sender's `ClusterStatus.address`."""
    tokenize: Tokenize


class SwitchCluster(Struct, frozen=True, array_like=True, tag=True):
    """gateway → every gateway of a cluster: new requests leave it (`drained`), or may come again."""

    drained: bool
    switched: float
    """Unix seconds; a switch that is older than the last one is no news."""
    move_after: Annotated[float, Meta(ge=0)] | None = None
    """Seconds after which open streams go on in other clusters; None: they end here."""
