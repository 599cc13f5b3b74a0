"""Beam search over the log-probabilities of next tokens: finds the outputs that the model considers most likely. Pure.

The algorithm is that of `transformers` (`GenerationMixin._beam_search`): the best continuations of the running beams
are candidates, `width` times (1 + the number of tokens that end a text). Candidates among the best `width` that have
ended are kept by their score, and the best of the others run on. A score is the sum of log-probabilities divided by
(tokens ** length_penalty).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]
"""When to stop once `width` hypotheses have ended. True: at once. False: when no running beam has a better score now.
"never": when none can reach a better one."""


class Beam(NamedTuple):
    """An unfinished output of a beam search."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    """Sum of its tokens' log-probabilities."""
    trail: tuple[int, ...] = ()
    """For each token, the index of the beam that it continued."""


class Hypothesis(NamedTuple):
    """An output that has ended, with the token that ended it where `finish` is "stop"."""

    beam: Beam
    score: float
    finish: Literal["stop", "length"]


class BeamSearch:
    """Owns the beams of one prompt."""

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        ends: Iterable[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._width, self._max_tokens = width, max_tokens
        self._ends = frozenset(ends)
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._can_improve = True
        """Whether a running beam may still become one of the best."""
        self.running = [Beam()]
        self.ended: list[Hypothesis] = []
        """The best first, `width` at most."""

    @property
    def candidates(self) -> int:
        """How many next tokens must be known of each running beam, as one beam may provide all candidates."""
        return max(2, 1 + len(self._ends)) * self._width

    @property
    def over(self) -> bool:
        """Whether the search has ended."""
        enough = self._early_stopping is True and self._full
        return enough or not self._can_improve or not self.running

    @property
    def _full(self) -> bool:
        return len(self.ended) == self._width

    def advance(self, likeliest: list[list[tuple[int, float]]]) -> None:
        """Extends every beam by one token. `likeliest` holds for each running beam its `candidates` most likely next
        tokens with their log-probabilities."""
        candidates = [
            Beam((*beam.tokens, token), beam.logprob + logprob, (*beam.trail, place))
            for place, (beam, following) in enumerate(zip(self.running, likeliest, strict=True))
            for token, logprob in following
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        del candidates[self.candidates :]
        length = len(candidates[0].tokens)
        if self._can_improve and not (self._early_stopping is True and self._full):
            self._keep(beam for beam in candidates[: self._width] if self._has_ended(beam))
        self.running = [beam for beam in candidates if not self._has_ended(beam)][: self._width]
        self._can_improve = self._can_improve and self._running_may_improve(length)

    def _has_ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self._ends or len(beam.tokens) == self._max_tokens

    def _keep(self, beams: Iterable[Beam]) -> None:
        for beam in beams:
            finish: Literal["stop", "length"] = "stop" if beam.tokens[-1] in self._ends else "length"
            self.ended.append(Hypothesis(beam, beam.logprob / self._weight(len(beam.tokens)), finish))
        self.ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self.ended[self._width :]

    def _running_may_improve(self, length: int) -> bool:
        if not self._full or not self.running:
            return bool(self.running)
        longest = self._early_stopping == "never" and self._length_penalty > 0
        best = self.running[0].logprob / self._weight(self._max_tokens if longest else length)
        return best > self.ended[-1].score

    def _weight(self, tokens: int) -> float:
        return float(tokens**self._length_penalty)
