"""Spans as a collector receives them, and which requests are traced."""

from __future__ import annotations

import sys
import threading

import pytest

from shared.telemetry.tracing import CLIENT_REQUEST, RESPONSE, Tracing, TracingUnavailable, trace_id_of
from tests.support.cluster.ports import free_port
from tests.support.otlp_receiver import otlp_receiver

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_request_and_what_is_done_for_it() -> None:
    tracing = Tracing()
    with otlp_receiver() as receiver:
        tracing.set_up("gateway", "gateway-1", receiver.endpoint)
        request = tracing.request("POST /v1/completions", f"00-{TRACE}-{PARENT}-01".encode())
        assert request is not None
        tracing.record("queue", request.context, 1.5, 1.75, engine="engine-1", tokens=3)
        tracing.record("clocks differ", request.context, 2.0, 1.0)
        tracing.record("not traced", None, 1.0, 2.0)
        tracing.record("no context", "anything", 1.0, 2.0)
        request.end(failed=True, attributes={"http.response.status_code": 500})
        tracing.shut_down()
        queue, clocks, root = receiver.spans(TRACE)
    assert (queue.name, queue.began, queue.ended) == ("queue", 1.5, 1.75)
    assert queue.attributes == {"baton.engine": "engine-1", "baton.tokens": 3}
    assert (clocks.began, clocks.ended) == (2.0, 2.0)
    assert (root.parent, root.failed, root.attributes) == (PARENT, True, {"http.response.status_code": 500})
    assert {queue.parent, clocks.parent} == {root.span}
    assert (root.service, root.instance) == ("baton-gateway", "gateway-1")


def test_the_last_spans_are_remembered_without_a_collector() -> None:
    tracing = Tracing()
    assert tracing.request("POST /", None) is None
    tracing.remember(3)
    request = tracing.request("POST /", None)
    assert request is not None
    assert request.context == f"00-{request.trace_id}-{request.context[36:52]}-00"
    assert trace_id_of(request.context) == request.trace_id
    request.response = "cmpl-1"
    assert tracing.trace_of("cmpl-1") == tracing.trace_of("cmpl-1-0") == request.trace_id
    assert [each.name for each in tracing.open_requests(request.trace_id)] == ["POST /"]
    tracing.record("queue", request.context, 1.5, 1.75, engine="e")
    tracing.record("no context", "anything", 1.0, 2.0)
    request.end(failed=False, attributes={RESPONSE: "cmpl-1", CLIENT_REQUEST: "mine"})
    queue, root = tracing.recent(request.trace_id)
    assert (queue.name, queue.begun, queue.ended, queue.attributes) == ("queue", 1.5, 1.75, {"engine": "e"})
    assert (root.name, tracing.open_requests(request.trace_id)) == ("POST /", [])
    assert tracing.trace_of("mine") == tracing.trace_of("cmpl-1-1") == request.trace_id
    assert [tracing.trace_of(other) for other in ("cmpl-2", "cmpl-10", "", "cmpl")] == [None] * 4
    assert [span.name for span in tracing.ended_requests(5)] == ["POST /"]
    for number in range(3):
        tracing.record(str(number), request.context, 0.0, 1.0)
    assert tracing.trace_of("cmpl-1") is None, "it is forgotten"


def test_what_is_remembered_alone_is_not_exported() -> None:
    tracing = Tracing()
    with otlp_receiver() as receiver:
        tracing.set_up("gateway", "gateway-1", receiver.endpoint, 0.0)
        tracing.remember(10)
        quiet = tracing.request("POST /", f"00-{TRACE}-{PARENT}-00".encode())
        assert quiet is not None
        tracing.record("queue", quiet.context, 1.0, 2.0)
        quiet.end(failed=False, attributes={})
        loud = tracing.request("POST /", f"00-{'b' * 32}-{PARENT}-01".encode())
        assert loud is not None
        loud.end(failed=False, attributes={})
        tracing.shut_down()
        assert receiver.spans(TRACE) == []
        assert len(receiver.spans("b" * 32)) == 1
    assert [span.name for span in tracing.recent(TRACE)] == ["queue", "POST /"]
    assert [span.name for span in tracing.recent("b" * 32)] == ["POST /"]


@pytest.mark.parametrize(
    ("traceparent", "rate", "traced"),
    [
        (None, 1.0, True),
        (None, 0.0, False),
        (f"00-{TRACE}-{PARENT}-01", 0.0, True),
        (f"00-{TRACE}-{PARENT}-00", 1.0, False),
        (f"cc-{TRACE}-{PARENT}-09-of-a-later-version", 0.0, True),
        (f"00-{'0' * 32}-{PARENT}-01", 0.0, False),
        (f"00-{TRACE}-{'0' * 16}-01", 0.0, False),
        (f"ff-{TRACE}-{PARENT}-01", 0.0, False),
        (f"00-{TRACE.upper()}-{PARENT}-01", 0.0, False),
        ("\xff\xfe", 0.0, False),
        ("00-" * 1000, 0.0, False),
    ],
)
def test_who_is_traced(traceparent: str | None, rate: float, traced: bool) -> None:
    tracing = Tracing()
    with otlp_receiver() as receiver:
        tracing.set_up("gateway", "gateway-1", receiver.endpoint, rate)
        request = tracing.request("POST /", None if traceparent is None else traceparent.encode("latin-1"))
        tracing.shut_down()
    assert (request is not None) is traced
    if request is not None and traceparent is not None:
        assert request.trace_id == TRACE


def test_nothing_is_traced_where_nothing_is_exported() -> None:
    tracing = Tracing()
    assert tracing.request("POST /", f"00-{TRACE}-{PARENT}-01".encode()) is None
    tracing.record("queue", f"00-{TRACE}-{PARENT}-01", 1.0, 2.0)
    tracing.shut_down()


def test_a_collector_that_is_away_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")  # seconds that the rest is tried for
    before = set(threading.enumerate())
    tracing = Tracing()
    tracing.set_up("gateway", "gateway-1", f"http://127.0.0.1:{free_port()}/v1/traces")
    request = tracing.request("POST /v1/completions", None)
    assert request is not None
    for number in range(5000):  # more than wait to be exported at most
        tracing.record("queue", request.context, number, number + 1)
    request.end(failed=False, attributes={})
    tracing.shut_down()
    assert tracing.request("POST /v1/completions", None) is None
    # What is still tried draws random pauses, which tests of properties behind this one would be blamed for.
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_the_missing_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingUnavailable, match=r"pip install 'baton-serve\[otel\]'"):
        Tracing().set_up("gateway", "gateway-1", "http://127.0.0.1:4318/v1/traces")
