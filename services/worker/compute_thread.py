"""The one thread that touches the device: plans in, outputs out, nothing else. Knows no bus."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from services.worker.backend import Backend, LaunchingBackend, PreparingBackend
from services.worker.computing import compute_all
from services.worker.copy_thread import CopyThread
from services.worker.launching import Launching
from services.worker.preparing import Preparing
from services.worker.step_flow import Computed, StepFlow
from shared.messages.worker import StepPlan

STOP_SECONDS = 2.0


class ComputeThread:
    """Owns the thread and, on it, the backend: libraries keep state per thread, so it is made there too.

    The threads are daemons: a device that hangs must not keep the process from ending.
    """

    def __init__(self, make_backend: Callable[[], Backend], copies: CopyThread, *, skip_void: bool) -> None:
        """`skip_void`: see `StepFlow`."""
        self._make_backend = make_backend
        self._copies = copies
        self._flow = StepFlow(copies, skip_void=skip_void)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    async def start(self) -> Backend:
        """The backend, ready. Raises what making it raised."""
        ready: asyncio.Future[Backend] = self._loop.create_future()
        self._ready = ready
        self._thread.start()
        return await ready

    def submit(self, plan: StepPlan, *, first: bool) -> None:
        """Executes `plan` after those before it; `first` begins a new epoch. Raises queue.Full."""
        self._flow.submit(plan, first=first)

    async def result(self) -> Computed:
        """The next step's output, in the order of the plans. Raises what computing raised."""
        return await self._flow.result()

    async def stop(self) -> None:
        """Ends the thread after the step in hand, or leaves it behind when that does not end."""
        try:
            self._flow.end()
        except queue.Full:
            return
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if not self._thread.is_alive():
            self._flow.close()

    def _run(self) -> None:
        try:
            backend = self._make_backend()
            self._copies.start(backend.kv)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_fail, self._ready, error)
            return
        self._loop.call_soon_threadsafe(_resolve, self._ready, backend)
        try:
            self._compute_with(backend)
        except BaseException as error:
            self._flow.hand_over(error)

    def _compute_with(self, backend: Backend) -> None:
        """In whichever way the backend knows."""
        if isinstance(backend, LaunchingBackend):
            Launching(self._flow, backend).launch_all()
        elif isinstance(backend, PreparingBackend):
            Preparing(self._flow, backend).compute_all()
        else:
            compute_all(self._flow, backend)


def _resolve(ready: asyncio.Future[Backend], backend: Backend) -> None:
    if not ready.done():
        ready.set_result(backend)


def _fail(ready: asyncio.Future[Backend], error: BaseException) -> None:
    if not ready.done():
        ready.set_exception(error)
