"""Races of tokens: what wins, how often two distributions have one winner, and that the numbers are independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_ops import TorchOps
from services.worker.sampling.races import draw_of, race_by_torch, race_times
from services.worker.sampling.random_numbers import race_keys

CPU = torch.device("cpu")


def keys_of(rows: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(race_keys(np.full(rows, seed, dtype=np.uint64), np.arange(rows, dtype=np.int32)))


def weights_of(rows: int, width: int, spread: float, seed: int) -> Tensor:
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread
    return (logits - logits.amax(dim=1, keepdim=True)).exp()


def hashed(key: int, width: int) -> np.ndarray:  # type: ignore[type-arg]
    """The numbers in (0, 1) by Python's integers."""
    word, numbers = 0xFFFFFFFF, []
    for token in range(width):
        x = (token * 0x9E3779B1 + key) & word
        x = ((x ^ x >> 16) * 0x7FEB352D) & word
        x = (((x ^ x >> 15) + (key >> 32 & word)) * 0x846CA68B) & word
        numbers.append(((x ^ x >> 16) & 0x7FFFFFFF) + 0.5)
    return np.array(numbers) / 2**31


def test_the_winner_is_the_one_of_the_definition() -> None:
    keys = keys_of(40)
    for spread in (0.0, 1.0, 4.0):
        weights = weights_of(40, 544, spread, seed=int(spread))
        weights[::3] = torch.where(weights[::3] > 0.1, weights[::3], 0.0)
        times = -np.log1p(-np.stack([hashed(key, 544) for key in keys.tolist()]))
        expected = (weights.double().numpy() / times).argmax(axis=1)
        assert race_by_torch(weights, keys).tolist() == expected.tolist()


def test_what_weighs_nothing_never_wins_and_rows_of_nothing_have_some_winner() -> None:
    weights = torch.zeros(60, 64)
    weights[:, 41] = 1.0
    weights[1::2, 3] = 1e-30
    weights[-2:] = torch.tensor([[torch.nan], [0.0]])
    winners = race_by_torch(weights, keys_of(60)).tolist()
    assert winners[:-2] == [41] * 58
    assert all(0 <= winner < 64 for winner in winners[-2:])


def test_operations_draw_by_their_own_kernel_where_they_have_one() -> None:
    native = NativeOps(CPU, torch.float32, threads=1)
    assert draw_of(native) == native.draw
    assert draw_of(TorchOps(CPU, torch.float32)) is None


def shared_winners(p: Tensor, q: Tensor) -> float:
    """How often p and q [V] have one winner: the sum over tokens i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    return float(sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(len(p))))


@pytest.mark.parametrize("noise", [0.2, 0.7, 2.0])
def test_two_distributions_have_one_winner_as_often_as_theory_says(noise: float) -> None:
    """As often as its authors' formula says, within four standard deviations; and so at least (1 - D) / (1 + D)."""
    races, width = 4000, 96
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(width, generator=generator) * 1.5
    p = torch.softmax(logits, dim=0)
    q = torch.softmax(logits + noise * torch.randn(width, generator=generator), dim=0)
    keys = keys_of(races, seed=9)
    drawn, draft = (race_by_torch(one.expand(races, -1).contiguous(), keys) for one in (p, q))
    expected, distance = shared_winners(p.double(), q.double()), float((p - q).clamp(min=0).sum())
    assert expected >= (1 - distance) / (1 + distance)
    assert abs(float((drawn == draft).double().mean()) - expected) < 4 * (expected * (1 - expected) / races) ** 0.5


def chi_squared(counts: np.ndarray) -> float:  # type: ignore[type-arg]
    """Standard deviations by which the statistic of cells of equal chances is too high (Wilson and Hilferty)."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def test_numbers_are_even_and_independent_of_those_beside_and_behind_them() -> None:
    """Of neighbouring tokens, of neighbouring positions, and of neighbouring seeds: pairs fill a grid evenly."""
    positions = np.tile(np.arange(200, dtype=np.int32), 4)
    seeds = np.repeat(np.arange(4, dtype=np.uint64), 200)
    times = race_times(torch.from_numpy(race_keys(seeds, positions)), torch.arange(512)).numpy()
    numbers = -np.expm1(-times)  # which times are made of
    cells = (numbers * 16).astype(np.int64)
    assert chi_squared(np.bincount((numbers.ravel() * 4096).astype(np.int64), minlength=4096)) < 4.5
    for one, other in (
        (cells[:, :-1], cells[:, 1:]),
        (cells[:-1], cells[1:]),
        (cells[:-200], cells[200:]),
        (cells[:, :-64], cells[:, 64:]),
    ):
        assert chi_squared(np.bincount((16 * one + other).ravel(), minlength=256)) < 4.5
    smallest = numbers.min(axis=1) * 512
    assert chi_squared(np.histogram(np.exp(-smallest), bins=20, range=(0, 1))[0]) < 4.5, "the winners' own numbers"
