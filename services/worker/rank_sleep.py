"""A rank that sleeps: its process has loaded no libraries and no model, and waits to be woken.

A rank falls asleep by executing its program anew, as the same process: nothing of what it had is left, not even a GPU's
context or what allocators keep. It wakes up as it starts. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from services.worker.models.weight_files import weight_files
from shared import topics
from shared.bus import Bus
from shared.ids import EngineId, Incarnation
from shared.messages.worker import RankOrder, SleepLevel, SleepRank, WakeRank

log = logging.getLogger(__name__)

FLAG = "--asleep="


class RankSleep:
    """Owns whether the rank sleeps, and whether it is to sleep next."""

    def __init__(self, level: SleepLevel | None = None, discard: Callable[[], None] = lambda: None) -> None:
        """`level`: in which it starts. `discard`: gives up at level 2 what the kernel keeps of the weights."""
        self.level = level
        """None: it is awake."""
        self.next_level: SleepLevel | None = None
        """In which the process that takes this one's place sleeps; None: none does."""
        self.met_under: Incarnation | None = None
        """Of the order that has woken it; None: none has."""
        self._discard = discard
        self._woken: asyncio.Future[Incarnation] | None = None

    async def until_woken(self, bus: Bus, engine: EngineId) -> None:
        """Returns once the rank is to load the model: for as long as nobody says so, it sleeps."""
        self._woken = asyncio.get_running_loop().create_future()
        self._fall(self.level)
        orders = await bus.subscribe(topics.rank_orders(engine), self._take)
        try:
            self.met_under = await self._woken
        finally:
            await orders.stop()
        log.info("woken", extra={"number": self.met_under})
        self.level = None

    async def _take(self, order: RankOrder) -> None:
        assert self._woken is not None, "only while it waits"
        match order:
            case SleepRank(level):
                self._fall(level)
            case WakeRank(number) if not self._woken.done():
                self._woken.set_result(number)
            case _:  # woken already, or a ping to those that compute
                pass

    def _fall(self, level: SleepLevel | None) -> None:
        if level == 2:
            self._discard()
        self.level = level


def discard_pages(model_dir: Path) -> None:
    """The kernel gives up what it keeps of the weights' files, but for what others have mapped. Best effort."""
    with suppress(OSError, msgspec.MsgspecError):
        for path in weight_files(model_dir):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def execute_asleep(
    level: SleepLevel, processors: Collection[int] | None, module: str = "services.worker", after: str | None = None
) -> NoReturn:
    """Replaces this process's program, which is `module`, by one that sleeps. `processors`: those that the process was
    started on, as it has bound itself since; None: it cannot. `after`: the word of the command line behind which the
    rank's flags begin; None: all are the rank's."""
    if processors is not None:
        os.sched_setaffinity(0, processors)
    flags = [flag for flag in sys.argv[1:] if not flag.startswith(FLAG)]
    flags.insert(len(flags) if after is None else flags.index(after) + 1, f"{FLAG}{level}")
    logging.shutdown()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])
