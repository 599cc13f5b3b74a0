"""`baton bench hops` on a whole stack with a simulated device: messages and bytes of real processes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import psutil
import pytest

from services.bench.errors import BenchError
from services.bench.hops.command import hops_options
from services.bench.hops.ring import generated_tokens
from services.bench.hops.streams import open_streams
from tests.support.cluster.stack import running_stack

REQUEST_HOPS = 6


def test_every_hop_of_a_token_and_of_a_request_is_measured(tmp_path: Path) -> None:
    with running_stack(tmp_path, device="sim", more=("--sim-step-ms=20",), kvstore="0") as stack:
        flags = ("--streams", "4", "--seconds", "2", "--requests", "8", "--output-len", "1500", "--json")
        real_time = ("--real-time",) if os.geteuid() == 0 else ()  # others are not allowed to
        done = stack.baton("bench", "hops", *flags, *real_time)
        assert done.returncode == 0, done.stderr
        ring = stack.baton("bench", "ring", "--streams", "4", "--seconds", "0.5", "--json")
        assert ring.returncode == 0, ring.stderr
    result = json.loads(done.stdout)
    assert len(result["request"]) == REQUEST_HOPS
    assert all(hop["count"] > 0 for hop in result["request"].values())
    (level,) = result["levels"]
    assert (level["streams"], level["steps"] > 10) == (4, True)
    assert level["tokens"] >= 4 * level["steps"]
    assert all(hop["count"] > 0 and hop["p50_us"] > 0 for hop in level["hops"].values())
    sent = {name.partition(":")[0]: hop["bytes_per_step"] for name, hop in level["hops"].items()}
    assert sent["detokenizer"] > 4 * 20, "four streams' text, with their names"
    assert level["frame_bytes"] > 100, "a chunk in OpenAI's shape"
    assert set(level["processor_us_per_step"]) >= {"gateway", "scheduler", "worker", "detokenizer", "nats-server"}
    (level,) = json.loads(ring.stdout)["levels"]
    assert 0 < level["output_throughput"] <= 4 / 0.020 * 1.5, "four streams, a token each in 20 ms"
    assert {share["actor"] for share in level["server_cpu"]} >= {"gateway", "scheduler", "worker", "nats-server"}


async def test_a_reader_that_ends_within_a_measurement_says_why() -> None:
    refusal, event = "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "data: {}\n\n"
    stream = f"HTTP/1.1 200 OK\r\nContent-Length: {len(event)}\r\n\r\n{event}"
    answers = iter([stream])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(next(answers, refusal).encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def measure() -> None:
        async with open_streams(url, "any", None, 1, 8) as reading:
            while psutil.Process(reading).is_running():
                await asyncio.sleep(0.05)

    async with server, asyncio.timeout(60):
        with pytest.raises(BenchError, match="the streams: HTTP 503: the server opens no more than 1"):
            await measure()


def test_tokens_are_counted_over_all_models_and_gateways() -> None:
    page = b"""# TYPE baton_gateway_generation_tokens_total counter
baton_gateway_generation_tokens_total{gateway="gateway-1",model="a"} 3.0
baton_gateway_generation_tokens_total{gateway="gateway-2",model="a"} 1e+03
baton_gateway_prompt_tokens_total{gateway="gateway-2",model="a"} 9.0
"""
    assert generated_tokens(page) == 1003
    assert generated_tokens(b"") == 0


def test_bad_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        hops_options(["--streams", "0"])
    assert ended.value.code == 2
    assert "'0': a whole number from 1 is expected" in capsys.readouterr().err
