"""The scheduler's half of a KV connector, kept from harming the engine: on a thread of its own, with deadlines.

What it raises is logged and counted, what it answers is checked, and while it hangs or has failed too often nothing is
asked of it. The core never waits for it; a plan waits for its metadata no longer than a lookup may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from kvstore.connectors.interface import CacheLayout, ConnectorOutput, ConnectorRequest, KVConnectorBase
from kvstore.connectors.plans import connector_step
from services.scheduler import metrics
from services.scheduler.core.events import (
    ConnectorKeeps,
    ConnectorLookUp,
    ConnectorMatched,
    ConnectorReport,
    ConnectorRequestFinished,
)
from services.scheduler.core.limits import ConnectorUse
from shared.blocks import split_hashes
from shared.ids import Incarnation
from shared.messages.worker import ConnectorPlan, StepPlan
from shared.reliability.retry import Backoff, CircuitBreaker

log = logging.getLogger(__name__)

MAX_METADATA = 64 * 1024
"""Bytes of what `build_connector_meta` makes for one plan."""
MAX_CALLS = 1024
"""Calls that wait for the connector; a further one fails at once."""
FAILURES_IN_A_ROW = 3
PAUSE = Backoff(first=1.0, longest=60.0)
MAX_REQUESTS = 1024
"""Requests that were looked up and are remembered for `update_state_after_alloc`; the oldest are forgotten first."""
MAX_PLANS = 64
"""Plans whose metadata is remembered, for one that is sent again; more are never in flight."""
FINISH_TIMEOUT = 1.0
"""Seconds for `request_finished`, for which nobody waits but blocks."""

_T = TypeVar("_T")


class ConnectorFailed(Exception):
    """A call that was not answered soundly in time; the text says why."""


class SchedulerConnector(NamedTuple):
    """The scheduler's half of a connector, and what the engine does by it."""

    connector: KVConnectorBase
    use: ConnectorUse


class _Call(NamedTuple):
    work: Callable[[], Any]
    answer: asyncio.Future[Any]
    deadline: float
    """On `time.monotonic`'s clock. A call that has waited for longer is left out."""


class ConnectorHost:
    """Owns the connector's half beside the scheduler, and the thread that calls it. Made on the event loop."""

    def __init__(
        self,
        connector: KVConnectorBase,
        deadline: float,
        on_reply: Callable[[ConnectorMatched | ConnectorKeeps], Awaitable[None]],
    ) -> None:
        """`deadline`: seconds that a plan may wait for its metadata."""
        self._connector = connector
        self._deadline = deadline
        self._on_reply = on_reply
        self._layout = CacheLayout("", 0)
        self._block_size = 0
        self._requests: OrderedDict[str, ConnectorRequest] = OrderedDict()
        self._plans: OrderedDict[tuple[Incarnation, int], StepPlan] = OrderedDict()
        self._breaker = CircuitBreaker(FAILURES_IN_A_ROW, 0.0, PAUSE)
        self._calls: queue.Queue[_Call] = queue.Queue(MAX_CALLS)
        self._asked: deque[ConnectorLookUp | ConnectorRequestFinished] = deque()
        self._wanted = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="connector", daemon=True).start()

    def set_layout(self, cache_format: str, world_size: int, block_size: int) -> None:
        """The engine has ranks with such caches, in blocks of `block_size` tokens."""
        self._layout = CacheLayout(cache_format, world_size)
        self._block_size = block_size

    # ---- what the core asks

    def take(self, output: ConnectorLookUp | ConnectorRequestFinished | ConnectorReport) -> None:
        """Asks soon; the reply comes by `on_reply`, a sound one or that there is nothing. A report has none."""
        if isinstance(output, ConnectorReport):
            self._report(output)
        else:
            self._asked.append(output)
            self._wanted.set()

    async def run(self) -> None:
        """Carries questions and replies until it is cancelled. What a reply raises in the core, a bug, is raised."""
        async with asyncio.TaskGroup() as replies:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                while self._asked:
                    replies.create_task(self._reply(self._asked.popleft()))

    async def _reply(self, asked: ConnectorLookUp | ConnectorRequestFinished) -> None:
        if isinstance(asked, ConnectorLookUp):
            await self._on_reply(await self._matched(asked))
        else:
            await self._on_reply(await self._keeps(asked))

    async def _matched(self, asked: ConnectorLookUp) -> ConnectorMatched:
        hashes, block_size = tuple(split_hashes(asked.hashes)), self._block_size
        request = ConnectorRequest(asked.request, asked.tokens, hashes, self._layout)
        self._requests[asked.request] = request
        while len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)

        def call() -> tuple[int, bool]:
            found = self._connector.get_num_new_matched_tokens(request, asked.num_computed_tokens)
            return _checked_match(found, len(hashes) * block_size - asked.num_computed_tokens, block_size)

        try:
            tokens, awaited = await self._ask("get_num_new_matched_tokens", call, asked.timeout)
        except ConnectorFailed:
            return ConnectorMatched(asked.lease, 0)
        return ConnectorMatched(asked.lease, tokens, awaited)

    async def _keeps(self, asked: ConnectorRequestFinished) -> ConnectorKeeps:
        self._requests.pop(asked.request, None)

        def call() -> bool:
            return bool(self._connector.request_finished(asked.request, asked.blocks))

        try:
            return ConnectorKeeps(asked.lease, await self._ask("request_finished", call, FINISH_TIMEOUT))
        except ConnectorFailed:
            return ConnectorKeeps(asked.lease, False)

    def _report(self, report: ConnectorReport) -> None:
        names = frozenset({report.request})
        output = ConnectorOutput(
            finished_sending=names if report.kind == "sent" else frozenset(),
            finished_recving=names if report.kind == "received" else frozenset(),
            failed=names if report.kind == "failed" else frozenset(),
        )
        # A call of its own, whose failure is counted where it happens.
        self._submit("update_connector_output", lambda: self._connector.update_connector_output(output), FINISH_TIMEOUT)

    # ---- what a plan carries

    async def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with the connector's metadata; without, where there is none in time: then the ranks report its
        parts as failed. The same plan again has the same."""
        if plan.connector is None:
            return plan
        key = plan.epoch, plan.step
        if key not in self._plans:
            self._plans[key] = replace(plan, connector=await self._with_metadata(plan.connector))
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return self._plans[key]

    async def _with_metadata(self, planned: ConnectorPlan) -> ConnectorPlan:
        step = connector_step(planned, self._layout)
        requests = [self._requests.get(load.run.request) for load in planned.loads]
        block_size = self._block_size

        def call() -> bytes:
            for run, request in zip(step.loads, requests, strict=True):
                if request is None:
                    raise ConnectorFailed(f"{run.request_id} is forgotten")
                tokens = len(run.block_ids) * block_size
                self._connector.update_state_after_alloc(request, run.block_ids, tokens)
            return _checked_metadata(self._connector.build_connector_meta(step))

        try:
            return replace(planned, metadata=await self._ask("build_connector_meta", call, self._deadline))
        except ConnectorFailed:
            return planned

    async def close(self) -> None:
        """Lets the connector shut down, unless it takes longer than FINISH_TIMEOUT."""
        with contextlib.suppress(ConnectorFailed):
            await self._ask("shutdown", self._connector.shutdown, FINISH_TIMEOUT)

    # ---- calls

    async def _ask(self, what: str, work: Callable[[], _T], timeout: float) -> _T:
        """Raises ConnectorFailed."""
        answer = self._submit(what, work, timeout)
        if answer is None:
            raise ConnectorFailed(what)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            self._record_failure(what, f"no answer for {timeout:g} s")
            raise ConnectorFailed(what) from None
        except Exception as error:  # whatever a foreign package raises; it was counted where it was raised
            raise ConnectorFailed(repr(error)) from None

    def _submit(self, what: str, work: Callable[[], _T], timeout: float) -> asyncio.Future[_T] | None:
        """None while the connector is left alone."""
        self._breaker.update(time.monotonic())
        if self._breaker.is_open:
            return None
        answer: asyncio.Future[_T] = self._loop.create_future()
        answer.add_done_callback(lambda done: self._record_answer(what, done))
        try:
            self._calls.put_nowait(_Call(work, answer, time.monotonic() + timeout))
        except queue.Full:
            answer.cancel()
            self._record_failure(what, f"{MAX_CALLS} calls wait")
            return None
        return answer

    def _record_answer(self, what: str, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self._breaker.record_success()
        else:
            self._record_failure(what, repr(error))

    def _record_failure(self, what: str, problem: str) -> None:
        was_open = self._breaker.is_open
        self._breaker.record_failure(time.monotonic())
        metrics.CONNECTOR_FAILURES.labels(what).inc()
        if not was_open:
            log.warning(
                "kv connector failed", extra={"call": what, "problem": problem, "paused": self._breaker.is_open}
            )

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call.answer.done() or time.monotonic() > call.deadline:
                continue
            try:
                result = call.work()
            except BaseException as error:  # a foreign package may raise anything; this thread must outlive it
                self._resolve(call.answer, None, error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                self._resolve(call.answer, result, None)

    def _resolve(self, answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        def resolve() -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        try:
            self._loop.call_soon_threadsafe(resolve)
        except RuntimeError:  # the loop is closed: the process is ending
            return


def _checked_match(found: object, most: int, block_size: int) -> tuple[int, bool]:
    """Raises ConnectorFailed for what is no answer to a lookup behind which there are `most` tokens in full blocks."""
    tokens, awaited = found if isinstance(found, tuple) and len(found) == 2 else (found, False)
    if tokens is None:
        return 0, False
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0 or not isinstance(awaited, bool):
        raise ConnectorFailed(f"{found!r} is no number of tokens")
    if tokens > most + block_size:
        raise ConnectorFailed(f"{tokens} tokens, of {most} that were asked for")
    return tokens, awaited


def _checked_metadata(made: object) -> bytes:
    """Raises ConnectorFailed."""
    if not isinstance(made, bytes | bytearray) or len(made) > MAX_METADATA:
        size = f"{len(made)} bytes" if isinstance(made, bytes | bytearray) else f"a {type(made).__name__}"
        raise ConnectorFailed(f"{size}, where at most {MAX_METADATA} bytes are expected")
    return bytes(made)
