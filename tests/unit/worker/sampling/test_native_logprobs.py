"""Log-probabilities by the native kernel are those of float64, at every level of instructions; so are the likeliest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.native.native_ops import NativeOps
from services.worker.sampling.logprobs import LogprobTensors, find_logprobs_of, found_by, prompt_logprobs

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=runnable_levels())
def ops(request: pytest.FixtureRequest) -> NativeOps:
    level: Level = request.param
    return NativeOps(CPU, torch.float32, threads=2, level=level)


def found(ops: NativeOps, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> LogprobTensors:
    counts = np.full(len(logits), most, dtype=np.int32)
    made = found_by(find_logprobs_of(ops), logits, torch.arange(len(logits)), tokens, counts)
    assert made is not None
    return made


@pytest.mark.parametrize(("vocab", "most"), [(5, 5), (40, 20), (32_003, 5), (4_096, 64), (1_000, 0)])
def test_they_are_those_of_float64(ops: NativeOps, vocab: int, most: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator) * 6
    logits[3] += 500.0
    tokens = torch.randint(vocab, (9,), generator=generator)
    made, exactly = found(ops, logits, tokens, most), logits.double().log_softmax(dim=1)
    assert torch.allclose(made.own.double(), exactly.gather(1, tokens.unsqueeze(1))[:, 0], rtol=1e-5, atol=5e-6 * 10)
    order = exactly.argsort(dim=1, descending=True, stable=True)[:, :most]
    assert torch.equal(made.others, order)
    assert torch.allclose(made.values.double(), exactly.gather(1, order), rtol=1e-5, atol=5e-5)
    assert made.ranks is not None
    assert torch.equal(made.ranks, (logits >= logits.gather(1, tokens.unsqueeze(1))).sum(dim=1))


def test_of_equal_tokens_the_lower_ones_come_first(ops: NativeOps) -> None:
    logits = torch.zeros(1, 100)
    logits[0, [7, 31, 90]] = 2.0
    made = found(ops, logits, torch.tensor([31]), 5)
    assert made.others.tolist() == [[7, 31, 90, 0, 1]]
    assert made.ranks is not None
    assert made.ranks.tolist() == [3]


def test_tokens_that_cannot_be_have_minus_infinity(ops: NativeOps) -> None:
    logits = torch.full((1, 21), float("-inf"))
    logits[0, 20] = 1.0
    made = found(ops, logits, torch.tensor([2]), 2)
    assert made.others.tolist() == [[20, 0]]
    assert made.values.tolist() == [[0.0, float("-inf")]]
    assert made.own.tolist() == [float("-inf")]
    assert made.ranks is not None
    assert made.ranks.tolist() == [21]


def test_a_row_depends_on_itself_alone_and_prompts_are_scored_as_by_torch(ops: NativeOps) -> None:
    logits = torch.randn(30, 700, generator=torch.Generator().manual_seed(1))
    tokens, counts = torch.arange(30).numpy(), np.arange(30, dtype=np.int32) % 4
    (native,), (plain,) = (prompt_logprobs(logits, tokens, counts, by) for by in (ops.find_logprobs, None))
    alone = found(ops, logits[5:6], torch.tensor([5]), 3)
    assert torch.equal(alone.own[0], native.own[5])
    assert torch.equal(alone.values[0], native.values[5])
    assert native.ranks is not None
    assert plain.ranks is not None
    assert torch.equal(native.ranks, plain.ranks)
    for one, other in zip(native.entries(), plain.entries(), strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_row_is_the_same_beside_one_that_wants_more_than_the_kernel_keeps(ops: NativeOps) -> None:
    logits, tokens = torch.randn(2, 300, generator=torch.Generator().manual_seed(2)), np.array([0, 1])
    alone, beside = (
        prompt_logprobs(logits, tokens, np.array([3, most], dtype=np.int32), ops.find_logprobs)[0] for most in (3, 100)
    )
    assert beside.others.shape == (2, 100)
    assert alone.entries()[0] == beside.entries()[0]
    (plain,) = prompt_logprobs(logits, tokens, np.array([3, 100], dtype=np.int32))
    assert torch.equal(beside.others, plain.others)
    assert torch.allclose(beside.values, plain.values, atol=1e-5)
