"""How long a first connection may take."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.nats_bus import _in_time


async def test_a_client_that_takes_a_cancellation_for_another_s_is_given_up_nevertheless() -> None:
    taken = 0

    async def connect() -> None:
        nonlocal taken
        while taken < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                taken += 1
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await _in_time(connect(), 0.01)
    assert taken == 2


async def test_what_a_client_raises_is_raised() -> None:
    async def connect() -> None:
        await asyncio.sleep(0)
        raise ConnectionRefusedError("nobody there")

    with pytest.raises(ConnectionRefusedError, match="nobody there"):
        await _in_time(connect(), 60)


async def test_only_a_client_that_is_refused_is_given_up_early() -> None:
    connected = asyncio.Event()

    async def connect() -> None:
        await connected.wait()

    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await _in_time(connect(), 3600, 0.01, lambda: True)
        slow = asyncio.create_task(_in_time(connect(), 3600, 0.01, lambda: False))
        await asyncio.sleep(0.1)
        connected.set()
        await slow
