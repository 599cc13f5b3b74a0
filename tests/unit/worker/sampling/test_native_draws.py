"""Draws by the native kernel are what PyTorch's operations draw, at every level of instructions; and its edges."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.native.native_ops import NativeOps
from services.worker.sampling.parameters import ParameterTable, SamplingBatch
from services.worker.sampling.races import Draw
from services.worker.sampling.random_numbers import race_keys
from services.worker.sampling.sampler import sample, sample_draft
from shared.ids import SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence
from shared.packing import pack

MIXED = [
    {"temperature": 1.0},
    {"temperature": 0.0, "top_k": 5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 400, "top_p": 0.99},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.3},
]


@pytest.fixture(scope="module", params=runnable_levels())
def kernel(request: pytest.FixtureRequest) -> Draw:
    level: Level = request.param
    return NativeOps(torch.device("cpu"), torch.float32, threads=2, level=level).draw


def choices_of(params: list[SamplingOptions], vocab: int) -> SamplingBatch:
    table = ParameterTable(len(params), vocab)
    for seq_index, one in enumerate(params):
        new = NewSequence(
            sequence=SequenceId(seq_index), tokens=pack([0]), prompt_length=1, computed=0, blocks=b"", sampling=one
        )
        table.put(seq_index, new)
    return table.sampling_batch(np.arange(len(params)), np.arange(len(params), dtype=np.int32))


def no_history(*_: object) -> NoReturn:
    raise AssertionError("nothing asks for it")


def drawn(kernel: Draw, logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """A token of each row of `logits`, all with the same parameters."""
    rows = len(logits)
    keys = torch.from_numpy(race_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int32)))
    how = (torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p))
    return kernel(logits, keys, *how).tolist()


@pytest.mark.parametrize(("vocab", "spread"), [(4096, 0.2), (4099, 2.5), (333, 6.0)])
def test_what_is_drawn_is_what_pytorch_draws(kernel: Draw, vocab: int, spread: float) -> None:
    rows = 25 * len(MIXED)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    choices = choices_of([SamplingOptions(seed=7 * i, **MIXED[i % len(MIXED)]) for i in range(rows)], vocab)
    untouched = logits.clone()
    tokens = sample(logits, choices, no_history, kernel).tokens.tolist()
    assert tokens == sample(logits, choices, no_history).tokens.tolist()
    assert tokens == sample_draft(logits, choices, no_history, kernel).tolist()
    assert torch.equal(logits, untouched)


def test_tokens_that_tie_with_the_last_one_kept_are_kept(kernel: Draw) -> None:
    """Many tie, so that the search for the cut ends between two neighbouring numbers."""
    logits = torch.full((400, 500), -30.0)
    tied = list(range(3, 483, 4))
    logits[:, tied] = 1.0
    for top_k, top_p, min_p in ((2, 1.0, 0.0), (1 << 40, 0.3, 0.0), (2, 0.6, 0.5)):
        tokens = set(drawn(kernel, logits, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
        assert tokens <= set(tied)
        assert len(tokens) > len(tied) / 2


def test_top_p_is_a_share_of_what_top_k_leaves_and_ties_beyond_it_do_not_count(kernel: Draw) -> None:
    logits = torch.full((200, 100), -torch.inf)
    logits[:, [10, 20, 30, 40]] = torch.tensor([4.0, 2.0, 2.0, 2.0]).log()
    # Two of weights 4 and 2 make 6: 0.6 of that ends with the first, 0.7 with its equals.
    assert set(drawn(kernel, logits, temperature=1.0, top_k=2, top_p=0.6, min_p=0.0)) == {10}
    assert set(drawn(kernel, logits, temperature=1.0, top_k=2, top_p=0.7, min_p=0.0)) == {10, 20, 30, 40}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("place", [0, 37, 99])
def test_a_row_gives_the_nan_that_is_in_it(kernel: Draw, place: int, temperature: float) -> None:
    """Whoever looks at the token's logit sees that the row means nothing, as behind `argmax`."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    sound = drawn(kernel, logits, temperature=temperature, top_k=1 << 40, top_p=1.0, min_p=0.0)
    logits[1, place] = torch.nan
    tokens = drawn(kernel, logits, temperature=temperature, top_k=1 << 40, top_p=1.0, min_p=0.0)
    assert tokens == [sound[0], place, sound[2]]


def test_rows_without_numbers_have_some_token_and_harm_nobody(kernel: Draw) -> None:
    good = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.full((1, 100), value) for value in (torch.nan, -torch.inf, torch.inf)] + [good])
    for temperature, top_k, top_p in ((1.0, 1 << 40, 1.0), (0.7, 5, 0.9), (0.0, 1, 1.0)):
        tokens = drawn(kernel, rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.01)
        assert all(0 <= token < 100 for token in tokens)
        beside = torch.cat([good] * 4)
        assert tokens[3] == drawn(kernel, beside, temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.01)[3]
