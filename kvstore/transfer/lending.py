"""Which blocks are sent to whom, and how many at a time: the sender's side of a transfer, whatever carries it.

A fetch with patience follows a prompt while it is computed: it is sent each block as soon as that is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvstore import metrics
from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.transfer.interface import BlockLender
from shared.blocks import BlockHash

TIER = "peer"
MAX_SENDING = 16
"""Fetches served at a time; the next one is refused, which is a miss to its sender."""
MAX_FOLLOWING = 64
"""Fetches with patience at a time, which mostly wait."""
MAX_PATIENCE = 10.0
"""Seconds that a fetch may wait for one block, whatever it asks for."""
MAX_FETCH_SECONDS = 30.0
"""Limits one fetch, whatever the caller's deadline, because the blocks being sent are pinned."""
LENT_BLOCKS = 32
"""Pinned at a time for one fetch, however many it asks for."""

SendGroup = Callable[[Sequence[InFlightBlock], bool], Awaitable[None]]
"""Sends some blocks, and whether the first of them was waited for; returns when their memory is not read any more."""


class FetchRefused(Exception):
    """The fetch is not served."""

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(details)
        self.reason = reason
        """A gRPC status in small letters: what the receiver counts."""


class BlockLending:
    """Owns the count of fetches being served, by all transports together. What is sent is pinned, and no longer."""

    def __init__(self, lender: BlockLender, max_sending: int = MAX_SENDING) -> None:
        self._lender = lender
        self._max_sending = max_sending
        self.sending = 0
        self.following = 0

    async def serve(
        self,
        layout: str,
        hashes: Sequence[BlockHash],
        patience: float,
        send: SendGroup,
        *,
        transport: str,
        group_bytes: int = 0,
    ) -> None:
        """Sends the leading run of `hashes` by `send`, in groups of up to `group_bytes` or of one block. Raises
        FetchRefused, TimeoutError when it has taken too long, and what `send` raises."""
        patience = min(max(0.0, patience), MAX_PATIENCE)
        count, limit = (self.following, MAX_FOLLOWING) if patience else (self.sending, self._max_sending)
        if count >= limit:
            raise FetchRefused("resource_exhausted", f"{count} are being served")
        with self._counted(follows=patience > 0):
            async with asyncio.timeout(MAX_FETCH_SECONDS):
                await self._send_run(layout, hashes, patience, send, transport, group_bytes)

    async def _send_run(
        self,
        layout: str,
        hashes: Sequence[BlockHash],
        patience: float,
        send: SendGroup,
        transport: str,
        group_bytes: int,
    ) -> None:
        sent, waited = 0, False
        while wanted := hashes[sent : sent + LENT_BLOCKS]:
            lent = self._lender.lend(layout, wanted)
            if lent is None:
                raise FetchRefused("not_found", f"no blocks of layout {layout}")
            with lent as blocks:
                for group in groups(blocks, group_bytes):
                    await self._send_group(group, waited, send, transport)
                    waited = False
            sent, waited = sent + len(blocks), not blocks
            # Nothing is awaited between the look at the arena and the wait, so that no commit is missed.
            if not blocks and not (patience and await self._lender.committed(layout, wanted[0], patience)):
                return
            if len(blocks) < len(wanted) and not patience:
                return

    async def _send_group(self, group: Sequence[InFlightBlock], waited: bool, send: SendGroup, transport: str) -> None:
        size = sum(len(block.payload) for block in group)
        await self._lender.copying(size)
        await send(group, waited)
        metrics.TIER_STORED.labels(TIER).inc(len(group))
        metrics.TIER_BYTES_OUT.labels(TIER).inc(size)
        metrics.TRANSFER_BYTES.labels(transport, "out").inc(size)

    @contextlib.contextmanager
    def _counted(self, *, follows: bool) -> Iterator[None]:
        self.following += follows
        self.sending += not follows
        try:
            yield
        finally:
            self.following -= follows
            self.sending -= not follows


def groups(blocks: Sequence[InFlightBlock], size: int) -> Iterator[Sequence[InFlightBlock]]:
    """`blocks` in runs of up to `size` bytes, each of one block at least."""
    start = total = 0
    for at, block in enumerate(blocks):
        if at > start and total + len(block.payload) > size:
            yield blocks[start:at]
            start, total = at, 0
        total += len(block.payload)
    if start < len(blocks):
        yield blocks[start:]
