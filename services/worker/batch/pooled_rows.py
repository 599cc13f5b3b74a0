"""Which rows of a step belong to prompts that become vectors, and the vectors that they come to.

The arithmetic is that of sentence-transformers: `1_Pooling` in float32, then the cut to a number of dimensions, then
`2_Normalize`. A prompt may come in chunks: a mean is summed over them, and a maximum goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.rows import Int32s, RowRuns
from services.worker.ops.transfer import to_host
from shared.ids import SequenceId
from shared.messages.generation import PoolingOptions
from shared.messages.scheduler import SequencePooled

MIN_NORM = 1e-12
"""A vector is divided by at least this, as torch.nn.functional.normalize does."""


PooledHead = Callable[[Tensor], Tensor]
"""What pooled states [k, size] go through, in float32."""


class PromptPool:
    """Owns what is pooled of one sequence's prompt so far. Used in the order in which steps are launched."""

    def __init__(
        self, sequence: SequenceId, prompt: Int32s, options: PoolingOptions, head: PooledHead | None = None
    ) -> None:
        """`prompt` [tokens]; `head`: a classifier's, which makes logits of the pooled state."""
        self.sequence, self.prompt_length, self.options = sequence, len(prompt), options
        self._head = head
        self._step_ends = None if options.step_tag_id is None else np.flatnonzero(prompt == options.step_tag_id)
        """Which tokens end steps; None: each has a vector."""
        self._state: Tensor | None = None
        self._tokens: list[Tensor] = []
        """The vectors of tokens so far, where each has one."""

    def add(self, hidden: Tensor, computed: int) -> Tensor | None:
        """Takes the hidden states [n, size] of the tokens behind the `computed` first ones; where these are the
        prompt's last, the vectors [1, size], or [tokens, size], in float32, else None. Of a classifier: logits."""
        match self.options.pooling:
            case "last":
                self._state = hidden[-1].float()
            case "mean" | "mean_sqrt_len":
                self._sum(hidden.float().sum(dim=0))
            case "weighted_mean":
                weights = torch.arange(computed + 1, computed + len(hidden) + 1, device=hidden.device)
                self._sum(weights.float() @ hidden.float())
            case "max":
                largest = hidden.amax(dim=0).float()
                self._state = largest if self._state is None else torch.maximum(self._state, largest)
            case "cls" if computed == 0:
                self._state = hidden[0].float()
            case "all":
                self._tokens.append(self._judged(self._ends_of(hidden, computed).float()))
        if computed + len(hidden) < self.prompt_length:
            return None
        if self.options.pooling == "all":
            tokens, self._tokens = self._tokens, []
            return torch.cat(tokens)
        state, self._state = self._state, None
        assert state is not None, "nothing of a prompt whose tokens are all pooled comes from a cache"
        return self._judged((state / self._divisor()).unsqueeze(0))

    def _ends_of(self, hidden: Tensor, computed: int) -> Tensor:
        """hidden [n, size] of the tokens behind the `computed` first ones → those that have vectors"""
        if self._step_ends is None:
            return hidden
        first, end = np.searchsorted(self._step_ends, (computed, computed + len(hidden)))
        return hidden[(self._step_ends[first:end] - computed).tolist()]

    def _judged(self, states: Tensor) -> Tensor:
        """states [k, size] → what the head makes of each. A copy: what they lie in is written to again."""
        if self._head is None:
            return states.clone()
        return self._head(states) if len(states) else states.new_empty((0, self.options.dimensions))

    def _sum(self, chunk: Tensor) -> None:
        self._state = chunk if self._state is None else self._state + chunk

    def _divisor(self) -> float:
        """Of the whole prompt's state."""
        match self.options.pooling:
            case "mean":
                return self.prompt_length
            case "mean_sqrt_len":
                return sqrt(self.prompt_length)
            case "weighted_mean":
                return self.prompt_length * (self.prompt_length + 1) / 2
            case "last" | "cls" | "max" | "all":
                return 1.0


class _PooledSpan(NamedTuple):
    """The rows of one prompt in a step."""

    prompt: PromptPool
    computed: int
    first_row: int
    end_row: int


class PooledVectors(NamedTuple):
    """The vectors that a step comes to, where they were computed or on their way to the host."""

    prompts: tuple[PromptPool, ...] = ()
    values: Tensor | None = None
    """[vectors, size] in float32, those of one prompt behind those of another; None without any."""
    counts: tuple[int, ...] = ()
    """Vectors of each prompt."""

    def on_host(self) -> PooledVectors:
        """These vectors copied to the host; see `transfer.to_host`."""
        return self if self.values is None else PooledVectors(self.prompts, to_host(self.values), self.counts)

    def messages(self) -> tuple[tuple[SequencePooled, ...], tuple[SequenceId, ...]]:
        """The vectors, cut and normalized, as messages; and the sequences whose vector is no number. They must be on
        the host."""
        if self.values is None:
            return (), ()
        pooled, undefined = [], []
        ends = np.cumsum(self.counts)[:-1]
        for prompt, whole in zip(self.prompts, np.split(self.values.numpy(), ends), strict=True):
            vectors = whole[:, : prompt.options.dimensions]
            if prompt.options.normalize:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), MIN_NORM)
            if np.isfinite(vectors).all():
                pooled.append(SequencePooled(prompt.sequence, vectors.astype("<f4").tobytes()))
            else:
                undefined.append(prompt.sequence)
        return tuple(pooled), tuple(undefined)


class PooledRows(NamedTuple):
    """The rows of a step that belong to prompts which become vectors."""

    spans: tuple[_PooledSpan, ...] = ()

    def vectors(self, hidden: Tensor) -> PooledVectors:
        """hidden [n, size]: the last hidden states of all rows of the step. Called once."""
        whole, vectors = [], []
        for prompt, computed, first, end in self.spans:
            vector = prompt.add(hidden[first:end], computed)
            if vector is not None:
                whole.append(prompt)
                vectors.append(vector)
        counts = tuple(len(each) for each in vectors)
        return PooledVectors(tuple(whole), torch.cat(vectors) if vectors else None, counts)


NO_POOLED_ROWS = PooledRows()
NO_VECTORS = PooledVectors()


def pooled_rows(prompts: Mapping[int, PromptPool], units: RowRuns, last_rows: Int32s) -> PooledRows:
    """The rows of a step that are pooled. `prompts`: by sequence index; last_rows [U]."""
    spans = []
    for place, seq_index in enumerate(units.seq_indices.tolist()):
        if (prompt := prompts.get(seq_index)) is not None:
            end = int(last_rows[place]) + 1
            spans.append(_PooledSpan(prompt, int(units.starts[place]), end - int(units.counts[place]), end))
    return PooledRows(tuple(spans))
