"""Which decodes a step of a pipelined engine holds: so that its stages find work, and none of them waits for a token.

An engine of p stages computes p plans at a time. A sequence whose token is drawn by one of them can go on in none of
the p - 1 behind it: the first stage would wait for the last one, and all others for them. So each plan holds one p-th
of those that decode, and a sequence comes in every p-th plan at the most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.core.sequence import Sequence
from shared.ids import SequenceId
from shared.messages.worker import Work


class MicroBatches:
    """Owns the count of plans, and of each sequence the one that draws its latest token."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._plan = 0

    def of_next_plan(self, decoding: list[Sequence]) -> list[Sequence]:
        """Those that it may hold, in their order."""
        if self._stages == 1:
            return decoding
        return [sequence for sequence in decoding if self._may_go_on(sequence)][: self._most(len(decoding))]

    def _most(self, decoding: int) -> int:
        """A part each, of p plans in a row together just all: groups of other sizes even out within some rounds."""
        turn = self._plan % self._stages
        part = (turn + 1) * decoding // self._stages - turn * decoding // self._stages
        return max(1, part)

    def issued(self, work: Iterable[Work], by_id: Mapping[SequenceId, Sequence]) -> None:
        """A plan is on its way."""
        if self._stages == 1:
            return
        for item in work:
            if item.sample:
                by_id[item.sequence].drawn_in = self._plan
        self._plan += 1

    def _may_go_on(self, sequence: Sequence) -> bool:
        if sequence.length >= sequence.limit or sequence.phase != "decoding":
            return False  # all its tokens are on their way
        return not sequence.awaits_token or self._plan - sequence.drawn_in >= self._stages
