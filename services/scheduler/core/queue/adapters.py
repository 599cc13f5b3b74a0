"""Which LoRA adapters the running sequences have: no more different ones than the ranks have slots for."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from services.scheduler.core.sequence import Sequence
from shared.ids import LoraId
from shared.messages.model_card import LoraCard


class AdapterSlots:
    """Owns how many sequences with blocks use each adapter, and which adapters were used last."""

    def __init__(self, max_loras: int) -> None:
        """`max_loras`: slots of each rank."""
        self._max_loras = max_loras
        self._used: Counter[LoraId] = Counter()
        self._recent: OrderedDict[LoraId, None] = OrderedDict()
        self._retired: set[LoraId] = set()
        """Those that are served no longer, and that the ranks have not been told to forget."""

    @property
    def recent(self) -> tuple[LoraId, ...]:
        """As many of the adapters as the ranks hold, those used last at the end."""
        return tuple(self._recent)

    def retire(self, gone: Iterable[LoraId], served: Iterable[LoraCard]) -> None:
        """No more sequences come of the adapters that are `gone`. Those that are served (again) stay."""
        self._retired.update(gone)
        self._retired.difference_update([each.id for each in served])

    def take_unused(self, sequences: Iterable[Sequence]) -> tuple[LoraId, ...]:
        """The adapters that the ranks can forget: those that are gone, and that none of the engine's `sequences` has.
        Each is returned once."""
        if not self._retired:
            return ()
        unused = self._retired - {each.generation.lora for each in sequences if each.generation.lora is not None}
        self._retired -= unused
        for lora in unused:
            self._recent.pop(lora, None)
        return tuple(sorted(unused))

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the sequence may run beside those that do: it has no adapter, one of theirs, or there is a slot."""
        lora = sequence.generation.lora
        return lora is None or lora in self._used or len(self._used) < self._max_loras

    def start_use(self, sequence: Sequence) -> None:
        """The sequence begins to run."""
        lora = sequence.generation.lora
        if lora is None:
            return
        self._used[lora] += 1
        self._recent[lora] = None
        self._recent.move_to_end(lora)
        if len(self._recent) > self._max_loras:
            unused = next(each for each in self._recent if each not in self._used)
            del self._recent[unused]

    def end_use(self, sequence: Sequence) -> None:
        """The sequence runs no longer."""
        lora = sequence.generation.lora
        if lora is None:
            return
        self._used[lora] -= 1
        if not self._used[lora]:
            del self._used[lora]
