"""By which rules requests are placed: what an operator may set, within bounds that the configuration checks."""

from __future__ import annotations

from typing import Literal, NamedTuple

Policy = Literal["kv", "least-loaded", "round-robin", "random"]
"""kv: the least work, cached blocks counted. least-loaded: the fewest requests, waiting ones four times."""


class Routing(NamedTuple):
    policy: Policy = "kv"
    temperature: float = 0.0
    """0: always the least cost, equals in turn. Above: by chance, the likelier the lower the cost; 1 is a factor of e
    between the least and the greatest."""
    store_discount: float = 0.75
    """What a block in the KV store of an engine's node is worth, a block on its device being worth 1. A block in
    another node's store is worth this squared: it goes through both."""
    saturation: float = 2.0
    """An engine with more than this many times the mean of requests in hand (and a few more) does not win by what it
    has cached, and neither does one without a free running slot."""
    disaggregate_tokens: int = 2048
    disaggregate_share: float = 0.7
    """A prompt is computed where it is decoded if less than `disaggregate_tokens` of it, and less than this share of
    it, is left to compute."""
    disaggregate_least: int = 256
    """And if less than this is left, whatever its share: so little holds up no step of a decode engine, while it would
    wait behind long prompts at a prefill engine (ADR 7)."""
    disaggregate_busy: int = 16_384
    """And if each prefill engine has more than this many tokens to compute already, on average."""
    index_blocks: int = 2_000_000
    """Blocks that the prefix map holds; see there."""
