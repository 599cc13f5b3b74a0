"""What an operator may set of a coordinator: its bounds, and the rules by which it places requests."""

from __future__ import annotations

from typing import Literal, NamedTuple

Policy = Literal["kv", "least-loaded", "round-robin", "random"]
"""kv: the least work, cached blocks counted. least-loaded: the fewest requests, waiting ones four times."""


class CoordinatorLimits(NamedTuple):
    """Every bound that a coordinator keeps; what happens at a bound is said at the field."""

    queue: int = 1024
    """Requests that wait here; the next one is rejected as `overloaded`."""
    queue_seconds: float = 60.0
    """How long a request may wait here before it is rejected."""
    expect_seconds: float = 15.0
    """How long after the last heartbeat of a model's engines one is still expected back."""
    engine_fill: float | None = None
    """An engine takes no more once it holds this many times `max_running` requests; None: until `max_waiting` is
    reached. Low values bind requests later, so that they go where work ends first; but the end of work shows only
    in the next report, half a second late."""
    settle_seconds: float = 0.1
    """A placement younger than this, when an engine's report comes in, may not be counted in it yet."""
    hand_over_seconds: float = 1.0
    """How long a request is assumed to stay on its prefill engine before its decode engine reports it."""
    renew_seconds: float = 1.0
    """Seconds between two messages to a gateway that its request still waits here; silence means a lost coordinator."""
    remembered: int = 65_536
    """Requests whose newest attempt is remembered; the oldest are forgotten first."""


class RouterSettings(NamedTuple):
    """How the router weighs engines, and when it disaggregates: has one engine prefill and another one decode."""

    policy: Policy = "kv"
    temperature: float = 0.0
    """0: always the least cost, with rotation among equals. Above: by chance, the likelier the lower the cost; 1 is a
    factor of e between the least and the greatest."""
    store_discount: float = 0.75
    """What a block in the KV store of an engine's node is worth, a block on its device being worth 1. A block in
    another node's store is worth this squared: it goes through both."""
    saturation: float = 2.0
    """An engine that holds more than this many times the mean number of requests (and a few more) does not win by
    what it has cached, and neither does one whose running batch is full."""
    disaggregate_tokens: int = 2048
    disaggregate_share: float = 0.7
    """A prompt is computed where it is decoded if fewer than `disaggregate_tokens` of its tokens, and less than this
    share of it, are left to compute."""
    disaggregate_least: int = 256
    """And if fewer tokens than this are left, whatever their share: so few hold up no step of a decode engine, while
    they would wait behind long prompts at a prefill engine (ADR 7)."""
    disaggregate_busy: int = 16_384
    """And if the prefill engines have more than this many tokens to compute already, on average."""
    index_blocks: int = 2_000_000
    """Blocks that the prefix map holds; see `PrefixMap`."""
