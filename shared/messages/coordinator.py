"""What a coordinator hears, beside lifecycle and the JSON of its admin endpoints."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Attempt, RequestId
from shared.messages.generation import Generation


class Route(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → one coordinator: find an engine for this."""

    generation: Generation


class Withdraw(Struct, frozen=True, array_like=True, tag=True):
    """gateway → every coordinator: the client went away; drop the request if it still queues with you."""

    request: RequestId
    attempt: Attempt
