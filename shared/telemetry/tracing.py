"""A trace of each request through all services, as OpenTelemetry has it: spans by OTLP to a collector.

A request that is traced carries its context (W3C Trace Context) in `Tokenize`, `Generation` and `OpenStream`, as the
header `traceparent` spells it. Each service records what it has done for the request under the gateway's span, once
that is over, so that nothing of a trace is open in a process that dies; what has no context costs nothing.

The official SDK makes and exports the spans (the extra `otel`), on a thread of its own; beyond its bounded queue spans
are dropped. Its own environment variables hold, for instance OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import re
import time
from random import random
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

NAMESPACE = "baton"
FLUSH_SECONDS = 2.0
"""A process that ends waits for a collector for no longer."""
_TRACEPARENT = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Attribute = str | int | float | bool


class TracingUnavailable(Exception):
    """Traces are wanted, and the SDK is not installed."""


class RequestSpan:
    """The span of a whole request, at the gateway that answers it: all others are its children."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.context = f"00-{self.trace_id}-{context.span_id:016x}-01"
        """What messages carry, and what is sent on to other servers, as `traceparent`."""

    def end(self, *, failed: bool, attributes: dict[str, Attribute]) -> None:
        """The request has ended."""
        from opentelemetry.trace import StatusCode

        for name, value in attributes.items():
            self._span.set_attribute(name, value)
        if failed:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Tracing:
    """Owns the exporter of a process; does nothing until it is set up."""

    def __init__(self) -> None:
        self._provider: TracerProvider | None = None
        self._sample_rate = 0.0

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
        """Begins the span of a request; None where it is not traced. A client's `traceparent` decides where there is a
        valid one, otherwise the sample rate."""
        if self._provider is None:
            return None
        from opentelemetry.trace import SpanKind

        parent = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.decode("latin-1"))
        traced = random() < self._sample_rate if parent is None else int(parent[3], 16) & 1 == 1
        if not traced:
            return None
        context = None if parent is None else _context(parent)
        return RequestSpan(self._start(name, context, SpanKind.SERVER, time.time()))

    def record(self, name: str, trace: str | None, begun: float, ended: float, /, **attributes: Attribute) -> None:
        """Records what was done for the request with this context, in Unix seconds; nothing where it is None."""
        if trace is None or self._provider is None or (parent := _TRACEPARENT.fullmatch(trace)) is None:
            return
        from opentelemetry.trace import SpanKind

        span = self._start(name, _context(parent), SpanKind.INTERNAL, begun)
        for attribute, value in attributes.items():
            span.set_attribute(f"{NAMESPACE}.{attribute}", value)
        span.end(int(max(begun, ended) * 1e9))

    def _start(self, name: str, context: Context | None, kind: SpanKind, begun: float) -> Span:
        assert self._provider is not None, "spans are begun where they are exported"
        return self._provider.get_tracer(NAMESPACE).start_span(name, context, kind, start_time=int(begun * 1e9))


def _context(traceparent: re.Match[str]) -> Any:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    trace_id, span_id = int(traceparent[1], 16), int(traceparent[2], 16)
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(remote))


TRACING = Tracing()
"""Of this process."""
