"""A trace of each request through all services, as OpenTelemetry has it: spans by OTLP to a collector.

A request that is traced carries its context (W3C Trace Context) in `Tokenize`, `Generation` and `OpenStream`, as the
header `traceparent` spells it. Each service records what it has done for the request under the gateway's span, once
that is over, so that nothing of a trace is open in a process that dies; what has no context costs nothing.

The last spans of each process stay with it as well, of all requests, so that `baton trace` and the console can follow
one without a collector; the context of a request that is not exported says so (its flags are 00).

The official SDK makes and exports the spans (the extra `otel`), on a thread of its own; beyond its bounded queue spans
are dropped. Its own environment variables hold, for instance OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import re
import time
from collections import deque
from itertools import islice
from random import getrandbits, random
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

NAMESPACE = "baton"
FLUSH_SECONDS = 2.0
"""A process that ends waits for a collector for no longer."""
_TRACEPARENT = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

RESPONSE, CLIENT_REQUEST = "gen_ai.response.id", "baton.client_request"
"""Attributes of a request's span: the id of its response, and the client's own `X-Request-Id`."""

Attribute = str | int | float | bool


class TracingUnavailable(Exception):
    """Traces are wanted, and the SDK is not installed."""


class RecentSpan(NamedTuple):
    """What was done for a request, as the process that did it remembers it."""

    trace_id: str
    name: str
    begun: float
    """In Unix seconds."""
    ended: float
    attributes: dict[str, Attribute]


class OpenSpan(NamedTuple):
    """What a process is doing for a request."""

    name: str
    begun: float


class RequestSpan:
    """The span of a whole request, at the gateway that answers it: all others are its children."""

    def __init__(self, tracing: Tracing, name: str, trace_id: str, span_id: str, span: Span | None) -> None:
        """`span`: the SDK's, of a request whose trace is exported."""
        self._tracing, self._span = tracing, span
        self.name, self.trace_id, self.begun = name, trace_id, time.time()
        self.context = f"00-{trace_id}-{span_id}-{'00' if span is None else '01'}"
        """What messages carry, and what is sent on to other servers, as `traceparent`."""
        self.response: str | None = None
        """The id of its response, once there is one."""

    def end(self, *, failed: bool, attributes: dict[str, Attribute]) -> None:
        """The request has ended."""
        self._tracing.end_request(self, attributes)
        if self._span is None:
            return
        from opentelemetry.trace import StatusCode

        for name, value in attributes.items():
            self._span.set_attribute(name, value)
        if failed:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Tracing:
    """Owns the exporter of a process, and its last spans; does nothing until it is told to do either."""

    def __init__(self) -> None:
        self._provider: TracerProvider | None = None
        self._sample_rate = 0.0
        self._recent: deque[RecentSpan] = deque(maxlen=0)
        self._open: dict[str, RequestSpan] = {}
        """Requests that have not ended, by their context."""

    def remember(self, spans: int) -> None:
        """Keeps so many of the last spans from now on, of requests whose traces are not exported, too."""
        self._recent = deque(self._recent, maxlen=spans)

    def set_up(self, service: str, instance: str, endpoint: str, sample_rate: float = 1.0) -> None:
        """Exports to `endpoint`, the URL of a collector's OTLP/HTTP receiver for traces. `sample_rate`: share of the
        requests that are traced. Raises TracingUnavailable."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            text = f"otlp_traces_endpoint needs OpenTelemetry's SDK ({error}): pip install 'baton-serve[otel]'"
            raise TracingUnavailable(text) from None
        resource = Resource.create(
            {"service.namespace": NAMESPACE, "service.name": f"{NAMESPACE}-{service}", "service.instance.id": instance}
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._provider, self._sample_rate = provider, sample_rate

    def shut_down(self) -> None:
        """Exports what is left, for a bounded time: the SDK's own end waits for a collector that is away."""
        if self._provider is None:
            return
        provider, self._provider = self._provider, None
        ending = Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)

    def request(self, name: str, traceparent: bytes | None) -> RequestSpan | None:
        """Begins the span of a request; None where it is neither exported nor remembered. Whether it is exported a
        client's `traceparent` decides where there is a valid one, otherwise the sample rate."""
        if self._provider is None and not self._recent.maxlen:
            return None
        parent = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.decode("latin-1"))
        exported = self._provider is not None and (
            random() < self._sample_rate if parent is None else int(parent[3], 16) & 1 == 1
        )
        if exported:
            from opentelemetry.trace import SpanKind

            span = self._start(name, None if parent is None else _context(parent), SpanKind.SERVER, time.time())
            ids = span.get_span_context()
            request = RequestSpan(self, name, f"{ids.trace_id:032x}", f"{ids.span_id:016x}", span)
        elif self._recent.maxlen:
            trace_id = f"{getrandbits(127) + 1:032x}" if parent is None else parent[1]
            request = RequestSpan(self, name, trace_id, f"{getrandbits(63) + 1:016x}", None)
        else:
            return None
        if self._recent.maxlen:
            self._open[request.context] = request
        return request

    def end_request(self, request: RequestSpan, attributes: dict[str, Attribute]) -> None:
        """Its span has ended, and is remembered."""
        if self._open.pop(request.context, None) is not None:
            self._recent.append(RecentSpan(request.trace_id, request.name, request.begun, time.time(), attributes))

    def trace_of(self, name: str) -> str | None:
        """Returns the trace of an open or recent request of this process; `name`: the trace's id, the response's, that
        of one of its sequences, or the client's own. The newest where there are several; None: there is none."""
        for request in reversed(self._open.values()):
            if name == request.trace_id or _is_of(name, request.response):
                return request.trace_id
        for span in reversed(self._recent):
            told = span.attributes
            if name == span.trace_id or _is_of(name, told.get(RESPONSE)) or name == told.get(CLIENT_REQUEST):
                return span.trace_id
        return None

    def ended_requests(self, most: int) -> list[RecentSpan]:
        """Returns the requests that ended last at this gateway, the newest first."""
        requests = (span for span in reversed(self._recent) if RESPONSE in span.attributes)
        return list(islice(requests, most))

    def recent(self, trace_id: str) -> list[RecentSpan]:
        """Returns what is remembered of a trace, in the order in which it ended."""
        return [span for span in self._recent if span.trace_id == trace_id]

    def open_requests(self, trace_id: str) -> list[RequestSpan]:
        """Returns the requests of a trace that have not ended."""
        return [request for request in self._open.values() if request.trace_id == trace_id]

    def record(self, name: str, trace: str | None, begun: float, ended: float, /, **attributes: Attribute) -> None:
        """Records what was done for the request with this context, in Unix seconds; nothing where it is None."""
        if trace is None or (parent := _TRACEPARENT.fullmatch(trace)) is None:
            return
        if self._recent.maxlen:
            self._recent.append(RecentSpan(parent[1], name, begun, max(begun, ended), attributes))
        if self._provider is None or not int(parent[3], 16) & 1:
            return
        from opentelemetry.trace import SpanKind

        span = self._start(name, _context(parent), SpanKind.INTERNAL, begun)
        for attribute, value in attributes.items():
            span.set_attribute(f"{NAMESPACE}.{attribute}", value)
        span.end(int(max(begun, ended) * 1e9))

    def _start(self, name: str, context: Context | None, kind: SpanKind, begun: float) -> Span:
        assert self._provider is not None, "spans are begun where they are exported"
        return self._provider.get_tracer(NAMESPACE).start_span(name, context, kind, start_time=int(begun * 1e9))


def trace_id_of(context: str) -> str:
    """Returns the id of the trace of a context that messages carry; empty where it is none."""
    found = _TRACEPARENT.fullmatch(context)
    return "" if found is None else found[1]


def exported_trace(context: str | None) -> str | None:
    """Returns the id of the trace that a collector gets of this context; None where it gets none."""
    return trace_id_of(context) if context is not None and context.endswith("-01") else None


def _is_of(name: str, response: Attribute | None) -> bool:
    """Whether this is the id of a response, or of one of its sequences."""
    return isinstance(response, str) and (name == response or name.startswith(f"{response}-"))


def _context(traceparent: re.Match[str]) -> Any:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    trace_id, span_id = int(traceparent[1], 16), int(traceparent[2], 16)
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(remote))


TRACING = Tracing()
"""Of this process."""
