"""How patient the gateway is, in one place."""

from __future__ import annotations

from msgspec import Struct


class Policy(Struct, frozen=True, kw_only=True):
    """Seconds are counted on the bus's liveness clock, so that a bus that is away wears nobody's patience."""

    silence_s: float = 2.0
    """A placed request that nothing is heard of for so long is asked after."""
    confirm_s: float = 0.3
    """A suspicious answer is checked again after this: the last tokens may still be on their way. Doubled with each
    attempt in a row that brought no token: what is slow just now shall not be tried to death."""
    unanswered_probes: int = 3
    """Probes in a row that an engine may leave unanswered."""
    placement_s: float = 5.0
    """First limit for tokenizer and coordinator to say where a request went; doubled with each try."""
    queue_s: float = 120.0
    """How long a request may be without an engine, in one stretch."""
    request_s: float = 3600.0
    """How long a request may take in all."""
    attempts: int = 6
    """Placed attempts in a row that may end without a single new token. A bus that was away can cost one request three:
    its detokenizer comes back after its engine, then a step turns out to be lost, then a placement."""
    attempts_in_all: int = 10
    """Placed attempts: what bounds a request that kills every engine that computes it."""
    pause_s: float = 0.25
    """Before a further try, where trying at once has just not helped; doubled with each."""
    pause_limit_s: float = 1.0
    departed_limit: int = 4096
    """Requests of clients that left, remembered so that late messages about them are answered by a cancel."""
    recancel_s: float = 1.0
    """A cancel is repeated after this when tokens of a departed request keep coming."""
    avoid_limit: int = 4
    """Failed engines that a request keeps clear of."""
