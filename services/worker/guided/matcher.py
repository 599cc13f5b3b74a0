"""One sequence's place in its grammar: what may follow, and whether it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from services.worker.guided.automaton import Automaton, Bits, CompiledGrammar
from services.worker.sampling.token_bits import mask_bits

Stage = Literal["free", "binding", "ending", "ended"]
"""free: the text behind which the grammar binds has not come. ending: only stop tokens may follow. ended: one did."""

TRANSITIONS: dict[Stage, tuple[Stage, ...]] = {
    "free": ("binding",),
    "binding": ("ending", "ended"),
    "ending": ("ended",),
    "ended": (),
}
"""Which stage may follow which."""


class MatcherBroken(Exception):
    """A matcher rejects a token that it has allowed, or enters a stage that `TRANSITIONS` does not know: a bug."""


class TokenPieces(NamedTuple):
    """The text of tokens: which bytes each stands for."""

    pieces: list[bytes]
    """The bytes of each."""
    barred: dict[int, Bits]
    """Last byte of a token → [words] which may follow: those with which it makes a character."""
    encode: Callable[[str], list[int]]
    """Text to tokens, as the model would probably choose them."""

    def of(self, token: int) -> bytes:
        """The bytes of `token`; none for an id that the vocabulary does not have."""
        return self.pieces[token] if token < len(self.pieces) else b""


class GrammarMatcher:
    """Owns the state of one sequence's grammar."""

    def __init__(self, automaton: Automaton, stops: tuple[int, ...], after: bytes, spelling: TokenPieces) -> None:
        """`automaton` ends with any of `stops`. It binds behind `after`, at once where that is empty."""
        self._automaton = automaton
        self._stops = stops
        self._after = after
        self._spelling = spelling
        self._tail = b""
        """Free: the output's last bytes. Binding: its last token's."""
        self._stages: list[Stage] = ["free" if after else "binding"]
        """All that it went through, the present one last."""
        self._dead_end = self._broken = False

    @property
    def stage(self) -> Stage:
        """Where the sequence is in its grammar."""
        return self._stages[-1]

    @property
    def binds(self) -> bool:
        """Whether the grammar restricts the next token: it has begun, and not ended."""
        return self.stage in ("binding", "ending")

    def fill(self, bits: Bits, drafts: Sequence[int] = ()) -> None:
        """What may follow, into `bits` [1 + drafts, words]: behind what was taken, behind the first draft, and so on.

        Only stop tokens where nothing else can: an end that comes too early is better than one that never comes.
        Behind a draft that cannot be drawn everything may follow: that row is never drawn from.
        """
        was = self.stage
        self._fill(bits[0])
        if was != self.stage:
            self._dead_end = True
        if drafts:
            self._fill_ahead(bits, drafts)

    def accept(self, token: int, *, allowed: bool) -> None:
        """Goes on behind `token`, which the mask `allowed`. Raises MatcherBroken."""
        if self._advance(token) is not None:
            return
        if allowed:
            raise MatcherBroken(f"token {token} was allowed and is not accepted")
        # Something stronger than the grammar has chosen it. The stream is beyond repair; the process is not.
        self._broken = True
        self._enter("ending")

    def take_dead_end(self) -> bool:
        """Whether nothing was left but to end, since this was asked last."""
        was, self._dead_end = self._dead_end, False
        return was

    def take_broken(self) -> bool:
        """Whether a token was taken that the grammar does not allow, since this was asked last."""
        was, self._broken = self._broken, False
        return was

    def replay(self, tokens: Sequence[int]) -> None:
        """Takes what an earlier engine, or this one before a preemption, has drawn."""
        for token in tokens:
            self.accept(token, allowed=False)

    def jump_forward(self, most: int) -> list[int]:
        """Up to `most` tokens that spell text which alone can follow: the model will probably draw them."""
        if self.stage != "binding":
            return []
        text = self._automaton.forced_text()
        tokens = self._spelling.encode(text) if text else []
        if b"".join(map(self._spelling.of, tokens)) != text.encode():
            return []
        # The last one may be the beginning of a longer one.
        return tokens[: min(most, max(1, len(tokens) - 1))]

    def _enter(self, stage: Stage) -> None:
        if stage not in TRANSITIONS[self.stage]:
            raise MatcherBroken(f"a grammar cannot be {stage} behind {', '.join(self._stages)}")
        self._stages.append(stage)

    def _fill(self, bits: Bits) -> None:
        match self.stage:
            case "free" | "ended":
                bits[:] = -1
            case "ending":
                bits[:] = mask_bits(self._stops, len(bits) * 32) if self._stops else -1
            case "binding":
                self._automaton.fill(bits)
                if self._tail and self._tail[-1] in self._spelling.barred:
                    bits &= self._spelling.barred[self._tail[-1]]
                if not bits.any():
                    self._enter("ending")
                    self._fill(bits)

    def _fill_ahead(self, bits: Bits, drafts: Sequence[int]) -> None:
        """The rows behind drafts. Leaves no trace."""
        stages, tail, steps = len(self._stages), self._tail, 0
        for place, draft in enumerate(drafts):
            advanced = self._advance(draft) if allows(bits[place], draft) else None
            if advanced is None:
                bits[place + 1 :] = -1
                break
            steps += advanced
            self._fill(bits[place + 1])
        if steps:
            self._automaton.rollback(steps)
        del self._stages[stages:]
        self._tail = tail

    def _advance(self, token: int) -> int | None:
        """Goes on behind `token`: how many steps the automaton took, or None where it takes none."""
        match self.stage:
            case "free":
                return self._look_for_start(token)
            case "binding":
                if not self._automaton.accept_token(token):
                    return None
                self._tail = self._spelling.of(token)
                if self._automaton.is_terminated():
                    self._enter("ended")
                return 1
            case "ending":
                if token in self._stops:
                    self._enter("ended")
                return 0
            case "ended":
                return 0

    def _look_for_start(self, token: int) -> int:
        """The grammar begins behind the first `after`, within a token too: what follows it there is the grammar's, but
        for white space that no grammar begins with."""
        self._tail += self._spelling.of(token)
        place = self._tail.find(self._after)
        if place < 0:
            self._tail = self._tail[-len(self._after) :]
            return 0
        self._tail = self._tail[place + len(self._after) :]
        self._enter("binding")
        return self._automaton.accept_bytes(self._tail) if self._tail else 0


def allows(bits: Bits, token: int) -> bool:
    """Whether `bits` [words] allow `token`."""
    return bool(int(bits[token // 32]) >> (token % 32) & 1)


def make_matcher(
    compiled: CompiledGrammar, stops: tuple[int, ...], after: str, spelling: TokenPieces
) -> GrammarMatcher:
    """A matcher at its start, see `GrammarMatcher`. Raises AutomatonFailed."""
    return GrammarMatcher(compiled.automaton(stops), tuple(stops), after.encode(), spelling)
