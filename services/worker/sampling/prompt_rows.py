"""Which rows of a step score tokens of prompts, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.logprobs import Ranked, prompt_logprobs
from shared.ids import SequenceId
from shared.messages.scheduler import PromptScored

Int32s = NDArray[np.int32]


class _Part(NamedTuple):
    """Of one sequence: the rows of a step whose next tokens are its prompt's."""

    sequence: SequenceId
    position: int
    """Index in the prompt of the token behind the first row."""
    tokens: Int32s
    first_row: int
    most_likely: int


@dataclass(slots=True)
class PromptRows:
    """Of one step. Rows are numbers in its batch."""

    parts: list[_Part] = field(default_factory=list)

    def add(
        self, sequence: SequenceId, *, prompt: Int32s, computed: int, count: int, first_row: int, most_likely: int
    ) -> None:
        """The step computes `count` tokens of a sequence behind its `computed` ones, in rows from `first_row` on."""
        tokens = prompt[computed + 1 : computed + count + 1]
        if len(tokens):
            self.parts.append(_Part(sequence, computed + 1, tokens, first_row, most_likely))

    def rows(self) -> Int32s:
        """[S]"""
        ranges = [np.arange(len(part.tokens), dtype=np.int32) + np.int32(part.first_row) for part in self.parts]
        return np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int32)

    def scored(self, logits: Tensor) -> tuple[PromptScored, ...]:
        """logits [S, vocab] of `rows()`."""
        if not self.parts:
            return ()
        tokens = np.concatenate([part.tokens for part in self.parts]).astype(np.int64)
        counts = np.repeat([part.most_likely for part in self.parts], [len(part.tokens) for part in self.parts])
        entries = iter(prompt_logprobs(logits, Ranked(tokens, counts.astype(np.int32))))
        return tuple(
            PromptScored(part.sequence, part.position, tuple(next(entries) for _ in part.tokens)) for part in self.parts
        )


class LogitsRows(NamedTuple):
    """The rows of a batch that logits are computed of, in rising order, and where among them those are that are drawn
    from and those of prompts."""

    rows: Int32s
    drawn: NDArray[np.intp]
    scored: NDArray[np.intp]


def merged(drawn: Int32s, scored: Int32s) -> LogitsRows:
    """No row is both: the last token of a prompt is what the first one of the output is drawn behind."""
    rows = np.sort(np.concatenate((drawn, scored)))
    return LogitsRows(rows, np.searchsorted(rows, drawn), np.searchsorted(rows, scored))
