"""Rejection sampling of drafts as Triton kernels: what double precision says, and the target's distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.triton import rejection
from services.worker.ops.triton.rejection import RejectionInputs, verify
from tests.support.kernels.kernel_device import DEVICE


class _Batch:
    """Sequences with drafts, drawn from a distribution of their own or certain."""

    def __init__(self, sequences: int, most: int, vocab: int, *, seed: int, certain: bool, same: bool = False) -> None:
        chance = np.random.default_rng(seed)
        one = chance.dirichlet(np.ones(vocab), (1 if same else sequences, most + 1))
        self.target = np.broadcast_to(one, (sequences, most + 1, vocab)).astype(np.float32)
        other = chance.dirichlet(np.ones(vocab), (1 if same else sequences, most))
        self.q = np.broadcast_to(other, (sequences, most, vocab)).astype(np.float32)
        self.certain = certain
        self.chances = chance.random((sequences, most + 1))
        self.counts = np.full(sequences, most) if same else chance.integers(0, most + 1, sequences)
        cumulated = self.q.astype(np.float64).cumsum(axis=2)
        drawn = (cumulated < chance.random((sequences, most, 1)) * cumulated[:, :, -1:]).sum(axis=2)
        self.drafts = np.where(certain, self.q.argmax(axis=2), drawn)

    def verified(self) -> tuple[list[list[int]], list[int]]:
        def there(values: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).to(DEVICE)

        attempt = RejectionInputs(
            there(self.target, torch.float32),
            None if self.certain else there(self.q, torch.float32),
            there(self.drafts, torch.int32),
            there(self.counts, torch.int32),
            there(self.chances, torch.float64),
        )
        tokens, stand = verify(attempt)
        return [row[: count + 1] for row, count in zip(tokens.tolist(), stand.tolist(), strict=True)], stand.tolist()

    def exactly(self, sequence: int) -> list[int]:
        """The algorithm, step by step."""
        tokens: list[int] = []
        chance = float(self.chances[sequence, -1])
        for place in range(self.counts[sequence]):
            p, q = self.target[sequence, place].astype(np.float64), self.q[sequence, place].astype(np.float64)
            draft = int(self.drafts[sequence, place])
            if self.certain:
                q = np.eye(len(p))[draft]
            if self.chances[sequence, place] * q[draft] >= p[draft]:
                return [*tokens, _drawn(np.maximum(p - q, 0), chance)]
            tokens.append(draft)
        return [*tokens, _drawn(self.target[sequence, len(tokens)].astype(np.float64), chance)]


def _drawn(weights: NDArray[np.float64], chance: float) -> int:
    return int((weights.cumsum() <= chance * weights.sum()).sum())


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("vocab", [5, 64, 700])
def test_drafts_stand_and_are_replaced_as_the_algorithm_says(vocab: int, certain: bool) -> None:
    batch = _Batch(12, 3, vocab, seed=vocab, certain=certain)
    tokens, stand = batch.verified()
    assert tokens == [batch.exactly(sequence) for sequence in range(12)]
    assert all(count <= most for count, most in zip(stand, batch.counts, strict=True))


def test_what_comes_out_has_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a chi-squared test, 3 degrees of freedom; of 16.3 and more there is one chance in a thousand."""
    monkeypatch.setattr(rejection, "AT_ONCE", 1)
    monkeypatch.setattr(rejection, "CHUNK", 2)
    sequences, vocab = 150, 4
    batch = _Batch(sequences, 1, vocab, seed=11, certain=False, same=True)
    tokens, stand = batch.verified()
    assert 0 < sum(stand) < sequences
    expected = batch.target[0, 0].astype(np.float64) * sequences
    seen = np.bincount([row[0] for row in tokens], minlength=vocab)
    assert ((seen - expected) ** 2 / expected).sum() < 16.3
    behind = np.bincount([row[1] for row in tokens if len(row) == 2], minlength=vocab)
    expected = batch.target[0, 1].astype(np.float64) * sum(stand)
    assert ((behind - expected) ** 2 / expected).sum() < 16.3


def test_drafts_from_the_target_itself_all_stand() -> None:
    batch = _Batch(6, 2, 90, seed=3, certain=False)
    batch.q = np.ascontiguousarray(batch.target[:, :2])
    batch.drafts = batch.q.argmax(axis=2)
    _, stand = batch.verified()
    assert stand == batch.counts.tolist()


def test_a_draft_that_the_target_never_draws_never_stands() -> None:
    batch = _Batch(4, 1, 130, seed=5, certain=True)
    batch.counts[:] = 1
    batch.drafts[:] = 7
    batch.target[:, :, 7] = 0.0
    batch.chances[:, 0] = 0.0
    tokens, stand = batch.verified()
    assert stand == [0] * 4
    assert all(row[0] != 7 for row in tokens)
