"""Blocks from the store of another node, through the stores' own TCP transport: fetched, checked, put into an arena."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.arena.owned_arena import OwnedArena
from kvstore.transfer.interface import BlockName, BlockRequest
from kvstore.transfer.tcp_transport import TcpTransport
from services.bench.kv.blocks import KvOptions, KvShape, arena, fill, make_blocks, names
from services.bench.kv.rates import KvTransferRate, MemoryCopy, PathFailed
from shared.addresses import host_and_port
from shared.blocks import BlockHash

NAME = "store to store"
STOP_TIMEOUT = 10.0


def measure(options: KvOptions) -> list[KvTransferRate]:
    """All blocks fetched from another store on loopback, round by round. Raises PathFailed."""
    with _other_store(options.shape) as address:
        return [asyncio.run(_fetched(options.shape, options.rounds, address))]


async def _fetched(shape: KvShape, rounds: int, address: str) -> KvTransferRate:
    """Raises PathFailed."""
    transport, copy, seconds, copied = TcpTransport(None), MemoryCopy(shape), [], []
    background = asyncio.create_task(transport.run())
    try:
        with arena(shape) as target:
            for _ in range(rounds + 1):  # the first one connects and counts for nothing
                copied.append(copy.seconds())
                begin, slot = time.perf_counter(), 0
                wanted, room = BlockRequest(LAYOUT, names(shape)), ArenaRoom(target)
                async for block in transport.fetch(address, wanted, shape.block, room):
                    target.write_checksums(slot, block.checksums)
                    slot += 1
                seconds.append(time.perf_counter() - begin)
                if slot < shape.blocks:
                    raise PathFailed(f"{slot} of {shape.blocks} blocks came")
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
    return KvTransferRate(NAME, shape.total_bytes, seconds[1:], copied[1:])


@contextlib.contextmanager
def _other_store(shape: KvShape) -> Iterator[str]:
    """Yields its address. Raises PathFailed, with its last log lines, if it does not start."""
    described = msgspec.json.encode(shape).decode()
    process = subprocess.Popen(
        [sys.executable, "-m", "services.bench.kv.store_to_store", described],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port.isdecimal():
            raise PathFailed("the other store did not start")
        yield host_and_port(HOST, int(port))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STOP_TIMEOUT)
        process.kill()
        process.wait()


# The other node's store in `bench kv`: a process that lends the blocks of an arena over TCP until its input ends.


HOST = "127.0.0.1"
LAYOUT = "bench"


class ArenaRoom:
    """A `kvstore.transfer.interface.BlockDestination`: the slots of an arena, in order."""

    seconds = 60.0

    def __init__(self, target: OwnedArena) -> None:
        self._arena = target
        self._next = 0

    def reserve(self, blocks: Sequence[BlockName]) -> Sequence[memoryview | None]:
        """The next slots."""
        first, self._next = self._next, min(self._arena.slots, self._next + len(blocks))
        return [self._arena.payload(slot) for slot in range(first, self._next)]


class ArenaLender:
    """A `kvstore.transfer.interface.BlockLender` of one arena, which has no other writer."""

    def __init__(self, lent: OwnedArena) -> None:
        self._arena = lent
        self._slots = {lent.header(slot).hash: slot for slot in range(lent.slots)}

    def lend(
        self, layout: str, hashes: Sequence[BlockHash]
    ) -> contextlib.AbstractContextManager[Sequence[InFlightBlock]] | None:
        """The blocks of those hashes that the arena holds, in order; None for a layout that it does not hold."""
        return self._lent(hashes) if layout == LAYOUT else None

    async def copying(self, size: int) -> None:
        """At once: nothing else copies here."""

    async def committed(self, layout: str, name: BlockHash, seconds: float) -> bool:
        """False: nothing is being computed here."""
        return False

    @contextlib.contextmanager
    def _lent(self, hashes: Sequence[BlockHash]) -> Iterator[Sequence[InFlightBlock]]:
        yield [self._arena.in_flight(self._slots[name]) for name in hashes if name in self._slots]


async def serve(shape: KvShape) -> None:
    """Prints the port, once it listens."""
    with arena(shape) as lent:
        fill(lent, make_blocks(shape))
        transport = TcpTransport(None)
        print(await transport.listen(ArenaLender(lent), HOST, 0), flush=True)
        serving = asyncio.create_task(transport.run())
        await asyncio.to_thread(sys.stdin.read)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=KvShape)))
