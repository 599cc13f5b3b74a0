"""What a step's results mean for lengths that were upper bounds, and for how much is drafted next."""

from __future__ import annotations

from itertools import zip_longest

from services.scheduler.core.places import Places
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.speculation import Speculation
from services.scheduler.core.steps import Expected
from services.scheduler.core.tally import Tally
from shared.messages.scheduler import Sampled, StepFinished


class WrongYield(ValueError):
    """A step yielded no token of a sequence, or more than were planned: the ranks have a bug."""


class Drafts:
    """Owns nothing: corrects what the planner assumed, and tells the policy."""

    def __init__(self, places: Places, speculation: Speculation, tally: Tally) -> None:
        self._places = places
        self._speculation = speculation
        self._tally = tally

    def take(self, result: StepFinished, expected: Expected) -> None:
        """Before the tokens are learnt, so that `length` and `planned` are bounds again. Raises WrongYield."""
        extras = expected.extras
        if not extras:
            self._check_single(result)
            yielded = len(result.sampled)
        else:
            yielded = sum(self._correct(sampled, extras.get(sampled.sequence, 0)) for sampled in result.sampled)
            self._count(result)
        if not expected.prefills:
            timing = result.timing
            # From the end of the step before to this one's: what the ring needs for a step counts as well.
            seconds = timing.wait + timing.prepare + timing.forward + timing.sample
            asked = sum(extras.values())
            self._speculation.took(expected.samples, asked, result.drafted, seconds, yielded)

    def _check_single(self, result: StepFinished) -> None:
        for sampled in result.sampled:
            if len(sampled.tokens) != 1 and sampled.sequence in self._places.by_id:
                raise WrongYield(f"step {result.step}: {len(sampled.tokens)} tokens of {sampled.sequence}, not 1")

    def _correct(self, sampled: Sampled, extra: int) -> int:
        """One sequence's part; how many tokens it has got. What was drafted for one that has ended brought nothing."""
        got, drafted = len(sampled.tokens), sampled.drafted
        sequence = self._places.by_id.get(sampled.sequence)
        if sequence is not None:
            if not 1 <= got <= 1 + extra:
                raise WrongYield(f"{got} tokens of {sampled.sequence}, not 1 to {1 + extra}")
            if got <= extra:
                _give_back(sequence, 1 + extra - got)
            if drafted:
                self._speculation.tried(sequence, drafted, got - 1)
        if drafted:
            self._tally.speculated += 1
            self._tally.speculated_tokens += got
        return got if sequence is not None else 1

    def _count(self, result: StepFinished) -> None:
        tally = self._tally
        tally.drafted += result.drafted
        tally.accepted = tuple(a + b for a, b in zip_longest(tally.accepted, result.accepted, fillvalue=0))


def _give_back(sequence: Sequence, tokens: int) -> None:
    """A step has yielded so many tokens less than it might have. The blocks that were meant for them stay in the
    sequence's table, where the workers have them too, and are filled by its next steps."""
    sequence.length -= tokens
    if sequence.phase == "decoding":
        sequence.planned -= tokens
