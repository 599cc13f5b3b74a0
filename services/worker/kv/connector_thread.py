"""The thread that works for a KV connector beside the compute thread, which never waits for it but to begin an epoch.

Layers that are saved while those behind them are computed pass by a mark: the compute thread counts the layers whose
keys and values it has stored, and this thread saves them in their order. Layers that are loaded meanwhile pass by
another one, which the compute thread waits for before each attention. That is the only wait of it for this thread
within a step, and it is bounded: then the load has failed, and the step goes on without.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter

from kvstore.connectors.interface import CacheLayout, KVConnectorBase
from kvstore.connectors.plans import connector_step
from services.worker.kv.copy_thread import REST_TIMEOUT, CopyingStuck, TransferEnded
from shared.ids import Incarnation
from shared.messages.worker import ConnectorPlan, StepPlan
from shared.packing import unpack
from shared.telemetry.metrics import service_registry

if TYPE_CHECKING:
    from services.worker.kv.copier import RankKvCache

MAX_WAITING_PLANS = 1024
"""Plans that may wait for the connector; the parts of further ones fail. The scheduler asks for far less at a time."""
POLL_SECONDS = 0.005
"""Between two questions for what is finished, while something is awaited."""
REGISTER_TIMEOUT = 60.0
"""Seconds for `register_kv_caches`, at the start."""
STOP_TIMEOUT = 2.0
LAYERS_TIMEOUT = 1.0
"""Seconds that one step may wait for the layers of its loads, all together: all its sequences wait with it."""

log = logging.getLogger(__name__)

METRICS = service_registry("worker")
FAILURES = Counter(
    "baton_worker_kv_connector_failures_total",
    "Calls of the KV connector that raised, by method.",
    ["call"],
    registry=METRICS,
)


class ConnectorUnusable(Exception):
    """The connector cannot work with this rank; the text says why."""


@dataclass(slots=True)
class _Work:
    """One plan's part for the connector."""

    epoch: Incarnation
    planned: ConnectorPlan
    epochs: int
    """How many epochs had begun: under a greater count it must stop."""
    layers: int = 0
    """How many layers hold what the plan computes; written by the compute thread."""
    overlapped: bool = False
    """Whether the plan computes behind what it loads."""
    loaded: int = 0
    """How many layers hold what the plan loads; written by the connector's thread."""
    load_over: bool = False
    """Whether no further layer will be loaded; written by the connector's thread."""
    late: bool = False
    """Whether the step went on before its layers were loaded: what it computed behind them is void. Written by the
    compute thread."""
    patience: float = field(default_factory=lambda: LAYERS_TIMEOUT)
    """Seconds for which the step may still wait."""


class ConnectorThread:
    """Owns a rank's half of the connector, the plans that wait for it, and what it is awaited for.

    `before_step`, `after_step` and `layer_stored` are the compute thread's. Made on the event loop.
    """

    def __init__(self, connector: KVConnectorBase) -> None:
        self.connector = connector
        self._layers: dict[str, tuple[Any, Any]] = {}
        self.layout = CacheLayout("", 1)
        """What the caches look like; set by `start`."""
        self._device: Callable[[], AbstractContextManager[object]] = nullcontext
        """What its calls run under: on a GPU a stream of their own."""
        self._synchronize: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._current: _Work | None = None
        """The work of the step that is being computed."""
        self._late: _Work | None = None
        """Work whose layers came too late, and which is not over: steps behind it wait for none."""
        self._epochs = 0
        self._busy = self._stopping = False
        self._awaited: dict[str, tuple[Incarnation, int, tuple[int, ...]]] = {}
        """Requests that `get_finished` is to name, as received or as sent: epoch, number, blocks to be filled."""
        self._over: asyncio.Queue[TransferEnded] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="connector", daemon=True)

    def start(self, share: RankKvCache | None, world_size: int) -> None:
        """Registers the caches. Raises ConnectorUnusable."""
        if share is None:
            raise ConnectorUnusable("kv_connector: this device has no KV memory")
        if self.connector.layerwise and share.device != "cpu":
            raise ConnectorUnusable("kv_connector: layer by layer needs a CPU; on a GPU steps are launched ahead")
        self._layers = {f"model.layers.{share.first_layer + i}": cache for i, cache in enumerate(share.caches)}
        self.layout = CacheLayout(cache_format(share, world_size), world_size)
        if share.device == "cuda":
            self._use_stream(share.device)
        registered = threading.Event()
        problem: list[str] = []

        def register() -> None:
            try:
                self.connector.register_kv_caches(self._layers, self.layout)
            except BaseException as error:  # whatever a foreign package raises
                problem.append(str(error) if isinstance(error, ValueError | OSError) else repr(error))
            registered.set()

        threading.Thread(target=register, name="register", daemon=True).start()
        if not registered.wait(REGISTER_TIMEOUT):
            problem.append(f"register_kv_caches has not returned for {REGISTER_TIMEOUT:.0f} s")
        if problem:
            raise ConnectorUnusable(f"kv_connector: {problem[0]}")
        self._thread.start()

    def _use_stream(self, device: str) -> None:
        """Steps go on beside what the connector copies."""
        import torch

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = lambda: torch.cuda.stream(stream)
        self._synchronize = stream.synchronize

    @property
    def layerwise(self) -> bool:
        """Whether `layer_stored` is to be called."""
        return self.connector.layerwise

    # ---- on the compute thread

    def begin(self) -> None:
        """A new epoch: forgets what waits, and returns when nothing is being copied. Raises CopyingStuck."""
        with self._changed:
            self._waiting.clear()
            self._current = self._late = None
            self._epochs += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._busy and not self._awaited, REST_TIMEOUT):
                raise CopyingStuck(f"the KV connector has not stopped for {REST_TIMEOUT:.0f} s")

    def before_step(self, plan: StepPlan) -> None:
        """All plans before this one are computed."""
        assert plan.connector is not None
        with self._changed:
            work = _Work(plan.epoch, plan.connector, self._epochs)
            work.overlapped = any(load.overlapped for load in plan.connector.loads)
            work.late = work.overlapped and (self._late is not None or not self.layerwise)
            if plan.connector.metadata is None or len(self._waiting) >= MAX_WAITING_PLANS:
                self._report(work, plan.connector.numbers, failed=True)
                return
            self._current = work
            self._waiting.append(work)
            self._changed.notify_all()

    def layer_stored(self, layer: int) -> None:
        """The step's keys and values of the rank's layer `layer` are in its cache. Returns when what it computes on is
        loaded into that layer, too, or has failed or takes too long: then the load counts as failed."""
        if (work := self._current) is not None:
            with self._changed:
                work.layers = layer + 1
                self._changed.notify_all()
                if work.overlapped and not work.late and work.loaded <= layer:
                    self._await_layer(work, layer)

    def _await_layer(self, work: _Work, layer: int) -> None:
        begun = time.monotonic()
        self._changed.wait_for(lambda: work.loaded > layer or work.load_over, max(0.0, work.patience))
        work.patience -= time.monotonic() - begun
        if work.loaded <= layer:
            work.late = True
            self._late = None if work.load_over else work

    def after_step(self) -> None:
        """The plan is computed."""
        if (work := self._current) is not None:
            with self._changed:
                work.layers = len(self._layers)
                self._current = None
                self._changed.notify_all()

    # ---- on the event loop

    async def next_ended(self) -> TransferEnded:
        """The next part of a plan that is over, in the order of their ends."""
        return await self._over.get()

    async def stop(self) -> None:
        """Ends the thread, or leaves it behind when it does not end."""
        with self._changed:
            self._waiting.clear()
            self._epochs += 1
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)

    # ---- on its own thread

    def _run(self) -> None:
        import torch

        with torch.inference_mode():  # tensors that were made under it are written to under it only
            while self._do_next():
                pass
        self._call("shutdown", self.connector.shutdown)

    def _do_next(self) -> bool:
        """Waits for a plan's part and does it; False when it is time to end. While something is awaited, asks for it
        every few milliseconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping, POLL_SECONDS if self._awaited else None)
            if self._stopping:
                return False
            work = self._waiting.popleft() if self._waiting else None
            self._busy = True
        finished = set[str]() if work is None else self._work(work)
        self._poll(finished)
        with self._changed:
            self._busy = False
            if work is not None and self._late is work:
                self._late = None
            self._changed.notify_all()
        return True

    def _work(self, work: _Work) -> set[str]:
        """Does a plan's part. Returns the requests that it says have ended."""
        planned = work.planned
        step = connector_step(planned, self.layout)
        for send in planned.sends:
            self._awaited[send.request] = work.epoch, send.number, ()
        for load in planned.loads:
            if load.awaited:
                self._awaited[load.run.request] = work.epoch, load.number, tuple(unpack(load.run.blocks))
        with self._device():
            bound = self._call("bind_connector_metadata", lambda: self.connector.bind_connector_metadata(step))
            self._load(work, sound=bound)
            if planned.save is not None:
                saved = bound and self._save(work)
                self._report(work, [planned.save], failed=not saved)
            self._call("clear_connector_metadata", self.connector.clear_connector_metadata)
        return set(step.sends)

    def _load(self, work: _Work, *, sound: bool) -> None:
        loads = work.planned.loads
        if not loads:
            return
        sound = sound and self._call("start_load_kv", self.connector.start_load_kv)
        for number, name in enumerate(self._layers, 1):
            sound = sound and self._call("wait_for_layer_load", lambda: self.connector.wait_for_layer_load(name))  # noqa: B023
            if sound and work.overlapped:
                with self._changed:
                    work.loaded = number
                    self._changed.notify_all()
        sound = sound and self._call("wait_for_layer_load", self._synchronize)
        broken = self._broken_blocks() if sound else None
        with self._changed:  # from here on no step can be late for it
            work.load_over = True
            late = work.late
            self._changed.notify_all()
        for load in loads:
            spoilt = broken is None or not broken.isdisjoint(unpack(load.run.blocks)) or (load.overlapped and late)
            if spoilt or not load.awaited:
                self._awaited.pop(load.run.request, None)
                self._report(work, [load.number], failed=spoilt)

    def _save(self, work: _Work) -> bool:
        """Whether all is saved. A step that never ends is found by the rank's watchdog."""

        def stopped() -> bool:
            return self._stopping or self._epochs != work.epochs

        for number, (name, cache) in enumerate(self._layers.items()):
            whole = number + 1 if self.connector.layerwise else len(self._layers)
            with self._changed:
                self._changed.wait_for(lambda: work.layers >= whole or stopped())  # noqa: B023
            if stopped():
                return False
            if not self._call("save_kv_layer", lambda: self.connector.save_kv_layer(name, cache)):  # noqa: B023
                return False
        return self._call("wait_for_save", self._finish_save)

    def _finish_save(self) -> None:
        self.connector.wait_for_save()
        self._synchronize()

    def _poll(self, finished: set[str]) -> None:
        """Asks for what is finished, where anything is awaited."""
        if not self._awaited:
            return
        named: list[tuple[set[str] | None, set[str] | None]] = []
        with self._device():
            if not self._call("get_finished", lambda: named.append(self.connector.get_finished(finished))):
                return
            sent, received = _checked(named[0])
            broken = self._broken_blocks() if received else set()
        for request in sent | received:
            if (awaited := self._awaited.pop(request, None)) is not None:
                epoch, number, blocks = awaited
                self._hand_over(TransferEnded(epoch, number, broken is None or not broken.isdisjoint(blocks)))

    def _broken_blocks(self) -> set[int] | None:
        """Blocks that were not loaded as they should; None where the connector cannot say."""
        found: list[set[int]] = []
        errors = self.connector.get_block_ids_with_load_errors
        called = self._call("get_block_ids_with_load_errors", lambda: found.append(set(errors())))
        return found[0] if called else None

    def _call(self, what: str, work: Callable[[], object]) -> bool:
        """Whether it returned."""
        try:
            work()
        except BaseException as error:  # a foreign package may raise anything; this thread must outlive it
            FAILURES.labels(what).inc()
            log.warning("kv connector failed", extra={"call": what, "problem": repr(error)}, exc_info=error)
            return False
        return True

    def _report(self, work: _Work, numbers: Iterable[int], *, failed: bool) -> None:
        for number in numbers:
            self._hand_over(TransferEnded(work.epoch, number, failed))

    def _hand_over(self, ended: TransferEnded) -> None:
        try:
            self._loop.call_soon_threadsafe(self._over.put_nowait, ended)
        except RuntimeError:  # the loop is closed: the process is ending
            return


def cache_format(share: RankKvCache, world_size: int) -> str:
    """See `WorkerReport.cache_format`."""
    keys, values = share.caches[0]
    shape = (share.layout, share.operations, tuple(keys.shape[1:]), tuple(values.shape[1:]), str(keys.dtype))
    return blake2b(repr((*shape, world_size)).encode(), digest_size=16).hexdigest()


def _checked(named: tuple[set[str] | None, set[str] | None]) -> tuple[set[str], set[str]]:
    """What is no set of texts counts as nothing."""
    sent, received = named if isinstance(named, tuple) and len(named) == 2 else (None, None)
    return _texts(sent), _texts(received)


def _texts(found: object) -> set[str]:
    return {each for each in found if isinstance(each, str)} if isinstance(found, set | frozenset) else set()
