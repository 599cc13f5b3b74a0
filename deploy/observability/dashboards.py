"""The dashboards of Baton: an overview, engines, KV tiers, bus and hops.

    python -m deploy.observability.dashboards      # writes deploy/observability/grafana/dashboards/*.json

All read a Prometheus whose rules are those of this folder.
"""

from __future__ import annotations

from pathlib import Path

from deploy.observability.grafana_json import Dashboard, Panel, mean, quantiles, rate, summed, text

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
MODEL = 'model=~"$model"'
INSTANCE = 'instance=~"$instance"'
WAITED = f'part="wait", {INSTANCE}'
WHOLE = f'part!="answer", {INSTANCE}'
CACHED = 'source="cached"'
TIMED_HOPS = (
    ("baton_tokenizer_seconds", "tokenizer"),
    ("baton_coordinator_queue_seconds", "coordinator: balancing delay"),
    ("baton_scheduler_queue_seconds", "scheduler: queue"),
    ("baton_scheduler_prefill_seconds", "prefill"),
    ("baton_detokenizer_batch_seconds", "detokenizer, of a batch"),
)
"""Histograms of the hops of a request, and what a panel calls them."""


def hop_times(share: float) -> list[tuple[str, str]]:
    """The time below which that share of each hop takes."""
    return [
        (f"histogram_quantile({share}, sum by (le) ({rate(f'{metric}_bucket')}))", legend)
        for metric, legend in TIMED_HOPS
    ]


OVERVIEW = Dashboard(
    "baton-overview",
    "Baton: overview",
    "What users experience, whether the promises to them hold, and who serves.",
    (
        Panel(
            "Alerts that fire",
            "short",
            [('ALERTS{alertname=~"Baton.*", alertstate="firing"}', "")],
            "docs/observability.md says what each means.",
            kind="table",
            width=12,
        ),
        Panel(
            "Engines ready, ejected",
            "short",
            [
                ('sum(baton_phase{service="scheduler", phase="ready"})', "ready"),
                ("max(baton_coordinator_ejected_engines)", "ejected"),
            ],
            kind="stat",
            width=6,
        ),
        Panel(
            "Processes that do not answer",
            "short",
            [('count(up{job="baton"} == 0) or vector(0)', "down")],
            kind="stat",
            width=6,
        ),
        Panel(
            "Budget of objectives, by how fast it burns",
            "short",
            [
                (
                    f"baton:slo_errors:ratio_rate1h{{{MODEL}}} / on (slo) group_left () baton:slo_budget",
                    "{{model}} {{slo}}",
                )
            ],
            "1: it lasts for exactly the month. 14.4 for an hour pages.",
        ),
        Panel(
            "Requests by outcome",
            "reqps",
            [(summed(rate("baton_gateway_requests_total", MODEL), "outcome"), "{{outcome}}")],
        ),
        Panel(
            "Error responses",
            "reqps",
            [(summed(rate("baton_gateway_errors_total"), "status"), "{{status}}")],
        ),
        Panel("Time to first token", "s", quantiles("baton_gateway_time_to_first_token_seconds", MODEL)),
        Panel("Time between tokens", "s", quantiles("baton_gateway_inter_token_latency_seconds", MODEL)),
        Panel("Time of a whole request", "s", quantiles("baton_gateway_e2e_request_latency_seconds", MODEL)),
        Panel(
            "Tokens",
            "short",
            [
                (summed(rate("baton_gateway_generation_tokens_total", MODEL), "model"), "{{model}} out"),
                (summed(rate("baton_gateway_prompt_tokens_total", MODEL), "model"), "{{model}} in"),
                (summed(rate("baton_gateway_cached_tokens_total", MODEL), "model"), "{{model}} in, cached"),
            ],
            "Per second.",
        ),
        Panel(
            "Open requests",
            "short",
            [
                ("sum by (state) (baton_gateway_open_requests)", "{{state}}"),
                ("sum(baton_coordinator_waiting_requests)", "wait for an engine"),
                ("sum(baton_scheduler_waiting_requests)", "wait at an engine"),
                ("sum(baton_scheduler_running_requests)", "running"),
            ],
        ),
        Panel(
            "Attempts after the first",
            "short",
            [
                (f"sum({rate('baton_gateway_retries_total')})", "retries"),
                (f"sum({rate('baton_gateway_disconnects_total')})", "clients that left"),
            ],
            "Per second. Requests are tried again when a process dies.",
        ),
        Panel("Tokens of prompts", "short", quantiles("baton_gateway_request_prompt_tokens", MODEL)),
        Panel("Tokens of answers", "short", quantiles("baton_gateway_request_generation_tokens", MODEL)),
        Panel(
            "Why answers ended",
            "short",
            [(summed(rate("baton_gateway_choices_finished_total", MODEL), "reason"), "{{reason}}")],
            "Per second.",
        ),
    ),
)

ENGINES = Dashboard(
    "baton-engines",
    "Baton: engines",
    "Batches, queues, KV memory and the time of steps, by engine and rank.",
    (
        Panel(
            "Steps",
            "short",
            [(rate("baton_scheduler_steps_total", INSTANCE), "{{instance}}")],
            "Per second.",
        ),
        Panel(
            "Tokens sent",
            "short",
            [(rate("baton_scheduler_output_tokens_total", INSTANCE), "{{instance}}")],
            "Per second.",
        ),
        Panel("Tokens of a step", "short", [(mean("baton_scheduler_step_tokens", INSTANCE), "{{instance}} mean")]),
        Panel("Running", "short", [(f"baton_scheduler_running_requests{{{INSTANCE}}}", "{{instance}}")]),
        Panel("Waiting", "short", [(f"baton_scheduler_waiting_requests{{{INSTANCE}}}", "{{instance}}")]),
        Panel(
            "KV memory that requests hold",
            "percentunit",
            [(f"baton_scheduler_kv_usage_ratio{{{INSTANCE}}}", "{{instance}}")],
        ),
        Panel(
            "KV blocks",
            "short",
            [(f"sum by (state) (baton_scheduler_kv_blocks{{{INSTANCE}}})", "{{state}}")],
        ),
        Panel(
            "Preemptions",
            "short",
            [(rate("baton_scheduler_preemptions_total", INSTANCE), "{{instance}}")],
            "Per second: running sequences that gave their memory to others.",
        ),
        Panel(
            "Prompt tokens",
            "short",
            [(summed(rate("baton_scheduler_prompt_tokens_total", INSTANCE), "source"), "{{source}}")],
            "Per second.",
        ),
        Panel("Queue of engines", "s", quantiles("baton_scheduler_queue_seconds", INSTANCE)),
        Panel("Prefill", "s", quantiles("baton_scheduler_prefill_seconds", INSTANCE)),
        Panel("Decode", "s", quantiles("baton_scheduler_decode_seconds", INSTANCE)),
        Panel(
            "Parts of a step",
            "s",
            [(mean("baton_worker_step_seconds", INSTANCE, "part"), "{{part}}")],
            "Means over all ranks; wait is idle time between steps, answer overlaps the next step.",
        ),
        Panel(
            "Idle share of ranks",
            "percentunit",
            [
                (
                    f"sum by (instance) ({rate('baton_worker_step_seconds_sum', WAITED)})"
                    f" / sum by (instance) ({rate('baton_worker_step_seconds_sum', WHOLE)})",
                    "{{instance}}",
                )
            ],
        ),
        Panel("Planning a step", "s", quantiles("baton_scheduler_decision_seconds", INSTANCE)),
        Panel(
            "Draft tokens",
            "short",
            [
                (summed(rate("baton_scheduler_draft_tokens_total", INSTANCE), "instance"), "{{instance}} verified"),
                (
                    summed(rate("baton_scheduler_accepted_draft_tokens_total", INSTANCE), "instance"),
                    "{{instance}} accepted",
                ),
            ],
            "Per second, with --speculative.",
        ),
        Panel(
            "Canaries",
            "short",
            [
                (
                    summed(rate("baton_scheduler_canaries_total", INSTANCE), "instance, outcome"),
                    "{{instance}} {{outcome}}",
                ),
                (f"baton_scheduler_suspect{{{INSTANCE}}}", "{{instance}} suspect"),
            ],
        ),
        Panel(
            "Utilization of devices",
            "percentunit",
            [(mean("baton_worker_step_mfu", INSTANCE), "{{instance}}")],
            "Model FLOPs utilization, where the device's peak is known.",
        ),
    ),
)

KV_TIERS = Dashboard(
    "baton-kv",
    "Baton: KV tiers",
    "Where blocks of prompts come from: device, the node's store, its lower tiers.",
    (
        Panel(
            "Where prompts' blocks are expected",
            "short",
            [(summed(rate("baton_router_prompt_blocks_total"), "where"), "{{where}}")],
            "Blocks per second, as coordinators placed them.",
        ),
        Panel(
            "Cached tokens: predicted and found",
            "short",
            [
                (f"sum({rate('baton_scheduler_predicted_cached_tokens_total')})", "predicted"),
                (f"sum({rate('baton_scheduler_prompt_tokens_total', CACHED)})", "found"),
            ],
            "Per second.",
        ),
        Panel(
            "Hits of the store",
            "short",
            [(summed(rate("baton_kvstore_hits_total"), "tier"), "{{tier}}")],
            "Blocks per second.",
        ),
        Panel(
            "Share of hits",
            "percentunit",
            [
                (
                    f"sum by (instance) ({rate('baton_kvstore_hits_total')}) / (sum by (instance) "
                    f"({rate('baton_kvstore_hits_total')}) + sum by (instance) ({rate('baton_kvstore_misses_total')}))",
                    "{{instance}}",
                )
            ],
        ),
        Panel(
            "Memory of the store", "bytes", [("sum by (instance, what) (baton_kvstore_bytes)", "{{instance}} {{what}}")]
        ),
        Panel("Slots", "short", [("sum by (state) (baton_kvstore_slots)", "{{state}}")]),
        Panel(
            "Blocks of engines",
            "short",
            [
                (f"sum({rate('baton_scheduler_kv_blocks_loaded_total')})", "loaded"),
                (f"sum({rate('baton_scheduler_kv_blocks_saved_total')})", "saved"),
                (f"sum({rate('baton_scheduler_kv_blocks_unsaved_total')})", "not saved"),
                (f"sum({rate('baton_scheduler_kv_loads_failed_total')})", "loads that failed"),
                (f"sum({rate('baton_scheduler_kv_loads_declined_total')})", "loads declined"),
            ],
            "Per second.",
        ),
        Panel(
            "Evictions",
            "short",
            [
                (summed(rate("baton_kvstore_evictions_total"), "kept"), "kept below: {{kept}}"),
                (f"sum({rate('baton_kvstore_refused_total')})", "refused"),
            ],
            "Blocks per second.",
        ),
        Panel("Age of evicted blocks", "s", quantiles("baton_kvstore_evicted_age_seconds")),
        Panel(
            "Lower tiers: blocks found",
            "short",
            [
                (summed(rate("baton_kvstore_tier_hits_total"), "tier"), "{{tier}} hits"),
                (summed(rate("baton_kvstore_tier_misses_total"), "tier"), "{{tier}} misses"),
            ],
            "Per second.",
        ),
        Panel(
            "Lower tiers: bytes",
            "Bps",
            [
                (summed(rate("baton_kvstore_tier_bytes_in_total"), "tier"), "{{tier}} read"),
                (summed(rate("baton_kvstore_tier_bytes_out_total"), "tier"), "{{tier}} written"),
            ],
        ),
        Panel("Lower tiers: time of a lookup", "s", quantiles("baton_kvstore_tier_seconds", by="tier")),
        Panel(
            "Lower tiers: present",
            "short",
            [("min by (tier) (baton_kvstore_tier_present)", "{{tier}}")],
        ),
        Panel("Answers of the store", "s", quantiles("baton_kvstore_question_seconds")),
        Panel(
            "Prefix maps of coordinators",
            "short",
            [
                ("baton_router_index_blocks", "{{instance}} blocks"),
                ("baton_router_index_sources", "{{instance}} sources"),
            ],
        ),
        Panel(
            "Hand-overs",
            "short",
            [(summed(rate("baton_scheduler_hand_overs_total"), "outcome"), "{{outcome}}")],
            "Per second, between prefill and decode engines.",
        ),
    ),
)

HOPS = Dashboard(
    "baton-hops",
    "Baton: bus and hops",
    "What a request spends where on its way, and how the bus and the processes are.",
    (
        Panel(
            "Median of each hop",
            "s",
            hop_times(0.5),
            width=12,
        ),
        Panel(
            "99th percentile of each hop",
            "s",
            hop_times(0.99),
            width=12,
        ),
        Panel("Placing a request", "s", quantiles("baton_router_decision_seconds")),
        Panel("Planning a step: scheduling delay", "s", quantiles("baton_scheduler_decision_seconds")),
        Panel("Placements", "reqps", [(summed(rate("baton_coordinator_placements_total"), "engine"), "{{engine}}")]),
        Panel("Round trip of the bus", "s", [(f"baton_bus_round_trip_seconds{{{INSTANCE}}}", "{{instance}}")]),
        Panel("Messages that wait", "short", [(f"baton_inbox_messages{{{INSTANCE}}}", "{{instance}}")]),
        Panel(
            "Messages handled",
            "short",
            [(summed(rate("baton_messages_handled_total"), "service"), "{{service}}")],
            "Per second.",
        ),
        Panel(
            "Lost and unreadable messages",
            "short",
            [
                (f"sum({rate('baton_detokenizer_gaps_total')})", "gaps: detokenizers"),
                (f"sum({rate('baton_router_event_gaps_total')})", "gaps: coordinators"),
                (f"sum({rate('baton_worker_missed_steps_total')})", "gaps: ranks"),
                (summed(rate("baton_bus_dropped_messages_total"), "why"), "dropped: {{why}}"),
                (summed(rate("baton_undelivered_messages_total"), "service"), "no receiver: {{service}}"),
                (f"sum({rate('baton_undecodable_messages_total')})", "unreadable"),
            ],
            "Per second.",
        ),
        Panel(
            "Event loops",
            "s",
            [(f"baton_heartbeat_age_seconds{{{INSTANCE}}}", "{{instance}}")],
            "Since each last turned.",
        ),
        Panel(
            "Starts",
            "short",
            [(f"changes(process_start_time_seconds{{{INSTANCE}}}[15m])", "{{instance}}")],
            "Of each process within 15 minutes.",
        ),
        Panel(
            "Processors",
            "short",
            [(rate("process_cpu_seconds_total", INSTANCE), "{{instance}}")],
            "Cores in use.",
        ),
        Panel("Memory", "bytes", [(f"process_resident_memory_bytes{{{INSTANCE}}}", "{{instance}}")]),
        Panel("Start-up", "s", [(f'baton_startup_seconds{{stage="total", {INSTANCE}}}', "{{instance}}")]),
    ),
)

DASHBOARDS = (OVERVIEW, ENGINES, KV_TIERS, HOPS)


def main() -> None:
    """Writes the files of all dashboards."""
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid}.json").write_text(text(dashboard))


if __name__ == "__main__":
    main()
