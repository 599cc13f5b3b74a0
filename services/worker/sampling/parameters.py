"""Sampling parameters of every sequence, in arrays by sequence index, so that a step's batch is one indexing away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.history import BadWords
from services.worker.sampling.masks import TokenMask
from services.worker.sampling.random_numbers import RejectedDrafts, race_keys
from services.worker.sampling.token_bits import mask_bits, mask_words
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence

GREEDY_BELOW = 1e-5
"""Temperatures under this one are greedy, as in vLLM: dividing by them would only overflow."""


MAX_FACTOR = 1e30
"""Factors beyond it, or beyond its inverse, would leave the range of single precision."""

MAX_TOKENS = 2**31 - 1
"""No sequence is longer than counts of 32 bits can say."""

_ALL = 1 << 40


class Feature(IntFlag):
    """What a request asks for beyond an argmax; a batch pays only for what some request in it asks."""

    RANDOM = auto()
    TOP = auto()
    """The row has a top_k or a top_p."""
    MIN_P = auto()
    PENALTIES = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    LOGPROBS = auto()
    ALLOWED = auto()
    """The row has allowed_token_ids."""
    BAD_WORDS = auto()
    THINKING = auto()
    """Thinking that has used its budget up, or never began: its end may have to be forced."""
    LOGPROB_IDS = auto()
    """Log-probabilities of chosen tokens instead of the likeliest."""
    GRAMMAR = auto()
    """A mask that comes with the batch: see `SamplingBatch.masked`."""
    PROCESSED = auto()
    """Logits of logits processors that come with the batch: see `SamplingBatch.with_processed`."""


class ProcessedRows(NamedTuple):
    """Logits that take the place of the model's, for some of a batch's rows."""

    rows: NDArray[np.intp]
    """[M] in rising order, each once."""
    values: Tensor
    """float32 [M, vocab]"""

    def part(self, first: int, last: int) -> ProcessedRows:
        """Those of the batch's rows from `first` up to `last`, which count from 0 then."""
        begin, end = np.searchsorted(self.rows, (first, last))
        return ProcessedRows(self.rows[begin:end] - first, self.values[begin:end])


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of a step's R sampled rows. Read while the step lasts: they lie in the table's arrays."""

    features: Feature
    """The features that any row uses."""
    by_row: NDArray[np.int32]
    """[R] the features that each row uses."""
    position: NDArray[np.int32]
    """[R] output tokens before the one to draw."""
    seq_indices: NDArray[np.intp]
    """[R]"""
    table: ParameterTable

    mask: TokenMask | None = None
    """The tokens that grammars allow, for the rows with Feature.GRAMMAR; None without any."""
    rejected: RejectedDrafts | None = None
    """[R] by how much `position` is too high, where the host cannot know."""
    processed: ProcessedRows | None = None
    """What logits processors of plug-ins made, for the rows with Feature.PROCESSED; None without any."""

    def rows_with(self, feature: Feature) -> NDArray[np.intp]:
        """The numbers of the rows that ask for any of `feature`."""
        return np.flatnonzero(self.by_row & int(feature))

    def masked(self, mask: TokenMask) -> SamplingBatch:
        """The same rows with a mask of the tokens that some of them may draw."""
        by_row = self.by_row.copy()
        by_row[mask.rows] |= int(Feature.GRAMMAR)
        return replace(self, features=self.features | Feature.GRAMMAR, by_row=by_row, mask=mask)

    def with_processed(self, processed: ProcessedRows) -> SamplingBatch:
        """The same rows, some of which are drawn from other logits than the model's."""
        by_row = self.by_row.copy()
        by_row[processed.rows] |= int(Feature.PROCESSED)
        return replace(self, features=self.features | Feature.PROCESSED, by_row=by_row, processed=processed)

    def of_rows(self, rows: NDArray[np.intp]) -> SamplingBatch:
        """Only these `rows` [P], in rising order, which count from 0 then; before anything is processed, and where the
        host knows all positions."""
        assert self.processed is None
        assert self.rejected is None
        by_row, mask = self.by_row[rows], self.mask
        if mask is not None:
            own = np.isin(mask.rows, rows)
            mask = TokenMask(np.searchsorted(rows, mask.rows[own]), mask.bits[own])
        features = Feature(int(np.bitwise_or.reduce(by_row)))
        return SamplingBatch(features, by_row, self.position[rows], self.seq_indices[rows], self.table, mask)

    def later(self, tokens: int) -> SamplingBatch:
        """The same rows so many tokens later, where `ParameterTable.position_independent` says so."""
        return SamplingBatch(self.features, self.by_row, self.position + np.int32(tokens), self.seq_indices, self.table)

    def candidate_keys(self, rows: NDArray[np.intp] | slice = slice(None)) -> NDArray[np.int64]:
        """The keys that `rows` may be drawn by, to be sent to the device: one for each, or one for each position that
        may be meant."""
        seeds, positions = self.table.seed[self.seq_indices[rows]], self.position[rows]
        if self.rejected is None:
            return race_keys(seeds, positions)
        back = np.arange(self.rejected.max_count + 1, dtype=np.int32)
        return race_keys(np.repeat(seeds, len(back)), (positions[:, None] - back).ravel())

    def select_keys(self, candidates: Tensor, rows: Tensor | None = None) -> Tensor:
        """int64 [P]: of the `candidates` of `rows` [P], or of all rows, those of the positions drawn."""
        if self.rejected is None:
            return candidates
        rejected = self.rejected if rows is None else self.rejected.of(rows)
        index = rejected.counts.long().unsqueeze(1)
        return candidates.view(-1, rejected.max_count + 1).gather(1, index).squeeze(1)

    def part(self, first: int, last: int) -> SamplingBatch:
        """The rows from `first` up to `last`, renumbered from 0."""
        by_row = self.by_row[first:last]
        features = Feature(int(np.bitwise_or.reduce(by_row)))
        mask = None if self.mask is None else self.mask.part(first, last)
        short = None if self.rejected is None else self.rejected.part(first, last)
        processed = None if self.processed is None else self.processed.part(first, last)
        position, seq_indices = self.position[first:last], self.seq_indices[first:last]
        return SamplingBatch(features, by_row, position, seq_indices, self.table, mask, short, processed)


class ParameterTable:
    """The parameters of every sequence that the worker holds; owned by the sequence table. Arrays are [sequences]."""

    def __init__(self, max_sequences: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._features = np.zeros(max_sequences, dtype=np.int32)
        self.prompt_lengths = np.zeros(max_sequences, dtype=np.int32)
        self.temperature = np.ones(max_sequences, dtype=np.float32)
        """1 for greedy sequences."""
        self.top_k = np.zeros(max_sequences, dtype=np.int64)
        """More than any vocabulary holds where every token is kept."""
        self.top_p = np.ones(max_sequences, dtype=np.float32)
        self.min_p = np.zeros(max_sequences, dtype=np.float32)
        self.presence = np.zeros(max_sequences, dtype=np.float32)
        self.frequency = np.zeros(max_sequences, dtype=np.float32)
        self.repetition = np.ones(max_sequences, dtype=np.float32)
        self.seed = np.zeros(max_sequences, dtype=np.uint64)
        self.logprobs = np.zeros(max_sequences, dtype=np.int32)
        """0 also where none are asked for; the features tell the two apart."""
        self.bias_tokens = PaddedLists(max_sequences, np.int64)
        self.bias_values = PaddedLists(max_sequences, np.float32)
        self.stops = PaddedLists(max_sequences, np.int64)
        self.bad_words = BadWords(max_sequences)
        self.logprob_ids = PaddedLists(max_sequences, np.int64)
        self.thinking_starts = PaddedLists(max_sequences, np.int64)
        self.thinking_ends = PaddedLists(max_sequences, np.int64)
        self.allowed: NDArray[np.int32] = np.zeros((max_sequences, 0), dtype=np.int32)
        """[sequences, words] bits as in `masks`; no words until the first who asks."""
        self._min_tokens = np.zeros(max_sequences, dtype=np.int32)
        self.thinking_budget = np.zeros(max_sequences, dtype=np.int32)

    def put(self, seq_index: int, sequence: NewSequence) -> None:
        """Remembers `sequence`'s parameters. Tokens outside the vocabulary have no logit and are left out."""
        params = sequence.sampling
        self.prompt_lengths[seq_index] = sequence.prompt_length
        greedy = params.temperature < GREEDY_BELOW
        self.temperature[seq_index] = 1.0 if greedy else min(params.temperature, MAX_FACTOR)
        keeps_all = not 0 < params.top_k < self._vocab_size
        self.top_k[seq_index] = _ALL if keeps_all else params.top_k
        self.top_p[seq_index] = params.top_p
        self.min_p[seq_index] = params.min_p
        self.presence[seq_index] = params.presence_penalty
        self.frequency[seq_index] = params.frequency_penalty
        self.repetition[seq_index] = min(max(params.repetition_penalty, 1 / MAX_FACTOR), MAX_FACTOR)
        self.seed[seq_index] = params.seed & (2**64 - 1)
        self._min_tokens[seq_index] = min(sequence.min_tokens, MAX_TOKENS)
        self.logprobs[seq_index] = params.logprobs or 0
        self._features[seq_index] = self._draw_features(seq_index, params, greedy) | self._put_lists(
            seq_index, sequence
        )

    def _draw_features(self, seq_index: int, params: SamplingOptions, greedy: bool) -> Feature:
        features = Feature(0)
        if not greedy:
            features |= Feature.RANDOM
            if self.top_k[seq_index] < _ALL or params.top_p < 1.0:
                features |= Feature.TOP
            if params.min_p > 0.0:
                features |= Feature.MIN_P
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            features |= Feature.PENALTIES
        if params.logprobs is not None:
            features |= Feature.LOGPROBS
        return features

    def _put_lists(self, seq_index: int, sequence: NewSequence) -> Feature:
        """What is asked for as lists of tokens."""
        params, features = sequence.sampling, Feature(0)
        if params.logprob_token_ids is not None:
            self.logprob_ids.put(seq_index, self._inside(params.logprob_token_ids))
            features |= Feature.LOGPROBS | Feature.LOGPROB_IDS
        if biases := {token: value for token, value in params.logit_bias if 0 <= token < self._vocab_size}:
            self.bias_tokens.put(seq_index, tuple(biases))
            self.bias_values.put(seq_index, tuple(biases.values()))
            features |= Feature.BIAS
        if sequence.min_tokens and (stops := self._inside(sequence.stop_token_ids)):
            self.stops.put(seq_index, stops)
            features |= Feature.MIN_TOKENS
        if params.allowed_token_ids is not None:
            self._put_allowed(seq_index, params.allowed_token_ids)
            features |= Feature.ALLOWED
        if bad := [word for word in params.bad_words if word and len(self._inside(word)) == len(word)]:
            self.bad_words.put(seq_index, bad)
            features |= Feature.BAD_WORDS
        if params.thinking_budget is not None and (end := self._inside(params.thinking_end)):
            self.thinking_budget[seq_index] = min(params.thinking_budget, MAX_TOKENS)
            self.thinking_starts.put(seq_index, self._inside(params.thinking_start))
            self.thinking_ends.put(seq_index, end)
            features |= Feature.THINKING
        return features

    def _put_allowed(self, seq_index: int, tokens: tuple[int, ...]) -> None:
        if not self.allowed.shape[1]:
            self.allowed = np.zeros((len(self.allowed), mask_words(self._vocab_size)), dtype=np.int32)
        self.allowed[seq_index] = mask_bits(tokens, self._vocab_size)

    def _inside(self, tokens: tuple[int, ...]) -> list[int]:
        return [token for token in tokens if 0 <= token < self._vocab_size]

    def position_independent(self, choices: SamplingBatch) -> bool:
        """Whether the same is asked for by the same rows, however long their outputs get: nothing that binds only at
        first, or only later."""
        features = Feature(int(np.bitwise_or.reduce(self._features[choices.seq_indices])))
        return not choices.features & Feature.MIN_TOKENS and not features & Feature.THINKING

    def sampling_batch(self, seq_indices: NDArray[np.intp], position: NDArray[np.int32]) -> SamplingBatch:
        """The parameters of the sequences at `seq_indices`, about to draw the output tokens at `position`."""
        by_row = self._features[seq_indices]
        features = Feature(int(np.bitwise_or.reduce(by_row)))
        if features & (Feature.MIN_TOKENS | Feature.THINKING):
            reached = np.where(position >= self._min_tokens[seq_indices], int(Feature.MIN_TOKENS), 0)
            thinks_on = np.where(position < self.thinking_budget[seq_indices], int(Feature.THINKING), 0)
            by_row = by_row & ~(reached | thinks_on).astype(np.int32)
            features = Feature(int(np.bitwise_or.reduce(by_row)))
        return SamplingBatch(features, by_row, position, seq_indices, self)


class PaddedLists:
    """Rows padded by repeating their first item, so that the padding may be written where that was written: twice the
    same value. As wide as the longest list so far."""

    def __init__(self, max_sequences: int, dtype: type[np.generic]) -> None:
        self._lengths = np.zeros(max_sequences, dtype=np.int32)
        self._values: NDArray[Any] = np.zeros((max_sequences, 0), dtype=dtype)

    def put(self, seq_index: int, items: Sequence[int] | Sequence[float] | NDArray[Any]) -> None:
        """Replaces the sequence's list. One that is never read may be empty."""
        count = len(items)
        self._lengths[seq_index] = count
        if count > self._values.shape[1]:
            wider = np.zeros((len(self._values), count), dtype=self._values.dtype)
            wider[:, : self._values.shape[1]] = self._values
            fresh = wider[:, self._values.shape[1] :]
            fresh[:] = wider[:, :1] if self._values.shape[1] else 0
            self._values = wider
        if count:
            self._values[seq_index, :count] = items
            self._values[seq_index, count:] = items[0]

    @property
    def values(self) -> NDArray[Any]:
        """[sequences, the longest of all lists]; another array once there is a longer one."""
        return self._values

    def rows(self, seq_indices: NDArray[np.intp]) -> NDArray[Any]:
        """[P, the longest of their lists]"""
        return self._values[seq_indices, : int(self._lengths[seq_indices].max())]

    def lengths(self, seq_indices: NDArray[np.intp]) -> NDArray[np.int32]:
        """[P] items that the lists of `seq_indices` have without their padding."""
        return self._lengths[seq_indices]
