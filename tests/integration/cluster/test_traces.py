"""A trace of each request through all services by OTLP, on a stack that prefills and decodes on two engines."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "The fox and the hare met by the old mill. " * 20


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def stack(receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    settings = ("coordinator.disaggregate_tokens=0", "coordinator.disaggregate_least=0")
    more = [f"--otlp-traces-endpoint={receiver.endpoint}", "--trace-sample-rate=0"]
    folder = tmp_path_factory.mktemp("traces")
    with running_stack(folder, prefill=1, decode=1, kvstore="64MiB", settings=settings, more=more) as stack:
        yield stack


def ask(stack: RunningStack, traceparent: str | None, **fields: object) -> httpx.Response:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    body = {"model": stack.model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, **fields}
    return httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_spans_of_all_services_are_children_of_the_clients_span(stack: RunningStack, receiver: OtlpReceiver) -> None:
    assert ask(stack, f"00-{TRACE}-{PARENT}-01").status_code == 200
    expected = {
        ("POST /v1/completions", "baton-gateway"),
        ("tokenize", "baton-tokenizer"),
        ("route", "baton-coordinator"),
        ("queue", "baton-scheduler"),
        ("prefill", "baton-scheduler"),
        ("hand_over", "baton-scheduler"),
        ("kv_load", "baton-scheduler"),
        ("decode", "baton-scheduler"),
        ("detokenize", "baton-detokenizer"),
    }
    spans = receiver.wait_for(TRACE, lambda spans: len(spans) >= len(expected))
    assert {(span.name, span.service) for span in spans} == expected
    by_name = {span.name: span for span in spans}
    root = by_name["POST /v1/completions"]
    assert root.parent == PARENT
    assert {span.parent for span in spans if span is not root} == {root.span}
    assert not root.failed
    told = root.attributes
    assert (told["http.response.status_code"], told["gen_ai.usage.output_tokens"]) == (200, 8)
    assert told["gen_ai.usage.input_tokens"] == by_name["tokenize"].attributes["baton.prompt_tokens"] > 100
    assert by_name["prefill"].instance != by_name["decode"].instance == by_name["kv_load"].instance
    assert by_name["hand_over"].attributes["baton.to"] == by_name["decode"].instance
    order = ["tokenize", "route", "queue", "prefill", "hand_over", "decode"]
    begun = [by_name[name].began for name in order]
    # each process has its own clock, and takes it a while behind what began, where it had no processor
    assert all(one <= other + 0.1 for one, other in itertools.pairwise(begun))
    assert all(root.began - 0.01 <= span.began <= span.ended for span in spans)


def test_the_stack_itself_remembers_the_way_of_a_request(stack: RunningStack) -> None:
    """Of one that no collector gets: the rate is 0."""
    answer = ask(stack, None)
    options = ("--json", "--run-dir", str(stack.run_dir))
    asked = [sys.executable, "-m", "deploy.cli", "trace", answer.json()["id"], *options]
    expected = {"tokenize", "route", "queue", "prefill", "hand_over", "kv_load", "decode", "detokenize"}
    deadline = time.monotonic() + 60
    while True:  # a span comes into a process's memory a moment after the client has its answer
        found = json.loads(subprocess.run(asked, capture_output=True, check=True, text=True).stdout)
        names = [hop["name"] for hop in found["hops"]]
        if set(names) == {"POST /v1/completions", *expected}:
            break
        assert time.monotonic() < deadline, names
    assert names[0] == "POST /v1/completions"
    assert all(hop["ended"] >= hop["begun"] for hop in found["hops"])
    asked[4] = "nobody's"
    refused = subprocess.run(asked, capture_output=True, check=False, text=True)
    assert (refused.returncode, "nobody's" in refused.stderr) == (1, True)


def test_the_client_or_the_rate_decides_what_is_traced(stack: RunningStack, receiver: OtlpReceiver) -> None:
    """The rate is 0. What comes behind them is exported behind them."""
    unsampled, later = "a" * 32, "b" * 32
    assert ask(stack, f"00-{unsampled}-{PARENT}-00").status_code == 200
    assert ask(stack, None).status_code == 200
    assert ask(stack, f"not-{TRACE}-valid").status_code == 200
    assert ask(stack, f"00-{later}-{PARENT}-01", model="none").status_code == 404
    (refused,) = receiver.wait_for(later, lambda spans: len(spans) == 1)
    assert (refused.attributes["http.response.status_code"], refused.failed) == (404, False)
    assert receiver.spans(unsampled) == []


def test_every_line_about_a_traced_request_names_its_trace(stack: RunningStack) -> None:
    trace = "c" * 32
    request = ask(stack, f"00-{trace}-{PARENT}-01").json()["id"]
    end = time.monotonic() + 30
    while '"audit"' not in "".join(line for line in stack.log("gateway-1").splitlines() if trace in line):
        assert time.monotonic() < end, "written behind the answer"
        time.sleep(0.05)
    found: dict[str, set[str | None]] = {}
    for line in map(json.loads, stack.baton("logs", "--request", request, "--json").stdout.splitlines()):
        found.setdefault(line["service"], set()).add(line.get("trace"))
    assert found.keys() >= {"gateway", "scheduler", "detokenizer"}
    assert all(traces == {trace} for traces in found.values()), found
