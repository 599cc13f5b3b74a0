"""The threads that encode long prompts. Large ones have a thread of their own: no other prompt waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from shared.machine.heap import give_back_freed_memory

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

LARGE_BYTES = 64 * 2**10
"""Prompts above it are encoded one at a time: each takes more than 50 ms, and as long as it is large."""
MAX_PROMPTS = 1024
MAX_BYTES = 128 * 2**20
"""Long prompts that are being encoded or wait for it. Encoding them takes minutes already, and their clients wait."""


class _EncodingLane:
    """Threads, and who comes next. What waits for one is a task: cancelled, it leaves nothing behind, as it would in
    the threads' own queue."""

    def __init__(self, threads: int, name: str) -> None:
        self.turns = asyncio.Semaphore(threads)
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[[*Ts], R], *arguments: *Ts) -> R:
        """Returns what the function makes of its arguments."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)


class EncodingLanes:
    """Owns the threads, and the count of what is on them or waits for them.

    Encoding releases the interpreter's lock, so the event loop goes on beside all of them.
    """

    def __init__(self, threads: int, forget_words: Callable[[], None] = lambda: None) -> None:
        """`forget_words`: drops what the vocabulary keeps of what it encoded."""
        self._forget_words = forget_words
        self._long = _EncodingLane(threads, "encode")
        self._large = _EncodingLane(1, "encode-large")
        self._prompts = self._bytes = 0
        self._grown = False
        """Whether a large prompt has been encoded since memory was given back."""

    def add(self, size: int) -> None:
        """Counts a prompt of `size` bytes among those on their way, until `remove`."""
        self._prompts += 1
        self._bytes += size

    def remove(self, size: int) -> None:
        """A prompt of `size` bytes has been answered."""
        self._prompts -= 1
        self._bytes -= size
        self._grown = self._grown or size > LARGE_BYTES

    def refusal(self, size: int) -> str | None:
        """Returns why no further prompt of `size` bytes is taken now; None where there is room. An only one is always
        taken."""
        if self._prompts < MAX_PROMPTS and (not self._prompts or self._bytes + size <= MAX_BYTES):
            return None
        return f"{self._prompts} long prompts of {self._bytes} bytes wait to be tokenized, which is the limit"

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[_EncodingLane]:
        """Waits until a thread for a prompt of `size` bytes is free, which is the caller's for one `run`."""
        lane = self._long if size <= LARGE_BYTES else self._large
        async with lane.turns:
            yield lane

    def give_back_memory(self) -> None:
        """Called now and then: what large prompts took, a hundred times their size, goes back to the system once none
        is on its way."""
        if self._grown and not self._prompts:
            self._grown = False
            ended, self._large = self._large, _EncodingLane(1, "encode-large")
            self._large.threads.submit(self._give_back, ended.threads)

    def _give_back(self, ended: ThreadPoolExecutor) -> None:
        """Words that are kept lie between what was freed, each on a page that stays; so does what a thread keeps."""
        ended.shutdown()
        self._forget_words()
        give_back_freed_memory()

    def close(self) -> None:
        """Drops what no thread has begun."""
        for lane in (self._long, self._large):
            lane.threads.shutdown(wait=False, cancel_futures=True)
