"""Sampling parameters of every sequence, in arrays by slot, so that a step's batch is one indexing away."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, auto

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
    """The parameters of a step's sampled rows; every array is [R] unless it says otherwise."""

    features: Feature
    """Those of all rows together."""
    by_row: NDArray[np.int32]
    """Each row's own."""
    temperature: NDArray[np.float32]
    """1 for greedy rows."""
    top_k: NDArray[np.int64]
    """More than any vocabulary holds where every token is kept."""
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]
    seed: NDArray[np.uint64]
    logprobs: NDArray[np.int32]
    """0 also where none are asked for; `by_row` tells the two apart."""
    position: NDArray[np.int32]
    """Output tokens before the one to draw."""
    slots: NDArray[np.intp]
    bias: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
    """(row, token, what is added): additive changes to logits, forbidden stop tokens included as -inf."""

    def rows_with(self, feature: Feature) -> NDArray[np.intp]:
        """The numbers of the rows that ask for any of `feature`."""
        return np.flatnonzero(self.by_row & int(feature))

    def part(self, first: int, last: int) -> Choices:
        """Those of the rows from `first` up to `last`, which count from 0 then."""
        by_row = self.by_row[first:last]
        rows, tokens, values = self.bias
        mine = (rows >= first) & (rows < last)
        return Choices(
            features=Feature(int(np.bitwise_or.reduce(by_row))),
            by_row=by_row,
            temperature=self.temperature[first:last],
            top_k=self.top_k[first:last],
            top_p=self.top_p[first:last],
            min_p=self.min_p[first:last],
            presence=self.presence[first:last],
            frequency=self.frequency[first:last],
            repetition=self.repetition[first:last],
            seed=self.seed[first:last],
            logprobs=self.logprobs[first:last],
            position=self.position[first:last],
            slots=self.slots[first:last],
            bias=(rows[mine] - first, tokens[mine], values[mine]),
        )


class ParameterTable:
    """Owned by the sequence table: one slot for each sequence that the worker holds."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._features = np.zeros(slots, dtype=np.int32)
        self._temperature = np.ones(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._min_p = np.zeros(slots, dtype=np.float32)
        self._presence = np.zeros(slots, dtype=np.float32)
        self._frequency = np.zeros(slots, dtype=np.float32)
        self._repetition = np.ones(slots, dtype=np.float32)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._logprobs = np.zeros(slots, dtype=np.int32)
        self._min_tokens = np.zeros(slots, dtype=np.int32)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stops: dict[int, NDArray[np.int64]] = {}

    def put(self, slot: int, sequence: NewSequence) -> None:
        """Remembers `sequence`'s parameters. Tokens outside the vocabulary have no logit and are left out."""
        params = sequence.sampling
        greedy = params.temperature < GREEDY_BELOW
        self._temperature[slot] = 1.0 if greedy else params.temperature
        keeps_all = not 0 < params.top_k < self._vocab_size
        self._top_k[slot] = _ALL if keeps_all else params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._repetition[slot] = params.repetition_penalty
        self._seed[slot] = params.seed & (2**64 - 1)
        self._logprobs[slot] = params.logprobs or 0
        self._min_tokens[slot] = sequence.min_tokens
        biases = [(token, value) for token, value in params.logit_bias if 0 <= token < self._vocab_size]
        tokens, values = zip(*biases, strict=True) if biases else ((), ())
        self._bias[slot] = (np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32))
        stops = [token for token in sequence.stop_token_ids if token < self._vocab_size]
        self._stops[slot] = np.array(stops, dtype=np.int64)
        self._features[slot] = self._asked(slot, sequence, greedy)

    def _asked(self, slot: int, sequence: NewSequence, greedy: bool) -> Feature:
        params = sequence.sampling
        asked = Feature(0)
        if not greedy:
            asked |= Feature.RANDOM
            if self._top_k[slot] < _ALL or params.top_p < 1.0:
                asked |= Feature.TOP
            if params.min_p > 0.0:
                asked |= Feature.MIN_P
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            asked |= Feature.PENALTIES
        if len(self._bias[slot][0]):
            asked |= Feature.BIAS
        if sequence.min_tokens and len(self._stops[slot]):
            asked |= Feature.MIN_TOKENS
        if params.logprobs is not None:
            asked |= Feature.LOGPROBS
        return asked

    def choose(self, slots: NDArray[np.intp], position: NDArray[np.int32]) -> Choices:
        """The parameters of the sequences in `slots`, about to draw the output tokens at `position`."""
        by_row = self._features[slots]
        by_row = np.where(position < self._min_tokens[slots], by_row, by_row & ~int(Feature.MIN_TOKENS))
        return Choices(
            features=Feature(int(np.bitwise_or.reduce(by_row))),
            by_row=by_row,
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            presence=self._presence[slots],
            frequency=self._frequency[slots],
            repetition=self._repetition[slots],
            seed=self._seed[slots],
            logprobs=self._logprobs[slots],
            position=position,
            slots=slots,
            bias=self._additions(slots, by_row),
        )

    def _additions(
        self, slots: NDArray[np.intp], by_row: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        rows, tokens, values = [], [], []
        for row in np.flatnonzero(by_row & int(Feature.BIAS)):
            biased, value = self._bias[int(slots[row])]
            rows.append(np.full(len(biased), row))
            tokens.append(biased)
            values.append(value)
        for row in np.flatnonzero(by_row & int(Feature.MIN_TOKENS)):
            stops = self._stops[int(slots[row])]
            rows.append(np.full(len(stops), row))
            tokens.append(stops)
            values.append(np.full(len(stops), -np.inf, dtype=np.float32))
        if not rows:
            return _NO_ADDITIONS
        return np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)


_NO_ADDITIONS = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
