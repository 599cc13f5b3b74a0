"""Blocks from the store of another node, through the stores' own gRPC client: fetched, checked, put into an arena."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec

from kvstore.transfer.client import TransferClient
from kvstore.transfer.rpc import host_and_port
from services.bench.core.kv_rates import Missing, Moved
from services.bench.kv.blocks import KvShape, arena, names
from services.bench.kv.lending_store import HOST, LAYOUT
from services.bench.kv.plain_copy import PlainCopy
from shared.ids import NodeId

NAME = "store to store"
STOP_SECONDS = 10.0


class _Broken(Exception):
    """The other store did not do as it was asked; the text says what."""


def measure(shape: KvShape, rounds: int) -> list[Moved | Missing]:
    try:
        with _other_store(shape) as address:
            return [asyncio.run(_fetched(shape, rounds, address))]
    except _Broken as error:
        return [Missing(NAME, str(error))]


async def _fetched(shape: KvShape, rounds: int, address: str) -> Moved:
    """Raises _Broken."""
    client, copy, seconds, copied = TransferClient(lambda node: address), PlainCopy(shape), [], []
    background = asyncio.create_task(client.run())
    try:
        with arena(shape) as target:
            for _ in range(rounds + 1):  # the first one connects and counts for nothing
                copied.append(copy.seconds())
                begin, slot = time.perf_counter(), 0
                async for block in client.fetch(NodeId("other"), LAYOUT, names(shape), shape.block):
                    target.fill(slot, block)
                    slot += 1
                seconds.append(time.perf_counter() - begin)
                if slot < shape.blocks:
                    raise _Broken(f"{slot} of {shape.blocks} blocks came")
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
    return Moved(NAME, shape.total_bytes, seconds[1:], copied[1:])


@contextlib.contextmanager
def _other_store(shape: KvShape) -> Iterator[str]:
    """Yields its address. Raises _Broken, with its last words, where it does not start."""
    described = msgspec.json.encode(shape).decode()
    process = subprocess.Popen(
        [sys.executable, "-m", "services.bench.kv.lending_store", described],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port.isdecimal():
            raise _Broken("the other store did not start")
        yield host_and_port(HOST, int(port))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STOP_SECONDS)
        process.kill()
        process.wait()
