"""Which drafts stand, as every kind of operations says it where the logits are: what the definition says."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops.drafts import DraftAttempt
from services.worker.ops.torch_ops import _by_torch, verify_drafts
from services.worker.speculation.verification import AcceptedTokens, accepted_counts, by_sequence
from tests.support.kernels.kernel_device import DEVICE
from tests.support.worker.emulated_graphs import RunAgain

if find_spec("triton") is None:
    WAYS: list[Callable[[DraftAttempt], Tensor]] = [verify_drafts, _by_torch]
else:
    from services.worker.ops.triton.verification import verify

    WAYS = [verify_drafts, _by_torch, verify]

Sequence = tuple[list[int], list[int]]
"""Drafts, and what was drawn: one token more."""


def tried(sequences: list[Sequence], *, named: bool, where: torch.device) -> DraftAttempt:
    """The rows of a step; where they are `named`, others lie before and between them."""
    drafted = np.array([len(drafts) for drafts, _ in sequences], dtype=np.int32)
    step = 3 if named else 1
    drawn = [token for _, tokens in sequences for token in tokens]
    ids = np.full(step * len(drawn), 4, dtype=np.int32)
    ids[step - 1 :: step] = [token for drafts, _ in sequences for token in (0, *drafts)]
    rows = np.arange(step - 1, len(ids), step, dtype=np.int32) if named else None
    first = (np.cumsum(drafted + 1) - (drafted + 1)).astype(np.int32)
    return DraftAttempt(
        torch.tensor(drawn, device=where),
        torch.from_numpy(ids).to(where),
        None if rows is None else torch.from_numpy(rows).to(where),
        torch.from_numpy(first).to(where),
        torch.from_numpy(drafted).to(where),
        int(drafted.max()),
    )


def one_by_one(sequences: list[Sequence]) -> list[list[int]]:
    """The tokens that each sequence gains."""
    gained = []
    for drafts, drawn in sequences:
        stand = next((place for place, draft in enumerate(drafts) if draft != drawn[place]), len(drafts))
        gained.append([*drafts[:stand], drawn[stand]])
    return gained


@st.composite
def batches(draw: st.DrawFn) -> list[Sequence]:
    """Of few words, so that many drafts stand; somebody has one."""
    words = st.integers(0, 2)
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
    return [
        (draw(st.lists(words, min_size=n, max_size=n)), draw(st.lists(words, min_size=n + 1, max_size=n + 1)))
        for n in counts
    ]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(batches(), st.booleans())
def test_drafts_stand_up_to_the_first_that_was_not_drawn(
    way: Callable[[DraftAttempt], Tensor], sequences: list[Sequence], named: bool
) -> None:
    where = DEVICE if way is not verify_drafts else torch.device("cpu")
    what = tried(sequences, named=named, where=where)
    verdict = AcceptedTokens.of(way(what).cpu().numpy(), what.counts.cpu().numpy())
    assert verdict.counts.dtype == verdict.tokens.dtype == np.int32
    gained = [row[:count] for row, count in zip(verdict.tokens.tolist(), verdict.counts.tolist(), strict=True)]
    assert gained == one_by_one(sequences)


@pytest.mark.parametrize("way", WAYS)
def test_of_more_sequences_than_a_program_has_each_is_told_as_it_was_on_the_host(
    way: Callable[[DraftAttempt], Tensor],
) -> None:
    chance = np.random.default_rng(5)
    counts = chance.integers(0, 17, 300)
    sequences = [(chance.integers(0, 2, n).tolist(), chance.integers(0, 2, n + 1).tolist()) for n in counts]
    what = tried(sequences, named=True, where=DEVICE if way is not verify_drafts else torch.device("cpu"))
    verdict = AcceptedTokens.of(way(what).cpu().numpy(), what.counts.cpu().numpy())
    drafted, drawn = counts.astype(np.int32), np.concatenate([tokens for _, tokens in sequences]).astype(np.int32)
    drafts = np.zeros((300, 16), dtype=np.int32)
    for row, (tokens, _) in enumerate(sequences):
        drafts[row, : len(tokens)] = tokens
    tokens = by_sequence(drawn, drafted)
    assert verdict.tokens.tolist() == tokens.tolist()
    assert verdict.counts.tolist() == (1 + accepted_counts(tokens, drafts, drafted)).tolist()


@pytest.mark.parametrize("way", WAYS[1:])
def test_it_can_be_captured_and_replayed_for_other_tokens(way: Callable[[DraftAttempt], Tensor]) -> None:
    what = tried([([1, 2], [1, 2, 3]), ([], [7])], named=False, where=DEVICE)
    came: list[Tensor] = []
    replay = RunAgain().capture(lambda: came.append(way(what)))
    what.drawn[1] = 9
    replay()
    assert came[0].tolist() == [3, 1, 1, 2, 3, 7]
    assert came[-1].tolist() == [2, 1, 1, 9, 3, 7]
