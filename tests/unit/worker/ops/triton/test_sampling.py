"""The draw as Triton kernels: the same tokens as PyTorch's draw, and what the definition says of them."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.triton import sampling
from services.worker.ops.triton.sampling import CHUNK, DrawParameters, draw
from services.worker.sampling.parameters import ParameterTable, SamplingBatch
from services.worker.sampling.races import race_times
from services.worker.sampling.random_numbers import race_keys
from services.worker.sampling.sampler import draw_by_triton, sample_draft
from shared.ids import SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence
from shared.packing import pack
from tests.support.kernels.kernel_device import DEVICE

ALL = 1 << 40
EDGE = 1e-5
"""As near as this, relatively, to the best quotient, another token may win."""

AT_ONCE = 4
"""Chunks to a tile: fewer than the worker's, so that a few hundred tokens are several tiles."""

SETTINGS = [
    (1.0, ALL, 1.0, 0.0),
    (0.7, 20, 0.9, 0.0),
    (1.3, 1, 1.0, 0.0),
    (1.0, ALL, 0.5, 0.0),
    (2.0, ALL, 0.99, 0.05),
    (0.5, 300, 1.0, 0.0),
    (1.0, 40, 0.8, 0.1),
    (1.0, ALL, 0.0, 0.0),
]
"""Temperature, top_k, top_p, min_p."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "AT_ONCE", AT_ONCE)


def _draw(settings: list[tuple[float, int, float, float]], seed: int = 0) -> DrawParameters:
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)

    def floats(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=DEVICE)

    seeds = np.arange(len(settings), dtype=np.uint64) + np.uint64(1000 * seed)
    keys = torch.from_numpy(race_keys(seeds, np.zeros(len(settings), dtype=np.int32))).to(DEVICE)
    return DrawParameters(floats(temperature), torch.tensor(top_k, device=DEVICE), floats(top_p), floats(min_p), keys)


def _logits(rows: int, vocab: int, *, scale: float, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(dtype).to(DEVICE)


def _kept(logits: Tensor, setting: tuple[float, int, float, float]) -> Tensor:
    """Weights of one row in double precision, 0 for what is cut off; ties with what is kept are kept."""
    temperature, top_k, top_p, min_p = setting
    weights = torch.softmax(logits.double() / temperature, dim=0)
    weights = torch.where(weights >= min_p * weights.max(), weights, 0.0)
    ordered = weights.sort(descending=True).values[:top_k]
    before = ordered.cumsum(0) - ordered
    inside = (before < top_p * ordered.sum()) if top_p < 1.0 else torch.ones_like(before, dtype=torch.bool)
    inside[0] = True
    return torch.where(weights >= ordered[inside][-1], weights, 0.0)


def _check_winner(weights: Tensor, key: Tensor, token: int) -> None:
    """Whether `token` wins the race of these weights, float64 [vocab], by definition."""
    times = race_times(key.cpu().view(1), torch.arange(len(weights)))[0]
    assert weights[token] > 0
    assert weights[token] / times[token] >= (weights / times).max() * (1 - EDGE)


@pytest.mark.parametrize(("vocab", "scale"), [(300, 3.0), (700, 1.0), (700, 8.0)])
def test_each_token_is_the_one_that_wins_the_race_of_what_is_kept(vocab: int, scale: float) -> None:
    logits, how = _logits(len(SETTINGS), vocab, scale=scale, seed=vocab), _draw(SETTINGS, seed=vocab)
    tokens = draw(logits, how).tolist()
    for row, setting, key, token in zip(logits.cpu(), SETTINGS, how.keys, tokens, strict=True):
        _check_winner(_kept(row, setting), key, token)


def _choices(params: list[SamplingOptions], vocab: int) -> SamplingBatch:
    table = ParameterTable(len(params), vocab)
    for seq_index, one in enumerate(params):
        new = NewSequence(
            sequence=SequenceId(seq_index), tokens=pack([0]), prompt_length=1, computed=0, blocks=b"", sampling=one
        )
        table.put(seq_index, new)
    return table.sampling_batch(np.arange(len(params)), np.arange(len(params), dtype=np.int32))


def _no_history(*_: object) -> NoReturn:
    raise AssertionError("nothing asks for it")


MIXED = [
    {"temperature": 0.0, "top_k": 5},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 1},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_drawn_is_what_pytorch_draws(dtype: torch.dtype) -> None:
    logits = _logits(len(MIXED), 700, scale=4.0, seed=3, dtype=dtype)
    choices = _choices([SamplingOptions(seed=7 * i, **one) for i, one in enumerate(MIXED)], 700)
    untouched = logits.clone()
    drawn = sample_draft(logits, choices, _no_history, draw_by_triton).tolist()
    assert drawn == sample_draft(logits.cpu(), choices, _no_history).tolist()
    assert torch.equal(logits, untouched)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.full((20, 200), -30.0, device=DEVICE)
    logits[:, [3, 80, 130, 199]] = 1.0
    # Of four equal tokens top_k keeps two, and so all; each has a quarter of the chances.
    settings = [(1.0, 2, 1.0, 0.0), (1.0, ALL, 0.3, 0.0), (1.0, 2, 0.6, 0.0), (1.0, 3, 1.0, 0.5)] * 5
    tokens = draw(logits, _draw(settings, seed=10))
    assert set(tokens.tolist()) == {3, 80, 130, 199}
    assert all(len(set(tokens[number::4].tolist())) > 2 for number in range(4))


def test_top_p_is_a_share_of_what_top_k_leaves_and_ties_beyond_it_do_not_count() -> None:
    logits = torch.full((8, 100), -torch.inf, device=DEVICE)
    logits[:, [10, 20, 30, 40]] = torch.tensor([4.0, 2.0, 2.0, 2.0], device=DEVICE).log()
    # top_k leaves 4 + 2 of weight, though all four tokens: 0.66 of 6 is within the first, of 10 it is not.
    assert set(draw(logits, _draw([(1.0, 2, 0.66, 0.0)] * 8)).tolist()) == {10}
    assert set(draw(logits, _draw([(1.0, 2, 0.67, 0.0)] * 8, seed=3)).tolist()) == {10, 20, 30, 40}


def test_greedy_rows_take_the_first_of_equal_maxima() -> None:
    logits = _logits(2, 700, scale=1.0, seed=0, dtype=torch.bfloat16)
    logits[0, [130, 131, 640]] = 9.0
    logits[1] = -torch.inf
    logits[1, 699] = -1e30
    assert draw(logits, _draw([(0.0, 3, 0.5, 0.0)] * 2)).tolist() == [130, 699]


def test_what_is_forbidden_is_never_drawn() -> None:
    logits = torch.full((12, 500), -torch.inf, device=DEVICE)
    logits[:, [64, 300]] = 0.0
    assert set(draw(logits, _draw([(1.0, 50, 1.0, 0.0), (1.0, ALL, 1.0, 0.0)] * 6)).tolist()) == {64, 300}


def test_a_row_with_nothing_to_draw_gives_some_token() -> None:
    logits = torch.full((3, 90), -torch.inf, device=DEVICE)
    settings = [(1.0, ALL, 1.0, 0.0), (1.0, 5, 0.9, 0.1), (0.0, ALL, 1.0, 0.0)]
    assert all(0 <= token < 90 for token in draw(logits, _draw(settings)).tolist())


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("some", [slice(None), slice(30, 580), slice(577, 578)], ids=["all", "some", "one"])
def test_a_row_gives_the_first_nan_that_is_in_it(some: slice) -> None:
    """Whoever looks at the token's logit sees that the row means nothing, as behind `argmax`."""
    logits = _logits(5, 600, scale=2.0, seed=3)
    settings = [
        (0.0, ALL, 1.0, 0.0),
        (1.0, ALL, 1.0, 0.0),
        (1.0, 5, 0.9, 0.1),
        (1.0, ALL, 0.9, 0.0),
        (0.8, ALL, 1.0, 0.0),
    ]
    sound = draw(logits, _draw(settings)).tolist()
    logits[:4, some] = torch.nan
    assert draw(logits, _draw(settings)).tolist() == [some.start or 0] * 4 + sound[4:]


@pytest.mark.parametrize("setting", [(1.0, ALL, 0.9, 0.0), (1.0, 600, 0.99, 0.0)])
def test_a_flat_distribution_is_cut_though_its_nucleus_is_nearly_everywhere(
    setting: tuple[float, int, float, float],
) -> None:
    vocab = 3 * AT_ONCE * CHUNK - 7
    logits = _logits(1, vocab, scale=0.01, seed=1)
    how = _draw([setting])
    _check_winner(_kept(logits[0].cpu(), setting), how.keys, int(draw(logits, how)))


def test_a_row_does_not_depend_on_others() -> None:
    logits = _logits(2, 400, scale=2.0, seed=5)
    how = _draw([(1.0, 30, 0.9, 0.0), (1.0, ALL, 1.0, 0.0)])
    together = draw(logits, how).tolist()
    alone = [int(draw(logits[row : row + 1], DrawParameters(*(part[row : row + 1] for part in how)))) for row in (0, 1)]
    assert together == alone


def test_a_vocabulary_may_have_one_token() -> None:
    assert draw(torch.zeros(1, 1, device=DEVICE), _draw([(1.0, 1, 0.5, 0.0)])).tolist() == [0]
