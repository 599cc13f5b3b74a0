"""Which attempts of which requests are over, so that a message that comes late starts nothing."""

from __future__ import annotations

from collections import OrderedDict

from shared.ids import Attempt, RequestId

REMEMBERED = 8192
"""Requests; those fenced longest ago go first. A message is late by seconds, not by thousands of requests."""


class Fence:
    """Owns the highest attempt of each request that has ended or was cancelled here."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._ended: OrderedDict[RequestId, Attempt] = OrderedDict()

    def close(self, request: RequestId, attempt: Attempt) -> None:
        """Attempts up to this one are over."""
        self._ended[request] = max(attempt, self._ended.pop(request, attempt))
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)

    def bars(self, request: RequestId, attempt: Attempt) -> bool:
        ended = self._ended.get(request)
        return ended is not None and attempt <= ended
