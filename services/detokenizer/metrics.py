"""What a detokenizer counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.detokenizer.core.tally import Tally

STREAMS = Gauge("baton_detokenizer_streams", "Requests whose text is being made.")
TOKENS = Counter("baton_detokenizer_tokens_total", "Tokens turned into text.")
STOPPED = Counter("baton_detokenizer_stopped_total", "Requests ended by a stop string.")
UNKNOWN = Counter("baton_detokenizer_unknown_total", "Streams and tokens of attempts that are not open here.")
STALE = Counter("baton_detokenizer_stale_batches_total", "Batches of an engine's former epoch.")
GAPS = Counter("baton_detokenizer_gaps_total", "Times that batches of an engine were missed.")
FAILED = Counter("baton_detokenizer_failed_total", "Requests given up before their end.")
SECONDS = Histogram(
    "baton_detokenizer_batch_seconds",
    "Time for one batch of tokens, from its arrival to the last message sent.",
    buckets=(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1),
)


class Published:
    """Owns what of a tally has been published."""

    def __init__(self) -> None:
        self._so_far = Tally()

    def update(self, tally: Tally) -> None:
        before = self._so_far
        for counter, now, then in (
            (TOKENS, tally.tokens, before.tokens),
            (STOPPED, tally.stopped, before.stopped),
            (UNKNOWN, tally.unknown, before.unknown),
            (STALE, tally.stale, before.stale),
            (GAPS, tally.gaps, before.gaps),
            (FAILED, tally.failed, before.failed),
        ):
            if now != then:
                counter.inc(now - then)
        self._so_far = Tally(tally.tokens, tally.stopped, tally.unknown, tally.stale, tally.gaps, tally.failed)
