"""Which rows of a step score tokens of prompts, and the log-probabilities that they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.rows import Int32s, RowRuns
from services.worker.sampling.logprobs import FindLogprobs, LogprobTensors, prompt_logprobs
from shared.ids import SequenceId
from shared.messages.scheduler import SequencePromptLogprobs


class _PromptSpan(NamedTuple):
    """The rows of one sequence in a step whose next tokens belong to its prompt."""

    sequence: SequenceId
    position: int
    """Index in the prompt of the token behind the first row."""
    tokens: Int32s
    first_row: int
    num_logprobs: int


@dataclass(slots=True)
class PromptRows:
    """The scored prompt rows of one step. Rows are numbers in its batch."""

    parts: list[_PromptSpan] = field(default_factory=list)

    def add(
        self, sequence: SequenceId, *, prompt: Int32s, computed: int, count: int, first_row: int, num_logprobs: int
    ) -> None:
        """The step computes `count` tokens of a sequence behind its `computed` ones, in rows from `first_row` on."""
        tokens = prompt[computed + 1 : computed + count + 1]
        if len(tokens):
            self.parts.append(_PromptSpan(sequence, computed + 1, tokens, first_row, num_logprobs))

    def rows(self) -> Int32s:
        """[S] numbers of all scored rows."""
        ranges = [np.arange(len(part.tokens), dtype=np.int32) + np.int32(part.first_row) for part in self.parts]
        return np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int32)

    def scored(self, logits: Tensor, find: FindLogprobs | None) -> ScoredPromptRows:
        """logits [S, vocab] of `rows()`; there is at least one. `find`: a kernel, or None: PyTorch's operations."""
        tokens = np.concatenate([part.tokens for part in self.parts]).astype(np.int64)
        counts = np.repeat([part.num_logprobs for part in self.parts], [len(part.tokens) for part in self.parts])
        found = prompt_logprobs(logits, tokens, counts.astype(np.int32), find)
        return ScoredPromptRows(tuple(self.parts), tuple(found))


class ScoredPromptRows(NamedTuple):
    """The log-probabilities of prompts that a step computed, where its logits are or on their way to the host."""

    parts: tuple[_PromptSpan, ...] = ()
    likelihoods: tuple[LogprobTensors, ...] = ()

    def on_host(self) -> ScoredPromptRows:
        """These results copied to the host; see `transfer.to_host`."""
        return ScoredPromptRows(self.parts, tuple(part.on_host() for part in self.likelihoods))

    def messages(self) -> tuple[SequencePromptLogprobs, ...]:
        """The results as messages. They must be on the host."""
        entries = (entry for part in self.likelihoods for entry in part.entries())
        return tuple(
            SequencePromptLogprobs(part.sequence, part.position, tuple(next(entries) for _ in part.tokens))
            for part in self.parts
        )


class ScoredPrompt(NamedTuple):
    """A sequence whose prompt is scored."""

    sequence: SequenceId
    prompt_length: int
    num_logprobs: int
    """Most likely tokens that are reported beside each of the prompt's."""


def prompt_rows(prompts: Mapping[int, ScoredPrompt], units: RowRuns, last_rows: Int32s, tokens: Int32s) -> PromptRows:
    """The scored prompt rows of a step. `prompts`: those that are scored, by sequence index; last_rows [U], tokens
    [sequences, width]."""
    rows = PromptRows()
    for place, seq_index in enumerate(units.seq_indices.tolist()):
        if (scored := prompts.get(seq_index)) is not None:
            rows.add(
                scored.sequence,
                prompt=tokens[seq_index, : scored.prompt_length],
                computed=int(units.starts[place]),
                count=int(units.counts[place]),
                first_row=int(last_rows[place] - units.counts[place] + 1),
                num_logprobs=scored.num_logprobs,
            )
    return rows


class LogitsRows(NamedTuple):
    """The rows of a batch that logits are computed of, in rising order, and where among them those are that are drawn
    from and those of prompts."""

    rows: Int32s
    drawn: NDArray[np.intp]
    scored: NDArray[np.intp]


def merge_logits_rows(drawn: Int32s, scored: Int32s) -> LogitsRows:
    """Rows that are drawn from, and rows that score prompts, as one rising list.

    No row is both: the output's first token is drawn behind the last token of the prompt."""
    rows = np.sort(np.concatenate((drawn, scored)))
    return LogitsRows(rows, np.searchsorted(rows, drawn), np.searchsorted(rows, scored))
