"""The metrics of a scheduler, and how they are updated from its engine."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.scheduler.core.counters import EngineCounters, EngineSnapshot
from shared.messages.lifecycle import STEP_TOKEN_BOUNDS
from shared.telemetry.metrics import LATENCY_BUCKETS, ForeignName, ForeignNames, PublishedTotals, service_registry

METRICS = service_registry("scheduler")
WAITING = Gauge("baton_scheduler_waiting_requests", "Waiting requests, including preempted ones.", registry=METRICS)
RUNNING = Gauge("baton_scheduler_running_requests", "Running requests.", registry=METRICS)
BLOCKS = Gauge("baton_scheduler_kv_blocks", "Blocks of KV memory by state.", ["state"], registry=METRICS)
STEPS = Counter("baton_scheduler_steps_total", "Steps finished.", registry=METRICS)
BATCH_TOKENS = Histogram(
    "baton_scheduler_step_tokens",
    "Tokens computed by a step.",
    buckets=STEP_TOKEN_BOUNDS,
    registry=METRICS,
)
OUTPUT_TOKENS = Counter("baton_scheduler_output_tokens_total", "Tokens sent to detokenizers.", registry=METRICS)
PROMPT_TOKENS = Counter(
    "baton_scheduler_prompt_tokens_total",
    "Prompt tokens by source: computed, or a cache.",
    ["source"],
    registry=METRICS,
)
PREDICTED_CACHED = Counter(
    "baton_scheduler_predicted_cached_tokens_total",
    "Prompt tokens predicted to be cached; baton_scheduler_prompt_tokens_total counts those that were.",
    registry=METRICS,
)
KV_EVENTS = Counter(
    "baton_scheduler_kv_events_total", "Messages to coordinators about blocks stored and removed.", registry=METRICS
)
PREEMPTIONS = Counter("baton_scheduler_preemptions_total", "Preemptions of running sequences.", registry=METRICS)
SAVED = Counter("baton_scheduler_kv_blocks_saved_total", "Blocks saved to the node's KV store.", registry=METRICS)
UNSAVED = Counter(
    "baton_scheduler_kv_blocks_unsaved_total",
    "Computed blocks that were not saved because too many were waiting.",
    registry=METRICS,
)
LOADED = Counter("baton_scheduler_kv_blocks_loaded_total", "Blocks loaded from the node's KV store.", registry=METRICS)
LOOKUPS = Counter(
    "baton_scheduler_kv_lookups_total",
    "Requests looked up in the node's KV store, by outcome.",
    ["found"],
    registry=METRICS,
)
RESUMED = Counter(
    "baton_scheduler_resumed_total",
    "Preempted requests that went on beside a KV store, by how they got their blocks.",
    ["how"],
    registry=METRICS,
)
LOADS_DECLINED = Counter(
    "baton_scheduler_kv_loads_declined_total",
    "Requests computed although the store had blocks: that was sooner.",
    registry=METRICS,
)
CONNECTOR_FAILURES = Counter(
    "baton_scheduler_kv_connector_failures_total",
    "Calls of the KV connector that raised, were answered wrongly or not in time, by method.",
    ["call"],
    registry=METRICS,
)
LOADS_OVERLAPPED = Counter(
    "baton_scheduler_kv_loads_overlapped_total",
    "Loads by the KV connector that steps waited for layer by layer.",
    registry=METRICS,
)
LOADS_FAILED = Counter(
    "baton_scheduler_kv_loads_failed_total", "Loads that failed, so that the prompt was computed.", registry=METRICS
)
HAND_OVERS = Counter(
    "baton_scheduler_hand_overs_total",
    "Requests handed over to a decode engine, kept because their blocks could not be saved, or passed on for prefill.",
    ["outcome"],
    registry=METRICS,
)
SHARED = Counter(
    "baton_scheduler_prompts_shared_total",
    "Requests that waited for another request's prefill of the same prompt.",
    registry=METRICS,
)
DRAFTED = Counter(
    "baton_scheduler_draft_tokens_total", "Draft tokens that were verified; of trees, levels.", registry=METRICS
)
ACCEPTED = Counter(
    "baton_scheduler_accepted_draft_tokens_total",
    "Draft tokens that were accepted, by their position in the draft.",
    ["position"],
    registry=METRICS,
)
SPECULATED = Counter(
    "baton_scheduler_speculated_draws_total", "Steps of single sequences that verified drafts.", registry=METRICS
)
SPECULATED_TOKENS = Counter(
    "baton_scheduler_speculated_tokens_total",
    "Tokens of those steps; divided by speculated_draws: the mean accepted length.",
    registry=METRICS,
)
GRAMMAR_WAITS = Counter(
    "baton_scheduler_grammar_waits_total",
    "Requests that waited for their grammar to be compiled.",
    ["outcome"],
    registry=METRICS,
)
GRAMMAR_SECONDS = Counter(
    "baton_scheduler_grammar_wait_seconds_total", "Seconds that requests waited for their grammars.", registry=METRICS
)
COMPILING = Gauge("baton_scheduler_compiling_requests", "Requests that wait for their grammar.", registry=METRICS)
TRANSFERS = Gauge(
    "baton_scheduler_kv_transfers", "Transfers in flight between the ranks and the node's KV store.", registry=METRICS
)
ROWS_BYTES = Gauge(
    "baton_scheduler_rows_bytes", "Bytes of images' rows that are held for the engine's requests.", registry=METRICS
)
ROWS_FETCHED = Counter(
    "baton_scheduler_rows_fetched_bytes_total", "Bytes of images' rows that came by the bus.", registry=METRICS
)
CANARIES = Counter(
    "baton_scheduler_canaries_total", "Canaries, by outcome: right, or with a fault.", ["outcome"], registry=METRICS
)
CANARY_SECONDS = Counter(
    "baton_scheduler_canary_seconds_total", "Seconds from canaries' first steps to their ends.", registry=METRICS
)
UNDEFINED = Counter(
    "baton_scheduler_undefined_total", "Sequences that failed because the model computed NaN.", registry=METRICS
)
SUSPECT = Gauge(
    "baton_scheduler_suspect", "1 while the engine is taken to fail, and is to get no requests.", registry=METRICS
)
EJECTIONS = Counter("baton_scheduler_ejections_total", "How often the engine became a suspect.", registry=METRICS)
REFUSED = Counter(
    "baton_scheduler_refused_requests_total",
    "Requests that were rejected or failed, by kind.",
    ["kind"],
    registry=METRICS,
)
EPOCHS = Counter(
    "baton_scheduler_workers_lost_total",
    "Losses of the workers, after which all requests fail and a new epoch begins.",
    registry=METRICS,
)
DECISION = Histogram(
    "baton_scheduler_decision_seconds",
    "Seconds to process one step's results and plan the next.",
    buckets=(1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2),
    registry=METRICS,
)


KV_USAGE = Gauge(
    "baton_scheduler_kv_usage_ratio", "Share of the KV memory's blocks that running requests hold.", registry=METRICS
)
QUEUE_SECONDS = Histogram(
    "baton_scheduler_queue_seconds",
    "From a request's arrival at the engine to the first step that computes something of it.",
    buckets=LATENCY_BUCKETS,
    registry=METRICS,
)
PREFILL_SECONDS = Histogram(
    "baton_scheduler_prefill_seconds",
    "From that step to the request's first token.",
    buckets=LATENCY_BUCKETS,
    registry=METRICS,
)
DECODE_SECONDS = Histogram(
    "baton_scheduler_decode_seconds",
    "From the first token, or from its load, to the last.",
    buckets=LATENCY_BUCKETS,
    registry=METRICS,
)
INFERENCE_SECONDS = Histogram(
    "baton_scheduler_inference_seconds",
    "From the first step that computes something of a request to its last token.",
    buckets=LATENCY_BUCKETS,
    registry=METRICS,
)

VLLM_NAMES = ForeignNames(
    (
        *(RUNNING, WAITING, KV_USAGE, PREEMPTIONS, BATCH_TOKENS, PROMPT_TOKENS),
        *(SPECULATED, DRAFTED, ACCEPTED, QUEUE_SECONDS, PREFILL_SECONDS, DECODE_SECONDS, INFERENCE_SECONDS),
    ),
    (
        ForeignName("baton_scheduler_running_requests", "vllm:num_requests_running"),
        ForeignName("baton_scheduler_waiting_requests", "vllm:num_requests_waiting"),
        ForeignName("baton_scheduler_kv_usage_ratio", "vllm:kv_cache_usage_perc"),
        ForeignName("baton_scheduler_preemptions", "vllm:num_preemptions"),
        ForeignName("baton_scheduler_step_tokens", "vllm:iteration_tokens_total"),
        ForeignName("baton_scheduler_prompt_tokens", "vllm:prefix_cache_queries", summed=["source"]),
        ForeignName("baton_scheduler_prompt_tokens", "vllm:prefix_cache_hits", where={"source": "cached"}),
        ForeignName("baton_scheduler_speculated_draws", "vllm:spec_decode_num_drafts"),
        ForeignName("baton_scheduler_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
        ForeignName(
            "baton_scheduler_accepted_draft_tokens", "vllm:spec_decode_num_accepted_tokens", summed=["position"]
        ),
        ForeignName("baton_scheduler_queue_seconds", "vllm:request_queue_time_seconds"),
        ForeignName("baton_scheduler_prefill_seconds", "vllm:request_prefill_time_seconds"),
        ForeignName("baton_scheduler_decode_seconds", "vllm:request_decode_time_seconds"),
        ForeignName("baton_scheduler_inference_seconds", "vllm:request_inference_time_seconds"),
    ),
)
"""As vLLM calls what it measures of an engine; with `model_name` and `engine`, once there is one."""
VLLM_NAMES.added = None
METRICS.register(VLLM_NAMES)


def show(snapshot: EngineSnapshot, totals: PublishedTotals) -> None:
    """Sets the gauges, and adds to the counters the growth since the last call."""
    epoch = snapshot.epoch
    WAITING.set(epoch.waiting if epoch else 0)
    RUNNING.set(epoch.running if epoch else 0)
    totals.publish(_totals(snapshot.counters))
    SUSPECT.set(snapshot.health.suspect is not None)
    if epoch is not None:
        TRANSFERS.set(epoch.transfers)
        COMPILING.set(epoch.compiling)
        BLOCKS.labels("used").set(epoch.blocks_total - epoch.blocks_free)
        BLOCKS.labels("cached").set(epoch.blocks_cached)
        KV_USAGE.set(1 - epoch.blocks_free / max(1, epoch.blocks_total))
        BLOCKS.labels("blank").set(epoch.blocks_free - epoch.blocks_cached)
        totals.publish([(PREEMPTIONS, epoch.preemptions)], epoch.epoch)


def _totals(counters: EngineCounters) -> list[tuple[Counter, float]]:
    accepted = [(ACCEPTED.labels(str(place)), count) for place, count in enumerate(counters.accepted, 1) if count]
    return [
        (SAVED, counters.blocks_saved),
        (UNSAVED, counters.blocks_unsaved),
        (LOADED, counters.blocks_loaded),
        (LOOKUPS.labels("no"), counters.misses),
        (LOOKUPS.labels("yes"), counters.hits),
        (LOADS_FAILED, counters.loads_failed),
        (LOADS_DECLINED, counters.loads_declined),
        (LOADS_OVERLAPPED, counters.loads_overlapped),
        (RESUMED.labels("loaded"), counters.swapped_in),
        (RESUMED.labels("computed"), counters.recomputed),
        (HAND_OVERS.labels("handed"), counters.handed_over),
        (HAND_OVERS.labels("passed_on"), counters.passed_on),
        (HAND_OVERS.labels("kept"), counters.kept),
        (SHARED, counters.prompts_shared),
        (CANARIES.labels("right"), counters.canaries - counters.canary_faults),
        (CANARIES.labels("fault"), counters.canary_faults),
        (CANARY_SECONDS, counters.canary_seconds),
        (UNDEFINED, counters.undefined),
        (DRAFTED, counters.drafted),
        (SPECULATED, counters.speculated),
        (SPECULATED_TOKENS, counters.speculated_tokens),
        (GRAMMAR_WAITS.labels("compiled"), counters.grammar_waits),
        (GRAMMAR_WAITS.labels("refused"), counters.grammars_refused),
        (GRAMMAR_SECONDS, counters.grammar_seconds),
        *accepted,
    ]
