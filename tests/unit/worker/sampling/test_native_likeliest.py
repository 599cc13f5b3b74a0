"""The native kernel finds the likeliest tokens that NumPy finds, at every level of instructions, and tells of NaN."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_ops import TorchOps
from services.worker.sampling.sampler import find_likeliest_of

CPU = torch.device("cpu")
INFINITY = float("inf")


@pytest.fixture(scope="module", params=runnable_levels())
def ops(request: pytest.FixtureRequest) -> NativeOps:
    level: Level = request.param
    return NativeOps(CPU, torch.float32, threads=2, level=level)


@pytest.mark.parametrize("vocab", [1, 15, 16, 1_024, 1_025, 32_003])
def test_they_are_the_first_of_the_greatest(ops: NativeOps, vocab: int) -> None:
    # Few values, so that most rows have their greatest in many places.
    logits = torch.randint(-9, 9, (33, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    logits[1] = -INFINITY
    logits[2, vocab // 2] = INFINITY
    logits[3], logits[3, vocab - 1] = -INFINITY, -3e38
    tokens, undefined = ops.find_likeliest(logits)
    assert tokens.tolist() == logits.numpy().argmax(axis=1).tolist()
    assert not undefined.any()


def test_a_nan_anywhere_leaves_a_row_undefined_and_no_other(ops: NativeOps) -> None:
    vocab = 2_053
    logits = torch.zeros(4, vocab)
    logits[0, 0], logits[1, vocab - 1], logits[2] = torch.nan, -torch.nan, torch.nan
    logits[3, 7] = INFINITY
    tokens, undefined = ops.find_likeliest(logits)
    assert undefined.tolist() == [True, True, True, False]
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert tokens[3] == 7


def test_operations_find_them_by_their_own_kernel_where_they_have_one() -> None:
    native = NativeOps(CPU, torch.float32, threads=1)
    assert find_likeliest_of(native) == native.find_likeliest
    assert find_likeliest_of(TorchOps(CPU, torch.float32)) is None
