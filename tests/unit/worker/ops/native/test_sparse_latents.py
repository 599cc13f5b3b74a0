"""Which tokens an indexer chooses, and attention to those alone, against float64."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.torch_latent import best_tokens
from services.worker.ops.torch_ops import TorchOps
from tests.support.kernels.sparse_reference import Sparse, check_sparse
from tests.support.worker.native_batches import CPU, native

CONTEXTS = [9, 70, 200]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 32])
def test_rows_attend_to_what_their_indexer_scores_best(dtype: torch.dtype, size: int) -> None:
    check_sparse(Sparse(native(dtype, block_size=size), dtype, CONTEXTS))
    check_sparse(Sparse(TorchOps(CPU, dtype, block_size=size), dtype, CONTEXTS))


def test_of_equal_scores_the_first_are_taken() -> None:
    scores = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0, -1.0], [5.0, 0.0, 0.0, 0.0, 0.0, 6.0]])
    assert best_tokens(scores, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 5]]
    unseen = torch.tensor([[1.0, 2.0, float("-inf"), float("-inf"), float("-inf")]])
    assert best_tokens(unseen, 3)[0, :2].tolist() == [0, 1]
    assert best_tokens(unseen, 7).shape == (1, 7)


def test_scores_that_are_no_numbers_cost_their_row_alone() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0], [float("nan"), float("nan"), float("nan")], [float("nan"), 1.0, 2.0]])
    chosen = best_tokens(scores, 2).tolist()
    assert [chosen[0], chosen[2]] == [[1, 2], [1, 2]]
