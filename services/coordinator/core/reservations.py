"""Recent placements that no report or event shows yet: work on its way to engines, and prompts that they will hold."""

from __future__ import annotations

from typing import NamedTuple

from shared.blocks import HASH_BYTES
from shared.ids import EngineId, InstanceId, ModelName
from shared.messages.generation import Generation
from shared.packing import TOKEN_BYTES
from shared.reliability.recent import RecentEntries

MAX_PROMPTS = 4096
"""Prompts expected at engines; those placed longest ago are forgotten first."""
EXPECT_SECONDS = 2.0
"""After which an engine's events have shown its new blocks, or it does not hold them."""


class ReservedWork(NamedTuple):
    """The work that was placed on one instance and that its reports do not include yet."""

    requests: int = 0
    own: int = 0
    """How many of `requests` this coordinator has placed."""
    prefill: int = 0
    """Number of blocks to compute."""
    blocks: int = 0
    """Blocks of KV memory that it will take."""


NO_WORK = ReservedWork()


class _Reservation(NamedTuple):
    counted: float
    """From when on a report holds it, in monotonic seconds."""
    own: bool
    prefill: int
    blocks: int


class Reservations:
    """Owns the placements that no report covers yet, by instance.

    A report does not say which placements it counts. It was written a moment before it is received, so a placement
    made within the last `settle` seconds may have crossed it on the way: that one is kept until the next report.
    Older ones are in the report, or finished already.
    """

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._pending: dict[InstanceId, list[_Reservation]] = {}
        self._sums: dict[InstanceId, ReservedWork] = {}

    def add(
        self,
        instance: InstanceId,
        now: float,
        *,
        own: bool = True,
        prefill: int = 0,
        blocks: int = 0,
        delay: float = 0.0,
    ) -> None:
        """Counts one request more. `delay`: the seconds that it is assumed to need to get there. `own`: whether this
        coordinator has placed it."""
        pending = _Reservation(now + self._settle + delay, own, prefill, blocks)
        self._pending.setdefault(instance, []).append(pending)
        requests, owned, prefill_before, blocks_before = self._sums.get(instance, NO_WORK)
        self._sums[instance] = ReservedWork(requests + 1, owned + own, prefill_before + prefill, blocks_before + blocks)

    def reported(self, instance: InstanceId, now: float) -> None:
        """A report of `instance` came in at `now`, and takes the place of what it must have counted."""
        before = self._pending.get(instance)
        if not before:
            return
        left = self._pending[instance] = [each for each in before if now < each.counted]
        self._sums[instance] = ReservedWork(
            len(left),
            sum(each.own for each in left),
            sum(each.prefill for each in left),
            sum(each.blocks for each in left),
        )

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone, and what was placed on it with it."""
        self._pending.pop(instance, None)
        self._sums.pop(instance, None)

    def on(self, instance: InstanceId) -> ReservedWork:
        """The sum of what is on its way to `instance`."""
        return self._sums.get(instance, NO_WORK)


class PromptPrefix(NamedTuple):
    """The full blocks of a prompt that a later request with the same prompt can reuse."""

    model: ModelName
    last_block: bytes
    """The hash of the last of them, which names all before it, too; empty where there are none."""
    blocks: int

    @classmethod
    def of(cls, generation: Generation, block_size: int) -> PromptPrefix:
        """Leaves out a block that ends with the last token: that token is always computed, to draw the next from. There
        are none in a request without prefix caching."""
        if not generation.prefix_caching:
            return cls(generation.model, b"", 0)
        blocks = (len(generation.tokens) // TOKEN_BYTES - 1) // block_size
        end = blocks * HASH_BYTES
        return cls(generation.model, generation.block_hashes[end - HASH_BYTES : end] if blocks else b"", blocks)


class _ExpectedEngine(NamedTuple):
    engine: EngineId
    until: float


class ExpectedPrompts:
    """Owns which engine was given which prompt in the last seconds. The engine publishes the prompt's blocks only
    later.

    Choices of one request (`n` > 1) arrive within a millisecond, as do requests of several users for one prompt.
    Placed apart they are computed several times; the engine that got the first computes it for all of them.
    """

    def __init__(self) -> None:
        self._expected: RecentEntries[PromptPrefix, _ExpectedEngine] = RecentEntries(MAX_PROMPTS)

    def add(self, prefix: PromptPrefix, engine: EngineId, now: float) -> None:
        """`engine` gets a request with this prompt at `now`."""
        if prefix.blocks:
            self._expected[prefix] = _ExpectedEngine(engine, now + EXPECT_SECONDS)

    def engine_for(self, prefix: PromptPrefix, now: float) -> EngineId | None:
        """The engine that holds all blocks of `prefix` soon, without computing them once more; None where none does."""
        expected = self._expected.get(prefix)
        return expected.engine if expected is not None and now < expected.until else None
