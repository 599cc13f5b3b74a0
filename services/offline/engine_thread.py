"""All services in a thread of their own, so that scripts and notebooks can call them like a function."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from services.offline.errors import EngineFailed
from services.offline.local_cluster import LocalCluster
from services.offline.settings import ServiceConfigs

T = TypeVar("T")

STOP_SECONDS = 15.0


class EngineThread:
    """Owns the thread, its event loop and the cluster. May be used from any other thread.

    The thread is a daemon: a device that hangs must not keep the interpreter from ending.
    """

    def __init__(self, configs: ServiceConfigs, start_timeout: float) -> None:
        """Returns when requests are served. Raises EngineFailed."""
        self.cluster = LocalCluster(configs)
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-engine", daemon=True)
        self._closed = False
        self._thread.start()
        atexit.register(self._leave)
        try:
            self.wait(self.cluster.start(start_timeout))
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs `work` on the loop, and returns its future. Raises EngineFailed once closed."""
        if self._closed:
            work.close()
            raise EngineFailed("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop, and returns its result. An interrupt (Ctrl-C) cancels it. Raises EngineFailed once
        closed."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the cluster and the thread. Safe to call again."""
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
        await self.cluster.stop()
        await self._loop.shutdown_default_executor()

    def _leave(self) -> None:
        """At the interpreter's end no thread can be given work any more, so the loop just stops where it is."""
        self._closed = True
        self._loop.set_exception_handler(lambda loop, context: None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
