"""How long messages take on their way, in seconds of virtual time: constants, where a real stack has distributions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(gt=0, le=10)]


class HopDelays(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each way between two services, with what the services between them take. Above 0: what happens at one moment
    anywhere is not known elsewhere at that moment, which is what lets engines be simulated side by side."""

    request: Seconds = 0.002
    """Client → gateway → tokenizer → coordinator."""
    place: Seconds = 0.0005
    """Coordinator → scheduler."""
    plan: Seconds = 0.0003
    """Scheduler → worker, until the step can be launched."""
    result: Seconds = 0.0003
    """Worker → scheduler."""
    tokens: Seconds = 0.001
    """Scheduler → detokenizer → gateway → client."""
    store: Seconds = 0.0002
    """Scheduler → KV store, and back."""
    report: Seconds = 0.0005
    """Scheduler → coordinator: lifecycles and block events."""

    @property
    def soonest_news(self) -> float:
        """No message of an engine is heard sooner than this after it was sent."""
        return min(self.tokens, self.report)


def parse_hops(text: str) -> HopDelays:
    """`request=2,place=0.5`, in milliseconds; what is not named keeps its default. Raises ValueError."""
    names = HopDelays.__struct_fields__
    values = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names:
            raise ValueError(f"{name!r} is no hop; known are {', '.join(names)}")
        try:
            values[name] = float(value) / 1000
        except ValueError:
            raise ValueError(f"{name} = {value!r}: milliseconds are expected") from None
    try:
        return msgspec.convert(values, HopDelays)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} (in seconds)") from None
