"""What is counted of the tiers below the arena: `redis`, and `peer` for the stores of other nodes."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

HITS = Counter("baton_kvstore_tier_hits_total", "Blocks that a lower tier had in time.", ["tier"])
MISSES = Counter("baton_kvstore_tier_misses_total", "Blocks asked of a lower tier that did not come in time.", ["tier"])
BYTES_IN = Counter("baton_kvstore_tier_bytes_in_total", "Payload that came from a lower tier.", ["tier"])
BYTES_OUT = Counter("baton_kvstore_tier_bytes_out_total", "Payload that went to a lower tier.", ["tier"])
STORED = Counter("baton_kvstore_tier_stored_total", "Blocks that went to a lower tier.", ["tier"])
DROPPED = Counter(
    "baton_kvstore_tier_dropped_total", "Blocks that did not go to a lower tier, by why.", ["tier", "why"]
)
FAILED = Counter(
    "baton_kvstore_tier_failures_total", "Searches of a lower tier that failed or were late.", ["tier", "why"]
)
SPOILED = Counter("baton_kvstore_tier_spoiled_total", "Blocks of a lower tier whose checksums were wrong.", ["tier"])
IN_FLIGHT = Gauge("baton_kvstore_tier_bytes_in_flight", "Payload on its way to a lower tier.", ["tier"])
PRESENT = Gauge("baton_kvstore_tier_present", "1 while the lower tier answers.", ["tier"])
SECONDS = Histogram(
    "baton_kvstore_tier_seconds",
    "Time of one search of a lower tier, to its last block.",
    ["tier"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
