"""Moves a mixture's experts between ranks while these serve: what is moved, and in which step all ranks change over.

Every rank counts the steps that it computes with the others, so all come to a decision in the same step:

| when | on each rank |
|------|--------------|
| every `interval`-th step | hears from each engine's first rank what the last steps have picked, and starts a thread |
| beside steps | the thread places layer by layer, as every rank's does, and packs the experts that are new here |
| each step until the end | says whether the thread has the next layer ready: it is changed once all ranks have |

No step waits for a thread, and a layer changes on all ranks before the same step. At most one layer's experts are there
twice. Where one rank cannot have its experts, the layers that are left stay as they are on all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.expert_balance import ExpertMoves
from services.worker.models.expert_parallel.load_window import LoadWindow
from services.worker.models.expert_parallel.local_experts import LocalExperts, RankExperts
from services.worker.models.expert_parallel.placement import ExpertPlacement
from services.worker.models.expert_parallel.throttle import ThreadThrottle
from services.worker.ops.interface import PackedExperts

_log = logging.getLogger(__name__)


class PlaceLayer(Protocol):
    """Where a layer's experts are to go; the same on every rank."""

    def __call__(self, current: ExpertPlacement, load: Sequence[float]) -> ExpertPlacement:
        """`current` itself: they stay."""


class GatherExperts(Protocol):
    """Where a rank has its experts from."""

    def __call__(self, layer: int, wanted: Sequence[int], held: Sequence[int], packed: PackedExperts) -> PackedExperts:
        """The `wanted` experts in rising order: those that are `packed` as they are, the others from the checkpoint.
        Raises ModelError, OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RearrangerParts:
    """What a rank rearranges experts by."""

    layers: Mapping[int, RankExperts]
    """The stage's layers that mix, by their numbers."""
    rank: int
    """Its number among those that experts are spread over."""
    interval: int
    place: PlaceLayer
    gather: GatherExperts
    """Called on the thread beside steps."""
    throttle: ThreadThrottle
    """Of that thread."""
    share: Callable[[Tensor], Tensor]
    """The sum of every rank's tensor."""
    window: LoadWindow | None
    """On the first rank of an engine, which counts what its rows pick."""
    device: torch.device


class ExpertRearranger:
    """Owns where experts are. Used by the thread that computes; the counts may be read by any."""

    def __init__(self, parts: RearrangerParts, placements: Sequence[ExpertPlacement]) -> None:
        """`placements`: of all layers of the model."""
        self._parts = parts
        self.placements = list(placements)
        """Where experts are now."""
        self.on_change: Callable[[int, ExpertPlacement], None] | None = None
        """Called before a layer changes, with its number and where its experts go."""
        self.moves = ExpertMoves()
        self._experts = max(map(max, placements[0].ranks)) + 1
        self._steps = 0
        self._counting = False
        self._moving: _RearrangementThread | None = None

    def restart(self) -> None:
        """What steps have picked so far decides nothing. Called before the first step of a request."""
        self._counting = True
        if self._parts.window is not None:
            self._parts.window.restart()

    def begin_step(self) -> None:
        """Called before each step that all ranks compute, by all of them. Raises what sharing raises, and RankGone."""
        self._steps += 1
        if self._parts.window is not None:
            self._parts.window.begin_step(self._steps)
        if self._moving is not None:
            self._vote(self._moving)
        elif self._parts.layers and self._steps % self._parts.interval == 0:
            self._decide()

    def _decide(self) -> None:
        load = torch.zeros(len(self._parts.layers), self._experts, device=self._parts.device)
        if self._parts.window is not None and self._counting:
            load.copy_(self._parts.window.load(self._steps))
        load = self._parts.share(load)  # whose sums have the same bits on every rank
        if load.any():
            self.moves = self.moves._replace(under_way=True)
            self._moving = _RearrangementThread(self._parts, list(self.placements), load.tolist())

    def _vote(self, moving: _RearrangementThread) -> None:
        item = moving.look()
        failed = isinstance(item, (ModelError, OSError))
        ballot = torch.tensor([item is not None, failed], dtype=torch.float32, device=self._parts.device)
        ready, failures = self._parts.share(ballot).tolist()
        if failures:
            _log.error("experts stay where they are: %s", item if failed else "another rank could not read its own")
            self._finish(moving, completed=False)
        elif ready < len(self.placements[0].ranks):
            return
        elif isinstance(item, _PackedLayer):
            self._change(moving, item)
        else:
            self._finish(moving, completed=True)

    def _change(self, moving: _RearrangementThread, ready: _PackedLayer) -> None:
        held, before = self._parts.layers[ready.layer], self.placements[ready.layer]
        if self.on_change is not None:
            self.on_change(ready.layer, ready.placement)
        replaced = held.packed
        held.packed, held.local = ready.packed, ready.local
        self.placements[ready.layer] = ready.placement
        self.moves = self.moves._replace(
            layers=self.moves.layers + 1, experts=self.moves.experts + ready.placement.coming_from(before)
        )
        moving.take(replaced)

    def _finish(self, moving: _RearrangementThread, *, completed: bool) -> None:
        self._moving = None
        moving.end()
        seconds = time.monotonic() - moving.began
        self.moves = self.moves._replace(
            rearrangements=self.moves.rearrangements + completed,
            failures=self.moves.failures + (not completed),
            seconds=seconds,
            under_way=False,
        )
        if completed and moving.changed:
            _log.info("experts of %d layers were moved beside steps in %.1f s", moving.changed, seconds)


class _PackedLayer(NamedTuple):
    """A layer's experts on this rank as they are to be."""

    layer: int
    placement: ExpertPlacement
    packed: PackedExperts
    local: LocalExperts


class _RearrangementDone(NamedTuple):
    """All layers are as they are to be."""


class _RearrangementThread:
    """Owns the thread of one rearrangement. Its next layer is packed when the one before has been taken."""

    def __init__(
        self, parts: RearrangerParts, placements: Sequence[ExpertPlacement], load: Sequence[Sequence[float]]
    ) -> None:
        self._parts, self._placements, self._load = parts, placements, load
        self._ready: SimpleQueue[_PackedLayer | _RearrangementDone | BaseException] = SimpleQueue()
        self._replaced: SimpleQueue[PackedExperts | None] = SimpleQueue()
        self._item: _PackedLayer | _RearrangementDone | BaseException | None = None
        self.began = time.monotonic()
        self.changed = 0
        """Layers that were taken."""
        threading.Thread(target=self._run, name="experts", daemon=True).start()

    def look(self) -> _PackedLayer | _RearrangementDone | ModelError | OSError | None:
        """What is next, the same until it is taken; None: it is not there yet. Raises what is no expected failure."""
        if self._item is None:
            try:
                self._item = self._ready.get_nowait()
            except Empty:
                return None
        if isinstance(self._item, BaseException) and not isinstance(self._item, (ModelError, OSError)):
            raise self._item
        return self._item

    def take(self, replaced: PackedExperts) -> None:
        """The next layer was taken; `replaced` is let go of beside steps, too."""
        self._item = None
        self.changed += 1
        self._replaced.put(replaced)

    def end(self) -> None:
        """Nothing more is taken."""
        self._replaced.put(None)

    # ---- on the thread

    def _run(self) -> None:
        self._parts.throttle.start()
        try:
            with torch.inference_mode():
                for load, (layer, held) in zip(self._load, self._parts.layers.items(), strict=True):
                    ready = self._prepare(layer, held, load)
                    self._parts.throttle.rest()
                    if ready is None:
                        continue
                    self._ready.put(ready)
                    del ready
                    if self._replaced.get() is None:
                        return
            self._ready.put(_RearrangementDone())
        except BaseException as error:  # looked at by the thread that computes
            self._ready.put(error)

    def _prepare(self, layer: int, held: RankExperts, load: Sequence[float]) -> _PackedLayer | None:
        """None: its experts stay where they are, on every rank."""
        current, rank = self._placements[layer], self._parts.rank
        wanted = self._parts.place(current, load)
        if wanted == current:
            return None
        packed = self._parts.gather(layer, wanted.experts_of(rank), current.experts_of(rank), held.packed)
        return _PackedLayer(layer, wanted, packed, LocalExperts.of(wanted, rank, self._parts.device))
