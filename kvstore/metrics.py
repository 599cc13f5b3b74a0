"""Metrics of a store: of its arenas, and of its lower tiers: `ssd`, `redis`, and `peer` for other nodes' stores."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.messages.lifecycle import StoreReport
from shared.telemetry.metrics import service_registry

METRICS = service_registry("kvstore")
HITS = Counter("baton_kvstore_hits_total", "Requested blocks that were found, by tier.", ["tier"], registry=METRICS)
MISSES = Counter("baton_kvstore_misses_total", "Requested blocks that no tier had.", registry=METRICS)
STORED = Counter(
    "baton_kvstore_stored_total", "Blocks committed, by where they came from.", ["source"], registry=METRICS
)
UNWRITTEN = Counter(
    "baton_kvstore_unwritten_total", "Blocks not committed because a rank had not written its heads.", registry=METRICS
)
REFUSED = Counter("baton_kvstore_refused_total", "Blocks not stored because there was no room.", registry=METRICS)
EVICTIONS = Counter(
    "baton_kvstore_evictions_total", "Evicted blocks, by whether a lower tier kept them.", ["kept"], registry=METRICS
)
EVICTED_AGE = Histogram(
    "baton_kvstore_evicted_age_seconds",
    "Seconds since the last use of evicted blocks.",
    buckets=(1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600),
    registry=METRICS,
)
SPOILED = Counter("baton_kvstore_spoiled_total", "Recovered blocks with a wrong checksum.", registry=METRICS)
ABANDONED = Counter(
    "baton_kvstore_abandoned_total", "Reserved slots whose owner died or whose lease expired.", registry=METRICS
)
SLOTS = Gauge("baton_kvstore_slots", "Slots of all arenas, by state.", ["state"], registry=METRICS)
COPY_WAITS = Counter(
    "baton_kvstore_copy_wait_seconds_total",
    "Seconds that the store's copies waited for their share of kv-bandwidth.",
    registry=METRICS,
)
BYTES = Gauge("baton_kvstore_bytes", "Bytes of shared memory, in use and allowed.", ["what"], registry=METRICS)
PINS = Gauge("baton_kvstore_pinned_blocks", "Pinned blocks.", registry=METRICS)
LEASES = Gauge("baton_kvstore_leases", "Open leases.", registry=METRICS)
UNCHECKED = Gauge(
    "baton_kvstore_unchecked_blocks", "Recovered blocks whose checksums are not verified yet.", registry=METRICS
)
SECONDS = Histogram(
    "baton_kvstore_question_seconds",
    "Seconds to answer a request from the arena, by kind of request.",
    ["question"],
    buckets=(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1),
    registry=METRICS,
)


def set_gauges(report: StoreReport, *, leases: int, memory: int) -> None:
    """Sets the gauges from a report, the number of leases, and the bytes that are taken from the system."""
    SLOTS.labels("committed").set(report.committed)
    SLOTS.labels("reserved").set(report.reserved)
    SLOTS.labels("free").set(report.slots - report.committed - report.reserved)
    BYTES.labels("blocks").set(report.bytes_used)
    BYTES.labels("taken").set(memory)
    BYTES.labels("allowed").set(report.bytes_total)
    PINS.set(report.pinned)
    LEASES.set(leases)


TIER_HITS = Counter(
    "baton_kvstore_tier_hits_total", "Blocks that a lower tier returned in time.", ["tier"], registry=METRICS
)
TIER_MISSES = Counter(
    "baton_kvstore_tier_misses_total", "Blocks that a lower tier did not return in time.", ["tier"], registry=METRICS
)
PREFETCHED = Counter(
    "baton_kvstore_prefetched_total",
    "Blocks that came from another node while their prompts were computed there.",
    registry=METRICS,
)
TIER_BYTES_IN = Counter(
    "baton_kvstore_tier_bytes_in_total", "Bytes read from a lower tier.", ["tier"], registry=METRICS
)
TIER_BYTES_OUT = Counter(
    "baton_kvstore_tier_bytes_out_total", "Bytes written to a lower tier.", ["tier"], registry=METRICS
)
TIER_STORED = Counter("baton_kvstore_tier_stored_total", "Blocks written to a lower tier.", ["tier"], registry=METRICS)
TIER_DROPPED = Counter(
    "baton_kvstore_tier_dropped_total",
    "Blocks not written to a lower tier, by reason.",
    ["tier", "why"],
    registry=METRICS,
)
TRANSFER_BYTES = Counter(
    "baton_kvstore_transfer_bytes_total",
    "Bytes of blocks that went to and came from stores of other nodes, by transport.",
    ["transport", "direction"],
    registry=METRICS,
)
TIER_FAILED = Counter(
    "baton_kvstore_tier_failures_total",
    "Lookups in a lower tier that failed or were late, by reason.",
    ["tier", "why"],
    registry=METRICS,
)
TIER_SPOILED = Counter(
    "baton_kvstore_tier_spoiled_total", "Blocks from a lower tier with wrong checksums.", ["tier"], registry=METRICS
)
TIER_IN_FLIGHT = Gauge(
    "baton_kvstore_tier_bytes_in_flight", "Bytes on their way to a lower tier.", ["tier"], registry=METRICS
)
TIER_PRESENT = Gauge("baton_kvstore_tier_present", "1 while the lower tier replies.", ["tier"], registry=METRICS)
TIER_SECONDS = Histogram(
    "baton_kvstore_tier_seconds",
    "Seconds of one lookup in a lower tier, to its last block.",
    ["tier"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
    registry=METRICS,
)
TIER_BYTES = Gauge(
    "baton_kvstore_tier_bytes", "Bytes of a lower tier, used and allowed.", ["tier", "what"], registry=METRICS
)
TIER_BLOCKS = Gauge("baton_kvstore_tier_blocks", "Blocks in a lower tier.", ["tier"], registry=METRICS)
TIER_EVICTED = Counter(
    "baton_kvstore_tier_evictions_total", "Blocks that a lower tier evicted.", ["tier"], registry=METRICS
)
TIER_DIRECT = Gauge(
    "baton_kvstore_tier_direct", "1 if the tier's file system takes O_DIRECT.", ["tier"], registry=METRICS
)
TIER_IO_SECONDS = Histogram(
    "baton_kvstore_tier_io_seconds",
    "Seconds of one access to a lower tier's disk: a batch that is written, a group of blocks that is read.",
    ["tier", "kind"],
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
    registry=METRICS,
)
