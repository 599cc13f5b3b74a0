"""A collector's OTLP/HTTP receiver of traces: takes what the official exporter sends, as protobuf, and keeps it."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

DEADLINE = 60.0


class ReceivedSpan(NamedTuple):
    """One span, with what its process says of itself."""

    name: str
    trace: str
    span: str
    parent: str
    began: float
    ended: float
    failed: bool
    attributes: dict[str, Any]
    service: str
    instance: str


class OtlpReceiver:
    """Owns what has come."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self._spans: list[ReceivedSpan] = []
        self._came = threading.Condition()

    def take(self, body: bytes) -> None:
        """One export of one process."""
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            for resource_spans in request.resource_spans:
                process = _values(resource_spans.resource.attributes)
                for scope in resource_spans.scope_spans:
                    self._spans += [_span(each, process) for each in scope.spans]
            self._came.notify_all()

    def spans(self, trace: str) -> list[ReceivedSpan]:
        """Those of a trace that have come, in the order of their beginnings."""
        with self._came:
            return sorted((span for span in self._spans if span.trace == trace), key=lambda span: span.began)

    def wait_for(self, trace: str, enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """The spans of a trace, once they are enough."""
        end = time.monotonic() + DEADLINE
        with self._came:
            while not enough(spans := [span for span in self._spans if span.trace == trace]):
                assert self._came.wait(end - time.monotonic()), f"no more than {[span.name for span in spans]}"
        return self.spans(trace)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _span(span: Any, process: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began=span.start_time_unix_nano / 1e9,
        ended=span.end_time_unix_nano / 1e9,
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        service=process["service.name"],
        instance=process["service.instance.id"],
    )


@contextlib.contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpReceiver(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
