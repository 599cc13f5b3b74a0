"""What a scheduler counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.scheduler.core.engine import Engine
from services.scheduler.core.planner import Planner
from shared.messages.detokenizer import TokenBatch

WAITING = Gauge("baton_scheduler_waiting_requests", "Requests that wait for a place, preempted ones included.")
RUNNING = Gauge("baton_scheduler_running_requests", "Requests that are being computed.")
BLOCKS = Gauge("baton_scheduler_kv_blocks", "Blocks of KV memory by state.", ["state"])
STEPS = Counter("baton_scheduler_steps_total", "Steps finished.")
BATCH_TOKENS = Histogram(
    "baton_scheduler_step_tokens",
    "Tokens computed by a step.",
    buckets=(1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
)
OUTPUT_TOKENS = Counter("baton_scheduler_output_tokens_total", "Tokens sent to detokenizers.")
PROMPT_TOKENS = Counter("baton_scheduler_prompt_tokens_total", "Prompt tokens by where they came from.", ["source"])
PREDICTED_CACHED = Counter(
    "baton_scheduler_predicted_cached_tokens_total",
    "Prompt tokens that the coordinators expected to be cached; see baton_scheduler_prompt_tokens_total for what was.",
)
KV_EVENTS = Counter("baton_scheduler_kv_events_total", "Messages to coordinators about blocks stored and removed.")
PREEMPTIONS = Counter("baton_scheduler_preemptions_total", "Sequences that lost their blocks to others.")
REFUSED = Counter("baton_scheduler_refused_requests_total", "Final words to gateways, by kind.", ["kind"])
EPOCHS = Counter("baton_scheduler_workers_lost_total", "Times that everything had to begin anew.")
DECISION = Histogram(
    "baton_scheduler_decision_seconds",
    "Time to take one step's results in and to plan the next.",
    buckets=(1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2),
)


def note_batch(batch: TokenBatch) -> None:
    """Counts what a message to a detokenizer holds."""
    for opened in batch.opened:
        PROMPT_TOKENS.labels("cached").inc(opened.cached_tokens)
        PROMPT_TOKENS.labels("computed").inc(opened.prompt_tokens - opened.cached_tokens)
    if batch.entries:
        OUTPUT_TOKENS.inc(sum(len(entry.tokens) for entry in batch.entries))


class EngineGauges:
    """Owns what was shown of an engine last, so that its running totals become counters."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._preemptions = 0

    def show(self, engine: Engine) -> None:
        report = engine.report()
        WAITING.set(report.waiting if report else 0)
        RUNNING.set(report.running if report else 0)
        if report is None or engine.serving is None:
            return
        cached = len(engine.serving.planner.memory.pool.cached)
        BLOCKS.labels("used").set(report.blocks_total - report.blocks_free)
        BLOCKS.labels("cached").set(cached)
        BLOCKS.labels("blank").set(report.blocks_free - cached)
        if engine.serving.planner is not self._planner:
            self._planner, self._preemptions = engine.serving.planner, 0
        PREEMPTIONS.inc(self._planner.preemptions - self._preemptions)
        self._preemptions = self._planner.preemptions
