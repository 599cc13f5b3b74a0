"""The metrics of a tokenizer, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.telemetry.metrics import service_registry

METRICS = service_registry("tokenizer")
PROMPTS = Counter("baton_tokenizer_prompts_total", "Prompts tokenized, by kind.", ["kind"], registry=METRICS)
TOKENS = Counter("baton_tokenizer_tokens_total", "Prompt tokens.", registry=METRICS)
REJECTIONS = Counter("baton_tokenizer_rejections_total", "Requests rejected, by field.", ["field"], registry=METRICS)
UNROUTED = Counter("baton_tokenizer_unrouted_total", "Requests for which there was no coordinator.", registry=METRICS)
WITHDRAWN = Counter(
    "baton_tokenizer_withdrawn_total", "Requests given up before their prompts were tokenized.", registry=METRICS
)
IN_FLIGHT = Gauge("baton_tokenizer_in_flight", "Long prompts that are being tokenized.", registry=METRICS)
SECONDS = Histogram(
    "baton_tokenizer_seconds",
    "Seconds from a request's arrival to its tokens.",
    buckets=(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 10),
    registry=METRICS,
)
