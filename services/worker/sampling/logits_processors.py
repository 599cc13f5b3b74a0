"""Everything that changes which tokens are likely before one is drawn. It costs only the rows that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.gpu import runs_triton
from services.worker.ops.transfer import to_device
from services.worker.sampling.history import (
    HistoryLookup,
    Penalties,
    ThinkingBudgets,
    ThinkingMarkers,
    TokenHistory,
    apply_penalties,
    force_thinking_end,
    read_history,
)
from services.worker.sampling.masks import apply_mask, apply_mask_by_kernel
from services.worker.sampling.parameters import Feature, PaddedLists, ParameterTable, SamplingBatch

_HELD_AT_ONCE = 1 << 21
"""Tokens of histories looked at in one go; all that is made of one takes some 50 bytes."""

_BANS = Feature.MIN_TOKENS | Feature.BAD_WORDS
_MASKS = Feature.PROCESSED | Feature.ALLOWED | Feature.GRAMMAR
LOGITS_FEATURES = _MASKS | Feature.BIAS | _BANS | Feature.PENALTIES | Feature.THINKING


def process_logits(logits: Tensor, choices: SamplingBatch, history: HistoryLookup) -> Tensor:
    """logits float32 [R, vocab] as they are drawn from, but for temperature and cuts; overwrites them."""
    features = choices.features
    if choices.processed is not None and len(choices.processed.rows):
        logits.index_copy_(0, to_device(choices.processed.rows, logits.device), choices.processed.values)
    mask_forbidden(logits, choices)
    if features & Feature.BIAS:
        _bias(logits, choices)
    if features & _BANS:
        _ban(logits, choices, history)
    if features & Feature.PENALTIES:
        _penalise(logits, choices, history)
    if features & Feature.THINKING:
        _force(logits, choices, history)
    return logits


def mask_forbidden(logits: Tensor, choices: SamplingBatch) -> Tensor:
    """logits float32 [R, vocab] with -inf for what `allowed_token_ids` and grammars forbid; overwrites them."""
    if choices.features & Feature.ALLOWED:
        rows = choices.rows_with(Feature.ALLOWED)
        _mask(logits, rows, choices.table.allowed[choices.seq_indices[rows]])
    if choices.mask is not None and len(choices.mask.rows):
        _mask(logits, *choices.mask)
    return logits


def _mask(logits: Tensor, rows: NDArray[np.intp], bits: NDArray[np.int32]) -> None:
    if runs_triton(logits.device):
        apply_mask_by_kernel(logits, rows, bits)
    else:
        _change(logits, rows, lambda part: apply_mask(part, to_device(bits, logits.device)))


def _bias(logits: Tensor, choices: SamplingBatch) -> None:
    rows = choices.rows_with(Feature.BIAS)
    seq_indices, table = choices.seq_indices[rows], choices.table
    numbers = to_device(rows, logits.device).unsqueeze(1)
    tokens = to_device(table.bias_tokens.rows(seq_indices), logits.device)
    values = to_device(table.bias_values.rows(seq_indices), logits.device)
    logits[numbers, tokens] = logits[numbers, tokens] + values


def _ban(logits: Tensor, choices: SamplingBatch, history: HistoryLookup) -> None:
    """Where bans would leave nothing to draw they give way: an unwanted token is better than one that was
    never allowed."""
    rows = choices.rows_with(_BANS)
    numbers = to_device(rows, logits.device)
    before = logits.index_select(0, numbers)
    if choices.features & Feature.MIN_TOKENS:
        early = choices.rows_with(Feature.MIN_TOKENS)
        stops = to_device(choices.table.stops.rows(choices.seq_indices[early]), logits.device)
        # A number of Python's would be copied to a GPU first, and waited for.
        nothing = logits.new_full((), -torch.inf)
        logits.index_put_((to_device(early, logits.device).unsqueeze(1), stops), nothing)
    if choices.features & Feature.BAD_WORDS:
        _ban_words(logits, choices, history)
    after = logits.index_select(0, numbers)
    nothing_left = after.amax(dim=1, keepdim=True) == -torch.inf
    logits.index_copy_(0, numbers, torch.where(nothing_left, before, after))


def _ban_words(logits: Tensor, choices: SamplingBatch, history: HistoryLookup) -> None:
    for rows, held in _holding(choices, Feature.BAD_WORDS, history, logits.device):
        _change(
            logits, rows, partial(choices.table.bad_words.banned, seq_indices=choices.seq_indices[rows], history=held)
        )


def _penalise(logits: Tensor, choices: SamplingBatch, history: HistoryLookup) -> None:
    table = choices.table
    for rows, held in _holding(choices, Feature.PENALTIES, history, logits.device):
        how = (table.presence, table.frequency, table.repetition)
        columns = (to_device(values[choices.seq_indices[rows]], logits.device).unsqueeze(1) for values in how)
        _change(logits, rows, partial(apply_penalties, by=Penalties(held, *columns)))


def _force(logits: Tensor, choices: SamplingBatch, history: HistoryLookup) -> None:
    for rows, held in _holding(choices, Feature.THINKING, history, logits.device):
        thinking = _thinking_budgets(choices.table, choices.seq_indices[rows], logits.device)
        _change(logits, rows, partial(force_thinking_end, history=held, thinking=thinking))


def _thinking_budgets(table: ParameterTable, seq_indices: NDArray[np.intp], device: torch.device) -> ThinkingBudgets:
    def on_device(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return to_device(values.astype(np.int64), device)

    def markers(lists: PaddedLists) -> ThinkingMarkers:
        return ThinkingMarkers(on_device(lists.rows(seq_indices)), on_device(lists.lengths(seq_indices)).unsqueeze(1))

    budget = on_device(table.thinking_budget[seq_indices]).unsqueeze(1)
    return ThinkingBudgets(budget, markers(table.thinking_starts), markers(table.thinking_ends))


def _change(logits: Tensor, rows: NDArray[np.intp], change: Callable[[Tensor], Tensor]) -> None:
    """Changes some rows by what overwrites those that it is given; all of them where they are, without a copy."""
    if len(rows) == len(logits):
        change(logits)
    else:
        numbers = to_device(rows, logits.device)
        logits.index_copy_(0, numbers, change(logits.index_select(0, numbers)))


def _holding(
    choices: SamplingBatch, feature: Feature, history: HistoryLookup, device: torch.device
) -> Iterator[tuple[NDArray[np.intp], TokenHistory]]:
    """The rows that ask for `feature`, and what they hold, as many at once as is bounded: long ones, of which there may
    be as many as sequences, would take gigabytes that are not budgeted."""
    rows = choices.rows_with(feature)
    seq_indices, positions = choices.seq_indices[rows], choices.position[rows]
    longest = int((choices.table.prompt_lengths[seq_indices] + positions).max())
    step = max(1, _HELD_AT_ONCE // max(1, longest))
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        yield rows[part], read_history(history, seq_indices[part], positions[part], device)
