"""Who waits for a block to be committed: streams to other nodes that follow a prompt as it is computed."""

from __future__ import annotations

import asyncio

from shared.blocks import BlockHash

MAX_AWAITED = 1024
"""Waits at a time; further ones end at once, and their blocks are looked up later."""


class CommitWatch:
    """Owns the waits for blocks to be committed. Used on one event loop."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[str, BlockHash], list[asyncio.Future[bool]]] = {}
        self.waiting = 0

    def committed(self, layout: str, name: BlockHash) -> None:
        """A block is committed: whoever waits for it goes on."""
        for future in self._awaited.pop((layout, name), ()):
            if not future.done():
                future.set_result(True)

    async def wait(self, layout: str, name: BlockHash, seconds: float) -> bool:
        """True once the block is committed; False after so many seconds, or at once where too many wait."""
        if self.waiting >= MAX_AWAITED:
            return False
        key, future = (layout, name), asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, []).append(future)
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return bool(await future)
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
            if future in (others := self._awaited.get(key, [])):
                others.remove(future)
                if not others:
                    del self._awaited[key]
