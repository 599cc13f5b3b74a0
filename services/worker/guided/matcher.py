"""One sequence's place in its grammar: what may follow, and whether it has ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.guided import meters
from services.worker.sampling.masks import bits_of

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

Stage = Literal["free", "binding", "ending", "ended"]
"""free: the text behind which the grammar binds has not come. ending: only stop tokens may follow. ended: one did."""


class MatcherBroken(Exception):
    """A matcher that does not accept a token which it has allowed: a bug."""


class Spelling(NamedTuple):
    """What tokens are made of."""

    pieces: list[bytes]
    """The bytes of each."""
    barred: dict[int, NDArray[np.int32]]
    """Last byte of a token → [words] which may follow: those with which it makes a character."""

    def of(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""


class Matcher:
    """Owns the state of one sequence's grammar."""

    def __init__(
        self, automaton: xgrammar.GrammarMatcher, stops: tuple[int, ...], after: bytes, spelling: Spelling
    ) -> None:
        """`automaton` ends with any of `stops`. It binds behind `after`, at once where that is empty."""
        self._automaton = automaton
        self._stops = stops
        self._after = after
        self._spelling = spelling
        self._tail = b""
        """Free: the output's last bytes. Binding: its last token's."""
        self.stage: Stage = "free" if after else "binding"

    @property
    def binds(self) -> bool:
        return self.stage in ("binding", "ending")

    def fill(self, bits: NDArray[np.int32]) -> None:
        """What may follow, into `bits` [words]. Only stop tokens where nothing else can: an end that comes too early
        is better than one that never comes."""
        if self.stage == "binding":
            self._automaton.fill_next_token_bitmask(bits[np.newaxis], 0)
            if self._tail[-1:] and self._tail[-1] in self._spelling.barred:
                bits &= self._spelling.barred[self._tail[-1]]
            if bits.any():
                return
            meters.DEAD_ENDS.inc()
            log.warning("grammar at a dead end", extra={"stops": self._stops})
            self.stage = "ending"
        bits[:] = bits_of(self._stops, len(bits) * 32) if self._stops else -1

    def take(self, token: int, allowed: bool) -> None:
        """Goes on behind `token`, which the mask `allowed`. Raises MatcherBroken."""
        match self.stage:
            case "free":
                self._look_for_start(token)
            case "binding":
                self._follow(token, allowed)
            case "ending":
                self.stage = "ended" if token in self._stops else "ending"
            case "ended":
                pass

    def replay(self, tokens: Sequence[int]) -> None:
        """Takes what an earlier engine, or this one before a preemption, has drawn."""
        for token in tokens:
            self.take(token, allowed=False)

    def _follow(self, token: int, allowed: bool) -> None:
        if self._automaton.accept_token(token):
            self._tail = self._spelling.of(token)
            if self._automaton.is_terminated():
                self.stage = "ended"
            return
        if allowed:
            raise MatcherBroken(f"token {token} was allowed and is not accepted")
        # Something stronger than the grammar has chosen it. The stream is beyond repair; the process is not.
        meters.BROKEN.inc()
        log.error("token outside of its grammar", extra={"token": token})
        self.stage = "ending"

    def _look_for_start(self, token: int) -> None:
        """The grammar begins behind the first `after`, within a token too: what follows it there is the grammar's."""
        self._tail += self._spelling.of(token)
        place = self._tail.find(self._after)
        if place < 0:
            self._tail = self._tail[-len(self._after) :]
            return
        rest = self._tail[place + len(self._after) :]
        self.stage = "binding"
        self._tail = rest
        if rest and not self._automaton.accept_string(rest):
            # White space behind the mark, which grammars do not begin with.
            self._automaton.reset()


def make_matcher(compiled: xgrammar.CompiledGrammar, stops: tuple[int, ...], after: str, spelling: Spelling) -> Matcher:
    """See Matcher. `compiled` is made by xgrammar, which is loaded by now."""
    import xgrammar

    automaton = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stops) or None)
    return Matcher(automaton, tuple(stops), after.encode(), spelling)
