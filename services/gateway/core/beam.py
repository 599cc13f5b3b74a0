"""Beam search over next tokens' log-probabilities: the outputs that the model finds likeliest. Pure.

The search of `transformers` (`GenerationMixin._beam_search`), to the letter: the best continuations of the running
beams are candidates, `width` times as many as there are tokens that end a text, and `width` more. Those among the best
`width` that have ended are kept by their score, and the best others run on. A score is the sum of log-probabilities
over (tokens ** length_penalty).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]
"""True: as many as asked for have ended. False: and none that runs has a better score as it is now. "never": none can
come to have one."""


class Beam(NamedTuple):
    """A beginning of an output."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    """The sum over its tokens."""
    trail: tuple[int, ...] = ()
    """For each token, which of the beams that ran then it continued."""


class Hypothesis(NamedTuple):
    """An output that has ended; with the token that ended it, where that is why."""

    beam: Beam
    score: float
    finish: Literal["stop", "length"]


class BeamSearch:
    """Owns the beams of one prompt."""

    def __init__(
        self,
        *,
        width: int,
        most_tokens: int,
        ends: Iterable[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._width, self._most_tokens = width, most_tokens
        self._ends = frozenset(ends)
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._hopeful = True
        """Whether a running beam may still come to be among the best."""
        self.running = [Beam()]
        self.ended: list[Hypothesis] = []
        """The best ones first, `width` at the most."""

    @property
    def candidates(self) -> int:
        """How many next tokens of each running beam must be known: any of them may be all candidates'."""
        return max(2, 1 + len(self._ends)) * self._width

    @property
    def over(self) -> bool:
        enough = self._early_stopping is True and self._full
        return enough or not self._hopeful or not self.running

    @property
    def _full(self) -> bool:
        return len(self.ended) == self._width

    def advance(self, likeliest: list[list[tuple[int, float]]]) -> None:
        """Goes on by one token. `likeliest`: for each running beam its next tokens with their log-probabilities, the
        `candidates` most likely ones."""
        candidates = [
            Beam((*beam.tokens, token), beam.logprob + logprob, (*beam.trail, place))
            for place, (beam, following) in enumerate(zip(self.running, likeliest, strict=True))
            for token, logprob in following
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        del candidates[self.candidates :]
        length = len(candidates[0].tokens)
        if self._hopeful and not (self._early_stopping is True and self._full):
            self._keep(beam for beam in candidates[: self._width] if self._has_ended(beam))
        self.running = [beam for beam in candidates if not self._has_ended(beam)][: self._width]
        self._hopeful = self._hopeful and self._may_improve(length)

    def _has_ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self._ends or len(beam.tokens) == self._most_tokens

    def _keep(self, beams: Iterable[Beam]) -> None:
        for beam in beams:
            finish: Literal["stop", "length"] = "stop" if beam.tokens[-1] in self._ends else "length"
            self.ended.append(Hypothesis(beam, beam.logprob / self._weight(len(beam.tokens)), finish))
        self.ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self.ended[self._width :]

    def _may_improve(self, length: int) -> bool:
        if not self._full or not self.running:
            return bool(self.running)
        longest = self._early_stopping == "never" and self._length_penalty > 0
        best = self.running[0].logprob / self._weight(self._most_tokens if longest else length)
        return best > self.ended[-1].score

    def _weight(self, tokens: int) -> float:
        return float(tokens**self._length_penalty)
