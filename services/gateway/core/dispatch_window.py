"""How much of large prompts is on its way to tokenizers at a time. Pure.

Each attempt sends a request's whole prompt. What a gateway publishes goes through one connection, heartbeats too, and a
server slows a sender down whose receivers do not keep up: a flood of large prompts would make it look dead. ADR 234.
"""

from __future__ import annotations

from services.gateway.core.open_request import OpenRequest

WINDOW_BYTES = 16 * 2**20
"""A tokenizer takes seconds for it; half of what a connection keeps for a server that is slow."""


class DispatchWindow:
    """Owns which large requests are open. Those that are dispatched have `limit` bytes of prompts together, or are one;
    others wait, in the order in which they came."""

    def __init__(self, limit: int = WINDOW_BYTES) -> None:
        self._limit = limit
        self._large: list[OpenRequest] = []
        self._full = False
        """Whether one has found no room since `look_again`: whatever comes next would overtake it."""

    def look_again(self) -> None:
        """Before all that wait are looked at, in their order. Forgets requests that have ended."""
        self._full = False
        self._large = [each for each in self._large if each.state != "ended"]

    def refuses(self, request: OpenRequest) -> bool:
        """Whether a request that is to be dispatched has to wait."""
        if not request.is_large:
            return False
        self._large = [each for each in self._large if each is not request and each.state != "ended"]
        under_way = sum(each.prompt_bytes for each in self._large if each.state == "dispatched")
        self._large.append(request)
        self._full = self._full or (under_way > 0 and under_way + request.prompt_bytes > self._limit)
        return self._full
