"""Messages to bytes and back: MessagePack, decoded strictly, one decoder per type."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import msgspec

from shared.bus.newer_cards import known_part
from shared.messages.lifecycle import Lifecycle
from shared.packing import NOT_DECODED
from shared.telemetry.metrics import UNDECODABLE
from shared.topics import Topic

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Undecodable(Exception):
    """The payload is not a message of the expected type; the text says where it differs."""


@cache
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_)


def _decoded(payload: bytes, type_: Any) -> Any:
    """Raises NOT_DECODED."""
    try:
        return _decoder(type_).decode(payload)
    except msgspec.ValidationError:
        if type_ is not Lifecycle:
            raise
        return known_part(payload)


def decode(payload: bytes, type_: Any) -> Any:
    """`payload` as a `type_`. Raises Undecodable."""
    try:
        return _decoded(payload, type_)
    except NOT_DECODED as error:
        raise Undecodable(str(error)) from None


def decode_received(payload: bytes, topic: Topic[Any]) -> Any:
    """A message received on `topic`. One that does not decode is counted and logged before Undecodable is raised."""
    try:
        return _decoded(payload, topic.type)
    except NOT_DECODED as error:
        UNDECODABLE.labels(topic.subject).inc()
        log.warning("undecodable message", extra={"subject": topic.subject, "error": str(error)})
        raise Undecodable(str(error)) from None
