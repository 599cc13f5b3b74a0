"""The ring on an event loop in a thread of its own, so that scripts and notebooks can call it like a function."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from services.offline.errors import EngineFailed
from services.offline.in_process import Answer, call
from services.offline.ring import Ring
from services.offline.settings import Configs

T = TypeVar("T")

STOP_SECONDS = 15.0


class EngineThread:
    """Owns thread, loop and ring. Safe to be used from any other thread.

    The thread is a daemon: a device that hangs must not keep the interpreter from ending.
    """

    def __init__(self, configs: Configs, start_timeout: float) -> None:
        """Returns when requests are served. Raises EngineFailed."""
        self._ring = Ring(configs)
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-engine", daemon=True)
        self._closed = False
        self._thread.start()
        atexit.register(self._leave)
        try:
            self.wait(self._ring.start(start_timeout))
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs `work` on the loop. Raises EngineFailed once closed."""
        if self._closed:
            work.close()
            raise EngineFailed("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt (Ctrl-C) cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, method: str, path: str, body: bytes, request_id: str | None = None) -> Answer:
        """On the loop: a call of the gateway. Raises EngineFailed where the ring ends meanwhile."""
        answer = asyncio.create_task(call(self._ring.app, method, path, body, request_id))
        end = asyncio.create_task(self._ring.ended())
        try:
            await asyncio.wait([answer, end], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._ring.failure()
            return await answer
        finally:
            for task in (answer, end):
                task.cancel()
            with contextlib.suppress(Exception):
                await asyncio.gather(answer, end, return_exceptions=True)

    @property
    def context(self) -> int:
        """Tokens that a sequence may reach."""
        return self._ring.context

    def close(self) -> None:
        """Ends the ring and the thread. Safe to call again."""
        if self._closed:
            return
        atexit.unregister(self._leave)
        stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._closed = True
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
            stopping.result(STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        await self._ring.stop()
        await self._loop.shutdown_default_executor()

    def _leave(self) -> None:
        """At the interpreter's end: threads can be asked for nothing any more, so the loop just stops where it is."""
        self._closed = True
        self._loop.set_exception_handler(lambda loop, context: None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not to be had on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
