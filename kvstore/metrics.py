"""What a store counts of its arenas. What lies below them is counted in `kvstore/tier_metrics.py`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.messages.lifecycle import StoreReport

HITS = Counter("baton_kvstore_hits_total", "Blocks found, by where they lay.", ["tier"])
MISSES = Counter("baton_kvstore_misses_total", "Blocks asked for and not found in any tier.")
STORED = Counter("baton_kvstore_stored_total", "Blocks committed, by where they came from.", ["source"])
UNWRITTEN = Counter("baton_kvstore_unwritten_total", "Blocks not committed because a head of theirs was missing.")
REFUSED = Counter("baton_kvstore_refused_total", "Blocks that were to be stored and found no room.")
EVICTIONS = Counter("baton_kvstore_evictions_total", "Blocks that made room, by whether a tier took them.", ["kept"])
EVICTED_AGE = Histogram(
    "baton_kvstore_evicted_age_seconds",
    "How long evicted blocks had not been used.",
    buckets=(1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600),
)
SPOILED = Counter("baton_kvstore_spoiled_total", "Blocks found at the start whose checksums did not match.")
ABANDONED = Counter("baton_kvstore_abandoned_total", "Reserved slots whose owner died or let the lease run out.")
SLOTS = Gauge("baton_kvstore_slots", "Slots of all arenas, by state.", ["state"])
BYTES = Gauge("baton_kvstore_bytes", "Memory of blocks, taken from the system, and allowed.", ["what"])
PINS = Gauge("baton_kvstore_pinned_blocks", "Blocks that somebody reads.")
LEASES = Gauge("baton_kvstore_leases", "Leases that have not ended.")
UNCHECKED = Gauge("baton_kvstore_unchecked_blocks", "Blocks found at the start and not compared with their checksums.")
SECONDS = Histogram(
    "baton_kvstore_question_seconds",
    "Time to answer from the arena, by question.",
    ["question"],
    buckets=(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1),
)


def note(report: StoreReport, *, leases: int, memory: int) -> None:
    """Sets the gauges."""
    SLOTS.labels("committed").set(report.committed)
    SLOTS.labels("reserved").set(report.reserved)
    SLOTS.labels("free").set(report.slots - report.committed - report.reserved)
    BYTES.labels("blocks").set(report.bytes_used)
    BYTES.labels("taken").set(memory)
    BYTES.labels("allowed").set(report.bytes_total)
    PINS.set(report.pinned)
    LEASES.set(leases)
