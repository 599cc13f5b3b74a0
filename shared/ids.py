"""Identifiers, one type each, so that passing a request's id for an engine's is a type error.

What is allowed is checked wherever a message is decoded: instances' names become subjects, and a subject that NATS does
not take would cost its sender the connection.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, NewType

from msgspec import Meta

MAX_ID = 64
"""Characters of a process's name."""
_NAME = rf"[A-Za-z0-9_-]{{1,{MAX_ID}}}"
_SubjectToken = Annotated[str, Meta(pattern=rf"^{_NAME}\Z")]

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""How many there are of something, or a position. Together with `TokenId` what a message's numbers are checked for when
it is decoded: who sent it may be of another release, or have a bug."""

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""A token of a vocabulary of at most 2^32, as token ids are packed in 32 bits."""

RequestId = NewType("RequestId", str)
"""One sequence on its way through the services: one prompt, one choice."""

InstanceId = NewType("InstanceId", _SubjectToken)
"""One running process of any service, e.g. ``gateway-1``. Subject-safe."""

GatewayId = NewType("GatewayId", _SubjectToken)
EngineId = NewType("EngineId", _SubjectToken)
DetokenizerId = NewType("DetokenizerId", _SubjectToken)
NodeId = NewType("NodeId", _SubjectToken)
"""A machine, or whatever else shares one memory: the engines and the KV store on it name the same node."""
ClusterName = NewType("ClusterName", Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,24}\Z")])
"""A whole stack, among those of a federation."""
ModelName = NewType("ModelName", Annotated[str, Meta(min_length=1, max_length=512)])
"""The name clients send in ``model``; may hold slashes, see :func:`subject_token`."""

Attempt = NewType("Attempt", Count)
"""Which dispatch of a request this is, from 1. Whatever carries a lower number than the newest is stale."""
FIRST_ATTEMPT = Attempt(1)

SequenceId = NewType("SequenceId", Count)
"""A sequence's number inside one engine; reused only after its release was sent to the worker."""

GrammarKey = NewType("GrammarKey", bytes)
"""Names a grammar by its contents, see :attr:`shared.messages.generation.Grammar.key`."""

LoraId = NewType("LoraId", Annotated[bytes, Meta(min_length=16, max_length=16)])
"""A LoRA adapter by its contents: a digest of all that it computes, so that equal ones share cached blocks."""

RowsName = NewType("RowsName", Annotated[bytes, Meta(min_length=16, max_length=16)])
"""Rows of an image by their contents: a digest of their bytes, dtype and size."""

Incarnation = NewType("Incarnation", Count)
"""Differs between two starts of the same instance; also the epoch of whatever that process numbers."""

LeaseId = NewType("LeaseId", Count)
"""What a client of a KV store reserved or pinned together; unique per process of the client."""

ArenaId = NewType("ArenaId", Count)
"""One file of KV blocks in shared memory, 63 random bits; kept over a restart of the store that finds the file."""

_SUBJECT_SAFE = re.compile(_NAME)


def checked_instance(name: str) -> InstanceId:
    """`name` as an instance id. Raises ValueError where it could not be one token of a NATS subject."""
    if not _SUBJECT_SAFE.fullmatch(name):
        raise ValueError(f"instance {name!r}: 1 to 64 of A-Z a-z 0-9 _ - are allowed")
    return InstanceId(name)


_CLUSTER_MARK = "__"
"""Stands between a cluster's name, which has no underscore, and a gateway's."""


def relay_id(cluster: ClusterName, gateway: GatewayId) -> EngineId:
    """What stands for an engine where a gateway of another cluster has the request."""
    return EngineId(f"{cluster}{_CLUSTER_MARK}{gateway}")


def relay_of(engine: EngineId) -> tuple[ClusterName, GatewayId] | None:
    """The cluster and the gateway that stand for this engine; None for an engine of this cluster."""
    cluster, mark, gateway = engine.partition(_CLUSTER_MARK)
    return (ClusterName(cluster), GatewayId(gateway)) if mark else None


def subject_token(model: ModelName) -> str:
    """A model name as one token of a NATS subject; different names give different tokens."""
    return "".join(c if c.isascii() and (c.isalnum() or c == "-") else f"_{ord(c):x}_" for c in model)


def new_incarnation() -> Incarnation:
    """63 random bits: two starts of one instance share them with probability 2**-63."""
    return Incarnation(secrets.randbits(63))
