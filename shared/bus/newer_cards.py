"""Reads lifecycles of a newer release: what it says of a model in words that this one has not is as if the model lacked
that one feature. Without it the engine would be passed over, with all that this release knows of it."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Struct, structs

from shared.messages.lifecycle import Lifecycle
from shared.messages.model_card import ModelCard
from shared.packing import NOT_DECODED

log = logging.getLogger(__name__)

MAX_LOGGED = 256
"""Features of models of which it is remembered that they were logged."""
_logged = set[tuple[str, str]]()


class _Feature(NamedTuple):
    """A field of a card that says what a model has; None: it has not."""

    place: int
    name: str
    decoder: msgspec.msgpack.Decoder[Any]


@cache
def _features() -> tuple[_Feature, ...]:
    fields = enumerate(structs.fields(ModelCard))
    return tuple(
        _Feature(place, each.name, msgspec.msgpack.Decoder(each.type)) for place, each in fields if each.default is None
    )


@cache
def _places() -> tuple[tuple[int, int], ...]:
    """Of cards in a lifecycle: the field of a report, and the report's."""
    return tuple(
        (place, within)
        for place, report in enumerate(structs.fields(Lifecycle))
        for kind in get_args(report.type)
        if isinstance(kind, type) and issubclass(kind, Struct)
        for within, each in enumerate(structs.fields(kind))
        if ModelCard in (each.type, *get_args(each.type))
    )


def known_part(payload: bytes) -> Lifecycle:
    """`payload`, which is not a lifecycle, without the features of models that are not known here, each of which is
    logged once. Raises NOT_DECODED where that does not make it one."""
    plain = msgspec.msgpack.decode(payload)
    if isinstance(plain, list):
        for place, within in _places():
            report = plain[place] if place < len(plain) else None
            if isinstance(report, list) and within < len(report) and isinstance(report[within], list):
                _leave_out(report[within])
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Lifecycle)


def _leave_out(card: list[Any]) -> None:
    for each in _features():
        if each.place >= len(card):
            return
        try:
            each.decoder.decode(msgspec.msgpack.encode(card[each.place]))
        except NOT_DECODED as error:
            card[each.place] = None
            key = (str(card[0]), each.name)
            if key not in _logged:
                if len(_logged) >= MAX_LOGGED:
                    _logged.clear()
                _logged.add(key)
                log.warning(
                    "a model's feature is not known to this release",
                    extra={"model": key[0], "feature": each.name, "error": str(error)},
                )
