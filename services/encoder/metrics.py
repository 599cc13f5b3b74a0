"""The metrics of an encoder, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.telemetry.metrics import service_registry

METRICS = service_registry("encoder")
IMAGES = Counter(
    "baton_encoder_images_total", "Images that were asked for, by what came of it.", ["outcome"], registry=METRICS
)
"""encoded; cached: its rows were there, or on their way; refused."""
PENDING = Gauge("baton_encoder_pending", "Images that are being encoded, or wait for it.", registry=METRICS)
CACHE_BYTES = Gauge("baton_encoder_cache_bytes", "Bytes of rows that are kept.", registry=METRICS)
DECODERS = Counter(
    "baton_encoder_decoders_ended_total", "Processes that decode images and ended before their time.", registry=METRICS
)
SECONDS = Histogram(
    "baton_encoder_seconds",
    "Seconds from a request's arrival to the rows of an image that were not there.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=METRICS,
)
