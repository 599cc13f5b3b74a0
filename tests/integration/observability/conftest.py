"""One stack that these files watch: with a key, tracing, two gateways, a KV store and a Redis below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.otlp_receiver import otlp_receiver

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEY = "sk-observed-6f1e2d3c4b5a"
SECRET_PROMPT = "The heron Wilhelmina keeps 4711 pearls below the boathouse. "
PROMPT = SECRET_PROMPT * 12


class WatchedStack(NamedTuple):
    """A stack that has answered, and what it has said."""

    stack: RunningStack
    outputs: tuple[str, ...]


def ask(stack: RunningStack, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    return httpx.post(f"{stack.url}{path}", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedStack]:
    with (
        otlp_receiver() as receiver,
        running_stack(
            tmp_path_factory.mktemp("watched"),
            engines=1,
            gateways=2,
            kvstore="64MiB",
            redis=True,
            more=[f"--otlp-traces-endpoint={receiver.endpoint}", "--trace-sample-rate=0", f"--api-key={KEY}"],
        ) as stack,
    ):
        outputs = []
        for _ in range(2):
            answer = ask(
                stack,
                "/v1/completions",
                model=stack.model,
                prompt=PROMPT,
                max_tokens=24,
                ignore_eos=True,
                temperature=0,
            )
            assert answer.status_code == 200
            outputs.append(answer.json()["choices"][0]["text"])
        ask(stack, "/v1/completions", model=stack.model, prompt="")
        yield WatchedStack(stack, tuple(outputs))


@pytest.fixture(scope="package")
def stack(watched: WatchedStack) -> RunningStack:
    return watched.stack
