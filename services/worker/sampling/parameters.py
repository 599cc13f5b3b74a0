"""Sampling parameters of every sequence, in arrays by slot, so that a step's batch is one indexing away."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.messages.worker import NewSequence

GREEDY_BELOW = 1e-5
"""Temperatures under this one are greedy, as in vLLM: dividing by them would only overflow."""


_ALL = 1 << 40


class Feature(IntFlag):
    """What a request asks for beyond an argmax; a batch pays only for what some request in it asks."""

    RANDOM = auto()
    TOP = auto()
    """top_k or top_p."""
    MIN_P = auto()
    PENALTIES = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    LOGPROBS = auto()


@dataclass(frozen=True, slots=True)
class Choices:
    """The parameters of a step's R sampled rows. Read while the step lasts: they lie in the table's arrays."""

    features: Feature
    """Those of all rows together."""
    by_row: NDArray[np.int32]
    """[R] each row's own."""
    position: NDArray[np.int32]
    """[R] output tokens before the one to draw."""
    slots: NDArray[np.intp]
    """[R]"""
    table: ParameterTable

    def rows_with(self, feature: Feature) -> NDArray[np.intp]:
        """The numbers of the rows that ask for any of `feature`."""
        return np.flatnonzero(self.by_row & int(feature))

    def part(self, first: int, last: int) -> Choices:
        """Those of the rows from `first` up to `last`, which count from 0 then."""
        by_row = self.by_row[first:last]
        features = Feature(int(np.bitwise_or.reduce(by_row)))
        return Choices(features, by_row, self.position[first:last], self.slots[first:last], self.table)

    def additions(self) -> Additions:
        """logit_bias, and -inf for the stop tokens of rows that have not reached min_tokens."""
        rows, tokens, values = [], [], []
        for row in self.rows_with(Feature.BIAS):
            biased, value = self.table.bias[int(self.slots[row])]
            rows.append(np.full(len(biased), row))
            tokens.append(biased)
            values.append(value)
        for row in self.rows_with(Feature.MIN_TOKENS):
            stops = self.table.stops[int(self.slots[row])]
            rows.append(np.full(len(stops), row))
            tokens.append(stops)
            values.append(np.full(len(stops), -np.inf, dtype=np.float32))
        return Additions(np.concatenate(rows), np.concatenate(tokens), np.concatenate(values))


class Additions(NamedTuple):
    """What is added to which logit; [additions] each."""

    rows: NDArray[np.intp]
    tokens: NDArray[np.int64]
    values: NDArray[np.float32]


class ParameterTable:
    """Owned by the sequence table: one slot for each sequence that the worker holds. Arrays are [slots]."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._features = np.zeros(slots, dtype=np.int32)
        self.temperature = np.ones(slots, dtype=np.float32)
        """1 for greedy sequences."""
        self.top_k = np.zeros(slots, dtype=np.int64)
        """More than any vocabulary holds where every token is kept."""
        self.top_p = np.ones(slots, dtype=np.float32)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.presence = np.zeros(slots, dtype=np.float32)
        self.frequency = np.zeros(slots, dtype=np.float32)
        self.repetition = np.ones(slots, dtype=np.float32)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.logprobs = np.zeros(slots, dtype=np.int32)
        """0 also where none are asked for; the features tell the two apart."""
        self._min_tokens = np.zeros(slots, dtype=np.int32)
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.stops: dict[int, NDArray[np.int64]] = {}

    def put(self, slot: int, sequence: NewSequence) -> None:
        """Remembers `sequence`'s parameters. Tokens outside the vocabulary have no logit and are left out."""
        params = sequence.sampling
        greedy = params.temperature < GREEDY_BELOW
        self.temperature[slot] = 1.0 if greedy else params.temperature
        keeps_all = not 0 < params.top_k < self._vocab_size
        self.top_k[slot] = _ALL if keeps_all else params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.seed[slot] = params.seed & (2**64 - 1)
        self.logprobs[slot] = params.logprobs or 0
        self._min_tokens[slot] = sequence.min_tokens
        biases = [(token, value) for token, value in params.logit_bias if 0 <= token < self._vocab_size]
        tokens, values = zip(*biases, strict=True) if biases else ((), ())
        self.bias[slot] = (np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32))
        stops = [token for token in sequence.stop_token_ids if token < self._vocab_size]
        self.stops[slot] = np.array(stops, dtype=np.int64)
        self._features[slot] = self._asked(slot, sequence, greedy)

    def _asked(self, slot: int, sequence: NewSequence, greedy: bool) -> Feature:
        params = sequence.sampling
        asked = Feature(0)
        if not greedy:
            asked |= Feature.RANDOM
            if self.top_k[slot] < _ALL or params.top_p < 1.0:
                asked |= Feature.TOP
            if params.min_p > 0.0:
                asked |= Feature.MIN_P
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            asked |= Feature.PENALTIES
        if len(self.bias[slot][0]):
            asked |= Feature.BIAS
        if sequence.min_tokens and len(self.stops[slot]):
            asked |= Feature.MIN_TOKENS
        if params.logprobs is not None:
            asked |= Feature.LOGPROBS
        return asked

    def choose(self, slots: NDArray[np.intp], position: NDArray[np.int32]) -> Choices:
        """The parameters of the sequences in `slots`, about to draw the output tokens at `position`."""
        by_row = self._features[slots]
        features = Feature(int(np.bitwise_or.reduce(by_row)))
        if features & Feature.MIN_TOKENS:
            reached = position >= self._min_tokens[slots]
            by_row = np.where(reached, by_row & ~int(Feature.MIN_TOKENS), by_row)
            features = Feature(int(np.bitwise_or.reduce(by_row)))
        return Choices(features, by_row, position, slots, self)
