"""The operator's connection to a running stack's bus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from deploy.errors import CommandError
from deploy.supervisor.state_file import StackState
from shared import topics
from shared.bus import Bus, BusError, EndpointError, NoResponders, ReplyTimeout
from shared.bus.nats_connection import NatsOptions, connect

CONNECT_TIMEOUT = 30.0
"""Seconds for a bus that is there and does not answer: commands must work on a machine that is too busy, above all."""
REFUSED_TIMEOUT = 3.0
"""Seconds for one where nobody listens."""
ANSWER_TIMEOUT = 35.0
ASK_AGAIN = 5.0
"""Seconds without an answer; then somebody is asked once more. A bus of several servers may have given the question to
a host that it does not know to be gone yet. All that can be asked may be asked twice."""


@contextlib.asynccontextmanager
async def operator_bus(state: StackState) -> AsyncIterator[Bus]:
    """Raises CommandError where the bus cannot be reached."""
    options = NatsOptions(
        servers=state.nats_url,
        namespace=state.namespace,
        name="baton-command",
        user=state.nats_user,
        password=state.nats_password,
        tls_ca=Path(state.nats_ca) if state.nats_ca is not None else None,
    )
    async with client_bus(options) as bus:
        yield bus


@contextlib.asynccontextmanager
async def client_bus(options: NatsOptions) -> AsyncIterator[Bus]:
    """Raises CommandError where the bus cannot be reached within CONNECT_TIMEOUT, or REFUSED_TIMEOUT."""
    try:
        bus = await connect(replace(options, connect_timeout=CONNECT_TIMEOUT, refused_timeout=REFUSED_TIMEOUT))
    except BusError as error:
        raise CommandError(str(error)) from None
    try:
        yield bus
    finally:
        await bus.close()


async def ask_admin(state: StackState, endpoint: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a request to `admin.<endpoint>`, as `nats req` does. Raises CommandError with the refusal's text."""
    async with operator_bus(state) as bus:
        try:
            answer = await first_answer(bus, f"{topics.ADMIN}.{endpoint}", msgspec.json.encode(request))
        except EndpointError as error:
            raise CommandError(error.text) from None
        except NoResponders:
            raise CommandError("nobody is there to answer; see: baton ps") from None
        except ReplyTimeout:
            raise CommandError(f"no answer within {ANSWER_TIMEOUT:g} s") from None
    return dict(msgspec.json.decode(answer))


async def first_answer(bus: Bus, subject: str, body: bytes) -> bytes:
    """The first answer to a question that is asked every ASK_AGAIN seconds. Raises EndpointError, BusError."""
    deadline = time.monotonic() + ANSWER_TIMEOUT
    asked: set[asyncio.Task[bytes]] = set()
    try:
        while True:
            left = max(0.0, deadline - time.monotonic())
            asked.add(asyncio.create_task(bus.request_raw(subject, body, left)))
            answered, _ = await asyncio.wait(asked, timeout=ASK_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            if answered:
                return await answered.pop()
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
