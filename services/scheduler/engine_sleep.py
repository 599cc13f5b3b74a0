"""Whether an engine is to be asleep, and which of its ranks are: what they say is compared with what they should."""

from __future__ import annotations

from shared.ids import Incarnation, InstanceId, new_incarnation
from shared.messages.lifecycle import Lifecycle, SleepReport
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import SleepState
from shared.messages.worker import RankOrder, SleepLevel, SleepRank, WakeRank


class EngineSleep:
    """Owns the wish, and what each rank said last. A rank whose words differ from the wish is told again with each of
    its lifecycle messages, so nothing is lost with a message.

    Until somebody has said otherwise to this process, an engine sleeps where one of its ranks does: that was its last
    scheduler's wish, or they were started so.
    """

    def __init__(self) -> None:
        self.level: SleepLevel | None = None
        """At which the engine is to sleep; None: it is to be awake."""
        self._decided = False
        """Whether this process was told, and does not go by its ranks."""
        self._number: Incarnation = new_incarnation()
        """Under which ranks that are woken meet; another one each time."""
        self._ranks: dict[InstanceId, SleepLevel | None] = {}

    def decide(self, level: SleepLevel | None) -> RankOrder:
        """What an operator wants. Returns what all ranks are told now."""
        if self.level is not None and level is None:
            self._number = new_incarnation()
        self.level, self._decided = level, True
        return WakeRank(self._number) if level is None else SleepRank(level)

    def record_lifecycle(self, life: Lifecycle) -> RankOrder | None:
        """What a rank says of itself. Returns what they have to be told; None where nothing."""
        if life.phase in ("stopped", "failed"):
            self._ranks.pop(life.instance, None)
            return None
        level = self._ranks[life.instance] = None if life.sleep is None else life.sleep.level
        if not self._decided and self.level is None:
            self.level = level
        if level == self.level:
            return None
        if self.level is None:
            return WakeRank(self._number)
        loads = level is None and life.phase == "starting"
        return None if loads else SleepRank(self.level)  # one that loads hears nothing before it has

    def forget(self, instance: InstanceId) -> None:
        """The rank is gone."""
        self._ranks.pop(instance, None)

    def state(self, world_size: int, *, serves: bool) -> SleepState:
        """The wish, and how many of so many ranks are not there yet; `serves`: whether the engine is awake."""
        if self.level is None:
            return SleepState(None, 0 if serves else 1)
        asleep = sum(level == self.level for level in self._ranks.values())
        return SleepState(self.level, max(0, world_size - asleep))

    def report(self, model: ModelCard | None) -> SleepReport | None:
        """What the scheduler's lifecycle says of it. `model`: what the engine served before."""
        return None if self.level is None else SleepReport(self.level, model)
