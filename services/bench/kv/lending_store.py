"""The other node's store in `bench kv`: a process that lends the blocks of an arena over gRPC until its input ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence

import msgspec

from kvstore.carried import CarriedBlock
from kvstore.owned_arena import OwnedArena
from kvstore.transfer.server import TransferServer
from services.bench.kv.blocks import KvShape, arena, fill, make_blocks
from shared.blocks import BlockHash

HOST = "127.0.0.1"
LAYOUT = "bench"


class Shelf:
    """A `kvstore.tiers.Lender` of one arena, which nobody else writes to."""

    def __init__(self, lent: OwnedArena) -> None:
        self._arena = lent
        self._slots = {lent.header(slot).hash: slot for slot in range(lent.slots)}

    def lend(
        self, layout: str, hashes: Sequence[BlockHash]
    ) -> contextlib.AbstractContextManager[Sequence[CarriedBlock]] | None:
        return self._lent(hashes) if layout == LAYOUT else None

    @contextlib.contextmanager
    def _lent(self, hashes: Sequence[BlockHash]) -> Iterator[Sequence[CarriedBlock]]:
        yield [self._arena.carried(self._slots[name]) for name in hashes if name in self._slots]


async def serve(shape: KvShape) -> None:
    """Prints the port, once it listens."""
    with arena(shape) as lent:
        fill(lent, make_blocks(shape))
        server = TransferServer(Shelf(lent))
        print(await server.start(HOST, 0), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=KvShape)))
