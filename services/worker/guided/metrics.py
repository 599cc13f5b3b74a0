"""What guided decoding counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.telemetry.metrics import service_registry

METRICS = service_registry("worker")
COMPILED = Counter("baton_worker_grammars_total", "Grammars compiled, by outcome.", ["outcome"], registry=METRICS)
COMPILE_SECONDS = Histogram(
    "baton_worker_grammar_compile_seconds",
    "Seconds to compile a grammar.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
    registry=METRICS,
)
MASK_SECONDS = Counter(
    "baton_worker_grammar_mask_seconds_total", "Seconds spent on filling grammars' token masks.", registry=METRICS
)
MASKS = Counter(
    "baton_worker_grammar_masks_total", "Token masks filled, one for each sequence and token.", registry=METRICS
)
DEAD_ENDS = Counter(
    "baton_worker_grammar_dead_ends_total",
    "Sequences ended because no token could continue their grammar.",
    registry=METRICS,
)
BROKEN = Counter(
    "baton_worker_grammar_broken_total", "Sequences with a token that their grammar forbids: a bug.", registry=METRICS
)
PROCESSES = Gauge(
    "baton_worker_grammar_processes", "Grammars that are held compiled, each in a process of its own.", registry=METRICS
)
FAILED = Counter(
    "baton_worker_grammar_failures_total",
    "Sequences whose grammar was followed no longer, by what became of it.",
    ["fault"],
    registry=METRICS,
)
