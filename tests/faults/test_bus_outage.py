"""The bus is away for longer than requests wait for it: all end, nothing of them is left, and all serves again. It
stands still for longer than processes may be silent: none is ended for that."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import openai
from openai import AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE, blocks_in_use, client_of, stream_chat
from tests.support.cluster.nats_server import NatsServer
from tests.support.cluster.stack import RunningStack, running_stack

STREAMS = 8
OUTAGE_S = 3
WAIT_S = 1


async def test_requests_end_after_a_while_without_a_bus_and_leave_nothing(tmp_path: Path, own_nats: NatsServer) -> None:
    more = [f"--nats-url={own_nats.url}", f"--bus-outage-s={OUTAGE_S}", "--sim-step-ms=20"]
    with running_stack(tmp_path, device="sim", more=more, wait_for_engines=WAIT_S) as stack:
        async with client_of(stack.url) as client, httpx2.AsyncClient(timeout=DEADLINE) as http:
            begun = [asyncio.Event() for _ in range(STREAMS)]
            streams = [asyncio.create_task(endless(client, stack, started)) for started in begun]
            body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
            waiting = asyncio.create_task(http.post(f"{stack.url}/v1/completions", json=body))
            async with asyncio.timeout(DEADLINE):
                await asyncio.gather(*(started.wait() for started in begun))
            own_nats.kill()
            ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), DEADLINE)
            assert all(isinstance(error, openai.APIError) for error in ended), ended
            assert all(f"the bus is away for {OUTAGE_S} s" in str(error) for error in ended)
            answer = await waiting
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            ready = await http.get(f"{stack.url}/ready")
            refused = await http.post(f"{stack.url}/v1/completions", json=body)
            assert (ready.status_code, refused.status_code, refused.headers["retry-after"]) == (503, 503, "1")
            assert ready.json()["reason"] in refused.json()["error"]["message"]
            own_nats.start()
            await asyncio.to_thread(stack.wait_until_it_serves)
            assert await blocks_in_use(stack) == 0
            again = await stream_chat(client, stack.model, "Who are you?", max_tokens=8)
            assert again.completion_tokens is not None
            await stack.until_heard(lambda said: all(life.load == 0 for life in said.values()))


async def test_no_process_is_ended_for_the_silence_of_a_bus_that_stands_still(tmp_path: Path) -> None:
    """It keeps its connections for longer than the watchdog waits for a word of a process."""
    with running_stack(tmp_path, device="sim", kvstore="0") as stack:
        before = {each.instance: each.pid for each in stack.state.members}
        bus = stack.state.nats_pid
        assert bus is not None
        async with client_of(stack.url) as client:
            stream = asyncio.create_task(stream_chat(client, stack.model, "Hi", max_tokens=8))
            os.kill(bus, signal.SIGSTOP)
            try:
                await asyncio.sleep(stack.state.spec.silence_limit + 3)
            finally:
                os.kill(bus, signal.SIGCONT)
            assert (await asyncio.wait_for(stream, DEADLINE)).completion_tokens == 8
        assert {each.instance: each.pid for each in stack.state.members} == before


async def test_a_bus_that_stands_still_for_good_is_replaced_and_streams_go_on(tmp_path: Path) -> None:
    """After half a minute without a connection: requests wait a whole one."""
    with running_stack(tmp_path, device="sim", kvstore="0", more=["--sim-step-ms=20"]) as stack:
        before = {each.instance: each.pid for each in stack.state.members}
        bus = stack.state.nats_pid
        assert bus is not None
        async with client_of(stack.url) as client:
            begun = [asyncio.Event() for _ in range(STREAMS)]
            more = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
            streams = [asyncio.create_task(stream_chat(client, stack.model, "Hi", each, **more)) for each in begun]
            async with asyncio.timeout(DEADLINE):
                await asyncio.gather(*(each.wait() for each in begun))
            os.kill(bus, signal.SIGSTOP)
            await asyncio.to_thread(stack.until, lambda state: state.nats_pid not in (None, bus), 2 * DEADLINE)
            async with asyncio.timeout(DEADLINE):
                assert [each.completion_tokens for each in await asyncio.gather(*streams)] == [100] * STREAMS
        assert {each.instance: each.pid for each in stack.state.members} == before


async def endless(client: AsyncOpenAI, stack: RunningStack, started: asyncio.Event) -> None:
    await stream_chat(client, stack.model, "Hi", started, max_tokens=2000, extra_body={"ignore_eos": True})
