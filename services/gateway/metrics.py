"""What the gateway measures: latencies of users (TTFT, ITL, TPOT, end to end), tokens, errors, attempts.

Latencies use a histogram of our own: that of `prometheus_client` takes two locks for each observation, which at one
observation per streamed token is a visible part of the gateway's work.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client import Histogram as PlainHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from shared.ids import GatewayId
from shared.messages.gateway import LatencyCounts, LatencyName
from shared.messages.generation import FinishReason
from shared.messages.lifecycle import (
    LATENCY_BOUNDS,
    STEP_TOKEN_BOUNDS,
    BucketCounts,
    EngineReport,
    Lifecycle,
    RequestFigures,
)
from shared.telemetry.metrics import (
    LATENCY_BUCKETS,
    TOKEN_BUCKETS,
    ForeignName,
    ForeignNames,
    metrics_page,
    service_registry,
)

METRICS = service_registry("gateway")
REQUESTS = Counter(
    "baton_gateway_requests_total",
    "Generation requests that ended, by outcome; refused: for a mistake or a limit of the client's, unlike failed.",
    ["model", "endpoint", "outcome"],
    registry=METRICS,
)
ERRORS = Counter("baton_gateway_errors_total", "Error responses, by HTTP status.", ["status"], registry=METRICS)
RETRIES = Counter("baton_gateway_retries_total", "Attempts after the first one of a request.", registry=METRICS)
DISCONNECTS = Counter(
    "baton_gateway_disconnects_total",
    "Requests whose client disconnected or did not read its response.",
    ["why"],
    registry=METRICS,
)
FORWARDED = Counter("baton_gateway_forwarded_total", "Attempts sent to another cluster.", ["cluster"], registry=METRICS)
RELAYED = Gauge("baton_gateway_relayed_requests", "Open requests of other clusters' gateways.", registry=METRICS)
OPEN = Gauge(
    "baton_gateway_open_requests", "Open requests, by whether an engine has them.", ["state"], registry=METRICS
)
BODY_BYTES = Gauge("baton_gateway_body_bytes", "Bytes that the bodies of open requests hold.", registry=METRICS)
KEYS = Gauge("baton_gateway_api_keys", "API keys that clients may send.", registry=METRICS)
KEYS_FILE_VALID = Gauge(
    "baton_gateway_keys_file_valid", "1; 0 while the file of keys cannot be used as it is.", registry=METRICS
)
RECORD_BYTES = Gauge(
    "baton_gateway_resumable_bytes", "Memory of resumable streams and of copies, roughly.", registry=METRICS
)
RESUMED = Counter(
    "baton_gateway_resumed_total",
    "Streams that clients resumed, by where the gateway had them from.",
    ["source"],
    registry=METRICS,
)
IMAGE_FETCHES = Counter(
    "baton_gateway_image_fetches_total", "Images fetched by HTTP, by what came of it.", ["outcome"], registry=METRICS
)
"""fetched, refused, failed, too slow."""
AUDIO_FILES = Counter(
    "baton_gateway_audio_files_total",
    "Sounds that were given to a decoder, by what came of it.",
    ["outcome"],
    registry=METRICS,
)
"""decoded; refused: not to its end; left: its request ended before."""
VIDEO_FILES = Counter(
    "baton_gateway_video_files_total",
    "Videos that were given to a decoder, by what came of it.",
    ["outcome"],
    registry=METRICS,
)
"""As of sounds."""
OVERFLOW_REQUESTS = Counter(
    "baton_gateway_overflow_requests_total",
    "Requests that could not be served here in time, by why, and by what came of asking the overflow provider.",
    ["cause", "outcome"],
    registry=METRICS,
)
OVERFLOW_TOKENS = Counter(
    "baton_gateway_overflow_tokens_total",
    "Tokens that the overflow provider counted, by kind.",
    ["kind"],
    registry=METRICS,
)
OVERFLOW_OPEN = Gauge(
    "baton_gateway_overflow_open_requests", "Requests that are open at the overflow provider.", registry=METRICS
)
OVERFLOW_BREAKER_OPEN = Gauge(
    "baton_gateway_overflow_breaker_open",
    "1 while the overflow provider is left alone, as it kept failing; else 0.",
    registry=METRICS,
)
OVERFLOW_FIRST_BYTE = PlainHistogram(
    "baton_gateway_overflow_time_to_first_byte_seconds",
    "From asking the overflow provider to the beginning of its answer.",
    buckets=LATENCY_BUCKETS,
    registry=METRICS,
)
STREAMS = Gauge("baton_gateway_open_exchanges", "Open HTTP requests.", registry=METRICS)


END_OF_OPENMETRICS = b"# EOF\n"


class Histogram:
    """Owns counts by bucket. One event loop writes; a scrape reads on a thread, and may miss what comes meanwhile."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)

    def observe(self, value: float, trace: str | None = None) -> None:
        """Counts one observation in its bucket and in the sum. One of a request that is traced, by its trace's id, is
        shown as the bucket's example until the next."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if trace is not None:
            self._exemplars[bucket] = Exemplar({"trace_id": trace}, value, time.time())

    def counts(self, model: str, name: LatencyName) -> LatencyCounts:
        """Returns the counts of each bucket alone."""
        return LatencyCounts(model, name, self._bounds, tuple(self._counts), self._sum)

    def buckets(self) -> tuple[list[tuple[str, float, Exemplar | None]], float]:
        """Returns cumulative counts by upper bound, each with an example, and the sum of all observations."""
        total, cumulative = 0, []
        bounds = [*map(str, self._bounds), "+Inf"]
        for bound, count, exemplar in zip(bounds, self._counts, self._exemplars, strict=True):
            total += count
            cumulative.append((bound, float(total), exemplar))
        return cumulative, self._sum


class ModelMeters:
    """Owns one model's figures."""

    def record_finish(self, reason: FinishReason, prompt_tokens: int, output_tokens: int) -> None:
        """A choice has ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.prompt_lengths.observe(prompt_tokens)
        self.output_lengths.observe(output_tokens)

    def record_answer(self, choices: Iterable[tuple[int, int]]) -> None:
        """An answer is whole. `choices`: of each its prompt and how many tokens it has; a request of vLLM's is a prompt
        with its choices."""
        lengths: dict[int, list[int]] = {}
        for prompt, tokens in choices:
            lengths.setdefault(prompt, []).append(tokens)
        for of_prompt in lengths.values():
            if longest := max(of_prompt):
                self.choices.observe(len(of_prompt))
                self.longest_outputs.observe(longest)

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.itl = Histogram()
        self.tpot = Histogram()
        self.e2e = Histogram()
        self.prompt_lengths = Histogram(TOKEN_BUCKETS)
        self.output_lengths = Histogram(TOKEN_BUCKETS)
        self.choices = Histogram(CHOICE_BOUNDS)
        self.longest_outputs = Histogram(TOKEN_BUCKETS)
        self.finished: dict[FinishReason, int] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0


CHOICE_BOUNDS = (1, 2, 5, 10, 20, 50, 100)
KEY_LATENCIES: tuple[LatencyName, ...] = ("ttft", "tpot", "e2e")
"""Between single tokens only models are told apart: that is counted for each token."""
MAX_KEYS = 64
"""API keys whose latencies are counted apart; those of further ones together."""
OTHER_KEYS = "others"


class KeyMeters:
    """Owns the latencies of one API key's answers, for the console."""

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.tpot = Histogram()
        self.e2e = Histogram()


class Meters(Collector):
    """Owns the figures of every model, read at each scrape, and the latencies of API keys, which no scrape reads. A
    scrape is made on a thread: it goes through copies, as models and ends of outputs may come meanwhile."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMeters] = {}
        self._keys: dict[str, KeyMeters] = {}

    def of_key(self, key: str) -> KeyMeters:
        """Returns the latencies of an API key, by its name."""
        name = key if key in self._keys or len(self._keys) < MAX_KEYS else OTHER_KEYS
        return self._keys.setdefault(name, KeyMeters())

    def of(self, model: str) -> ModelMeters:
        """Returns a model's figures. Models come from engines' announcements, so the operator bounds their number."""
        if model not in self._models:
            self._models[model] = ModelMeters()
        return self._models[model]

    def latencies(self) -> Iterator[LatencyCounts]:
        """Yields every model's histograms, and every key's."""
        for model, meters in self._models.items():
            for name in get_args(LatencyName):
                yield getattr(meters, name).counts(model, name)
        for key, of_key in self._keys.items():
            for name in KEY_LATENCIES:
                yield replace(getattr(of_key, name).counts(key, name), by="key")

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, as `prometheus_client` asks for them."""
        models = list(self._models.items())
        for attribute, name, text in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"baton_gateway_{name}", text, labels=["model"])
            for model, meters in models:
                buckets, total = getattr(meters, attribute).buckets()
                histogram.add_metric([model], buckets, total)
            yield histogram
        for attribute, text in _COUNTERS:
            counter = CounterMetricFamily(f"baton_gateway_{attribute}", text, labels=["model"])
            for model, meters in models:
                counter.add_metric([model], getattr(meters, attribute))
            yield counter
        ends = CounterMetricFamily(
            "baton_gateway_choices_finished", "Choices, by why they ended.", labels=["model", "reason"]
        )
        for model, meters in models:
            for reason, count in meters.finished.copy().items():
                ends.add_metric([model, reason], count)
        yield ends


_HISTOGRAMS = (
    ("ttft", "time_to_first_token_seconds", "From the request's arrival to its first token."),
    ("itl", "inter_token_latency_seconds", "Between two deltas of one choice."),
    ("tpot", "time_per_output_token_seconds", "Mean time for each token after the first, by choice."),
    ("e2e", "e2e_request_latency_seconds", "From the request's arrival to its end."),
    ("prompt_lengths", "request_prompt_tokens", "Tokens of the prompt, by choice."),
    ("output_lengths", "request_generation_tokens", "Tokens generated, by choice."),
    ("choices", "request_choices", "Choices of each prompt."),
    ("longest_outputs", "request_longest_tokens", "Tokens of the longest choice of each prompt."),
)
_COUNTERS = (
    ("prompt_tokens", "Tokens of prompts."),
    ("cached_tokens", "Prompt tokens whose keys and values were cached."),
    ("generation_tokens", "Tokens generated."),
)

VLLM_NAMES = (
    ForeignName("baton_gateway_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ForeignName("baton_gateway_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    ForeignName("baton_gateway_inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ForeignName("baton_gateway_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    ForeignName("baton_gateway_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    ForeignName("baton_gateway_request_prompt_tokens", "vllm:request_prompt_tokens"),
    ForeignName("baton_gateway_request_generation_tokens", "vllm:request_generation_tokens"),
    ForeignName("baton_gateway_request_choices", "vllm:request_params_n"),
    ForeignName("baton_gateway_request_longest_tokens", "vllm:request_max_num_generation_tokens"),
    ForeignName("baton_gateway_prompt_tokens", "vllm:prompt_tokens"),
    ForeignName("baton_gateway_cached_tokens", "vllm:prompt_tokens_cached"),
    ForeignName("baton_gateway_generation_tokens", "vllm:generation_tokens"),
    ForeignName("baton_gateway_choices_finished", "vllm:request_success"),
)
"""As vLLM calls what it measures of requests. Its `time_per_output_token_seconds` was the time between two tokens."""
_VLLM_LABELS = {"model": "model_name", "reason": "finished_reason"}


def gateway_collectors(meters: Meters) -> tuple[Collector, ...]:
    """Returns what one gateway measures of its requests: under our names, and under vLLM's."""
    return meters, ForeignNames([meters], VLLM_NAMES, _VLLM_LABELS)


ENGINE_NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_drafts",
    "vllm:num_preemptions",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:iteration_tokens_total",
    "vllm:prompt_tokens_by_source",
)
"""What the API's page says of engines."""


_ENGINE_FIGURES: tuple[
    tuple[type[GaugeMetricFamily | CounterMetricFamily], str, Callable[[EngineReport], float]], ...
] = (
    (GaugeMetricFamily, "Running requests.", lambda said: said.running),
    (GaugeMetricFamily, "Waiting requests, including preempted ones.", lambda said: said.waiting),
    (
        GaugeMetricFamily,
        "Share of KV blocks that sequences use: 0 to 1.",
        lambda said: 1 - said.blocks_free / max(1, said.blocks_total),
    ),
    (CounterMetricFamily, "Prompt tokens that were looked up.", lambda said: said.prompt_tokens),
    (CounterMetricFamily, "Prompt tokens that a cache held.", lambda said: said.cached_tokens),
    (CounterMetricFamily, "Draft tokens that were verified.", lambda said: said.drafted_tokens),
    (CounterMetricFamily, "Draft tokens that were accepted.", lambda said: said.accepted_tokens),
    (CounterMetricFamily, "Steps of single sequences that verified drafts.", lambda said: said.speculated),
    (CounterMetricFamily, "Preemptions of running sequences.", lambda said: said.preemptions),
)
_ENGINE_HISTOGRAMS: tuple[tuple[str, tuple[float, ...], Callable[[RequestFigures], BucketCounts]], ...] = (
    ("From arrival at the engine to the first step.", LATENCY_BOUNDS, lambda figures: figures.queue),
    ("From the first step to the first token.", LATENCY_BOUNDS, lambda figures: figures.prefill),
    ("From the first token to the last.", LATENCY_BOUNDS, lambda figures: figures.decode),
    ("From the first step to the last token.", LATENCY_BOUNDS, lambda figures: figures.inference),
    ("Tokens computed by a step.", STEP_TOKEN_BOUNDS, lambda figures: figures.step_tokens),
)


class EngineCollector(Collector):
    """What engines reported last, under vLLM's names and labels: who knows vLLM scrapes one port, and autoscalers and
    routers read there how many requests run and wait. Engines' own pages have the same, and more, by the second."""

    def __init__(self, engines: Sequence[Lifecycle]) -> None:
        """`engines`: those that live."""
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, as `prometheus_client` asks for them."""
        reports = [(life.instance, life.engine) for life in self._engines if life.engine is not None]
        labels = ["engine", "model_name"]
        names = iter(ENGINE_NAMES)
        for kind, text, value in _ENGINE_FIGURES:
            family = kind(next(names), text, labels=labels)
            for engine, said in reports:
                family.add_metric([engine, said.model.name], value(said))
            yield family
        for text, bounds, counts in _ENGINE_HISTOGRAMS:
            histogram = HistogramMetricFamily(next(names), text, labels=labels)
            for engine, said in reports:
                if said.figures is not None:
                    histogram.add_metric([engine, said.model.name], *_cumulative(bounds, counts(said.figures)))
            yield histogram
        sources = CounterMetricFamily(next(names), "Prompt tokens by source.", labels=[*labels, "source"])
        for engine, said in reports:
            for source, count in _by_source(said).items():
                sources.add_metric([engine, said.model.name, source], count)
        yield sources


def _by_source(said: EngineReport) -> dict[str, int]:
    """Prompt tokens of requests that entered a step, as vLLM calls where their keys and values are from."""
    return {
        "local_compute": said.prompt_tokens - said.cached_tokens,
        "local_cache_hit": said.cached_tokens - said.loaded_tokens,
        "external_kv_transfer": said.loaded_tokens,
    }


def _cumulative(bounds: tuple[float, ...], histogram: BucketCounts) -> tuple[list[tuple[str, float]], float]:
    """As `HistogramMetricFamily` takes a histogram."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(histogram.counts)), strict=True)), histogram.total


class MergedPages(Collector):
    """The pages of several gateways as one, with the label `gateway` on every sample: clients of a port that they share
    cannot choose whom they ask, and must not see one gateway's counters now and another's then."""

    def __init__(self, pages: Mapping[GatewayId, bytes], engines: Sequence[Lifecycle] = ()) -> None:
        """`pages`: each in Prometheus' text format or in OpenMetrics', by the gateway's name. `engines`: those that
        live, whose figures are added once."""
        self._pages, self._engines = pages, EngineCollector(engines)

    def collect(self) -> Iterator[Metric]:
        """Yields each metric once, with the samples of all gateways."""
        merged: dict[str, Metric] = {}
        for gateway, page in self._pages.items():
            parsed = openmetrics_families if page.endswith(END_OF_OPENMETRICS) else text_string_to_metric_families
            for metric in parsed(page.decode()):
                known = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                known.samples += [s._replace(labels={"gateway": gateway, **s.labels}) for s in metric.samples]
        yield from merged.values()
        yield from self._engines.collect()

    def text(self, openmetrics: bool = False) -> bytes:
        """Returns them in Prometheus' text format, or in OpenMetrics'."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return metrics_page(registry, openmetrics=openmetrics)
