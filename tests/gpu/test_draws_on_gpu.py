"""Draws on a real GPU, from vocabularies of served models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.triton.sampling import DrawParameters, draw
from services.worker.sampling.filters import min_p_threshold, top_threshold, zero_below
from services.worker.sampling.races import race_times
from services.worker.sampling.random_numbers import race_keys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CUDA = torch.device("cuda")
ALL = 1 << 40
EDGE = 1e-4
"""As near as this, relatively, to the best quotient, rounding decides."""
SETTINGS = [
    (1.0, ALL, 1.0, 0.0),
    (0.7, 20, 0.95, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, ALL, 0.9, 0.0),
    (1.3, ALL, 0.98, 0.05),
]


def _draw(rows: int, seed: int) -> DrawParameters:
    temperature, top_k, top_p, min_p = zip(*(SETTINGS[row % len(SETTINGS)] for row in range(rows)), strict=True)

    def floats(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=CUDA)

    keys = torch.from_numpy(race_keys(np.arange(rows, dtype=np.uint64), np.full(rows, seed, dtype=np.int32))).to(CUDA)
    return DrawParameters(floats(temperature), torch.tensor(top_k, device=CUDA), floats(top_p), floats(min_p), keys)


def _logits(rows: int, vocab: int, scale: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator, device=CUDA) * scale).to(dtype)


def _check(logits: Tensor, how: DrawParameters, tokens: Tensor) -> None:
    """Each token is the one that wins the race of the weights kept, in double precision."""
    weights = torch.softmax(logits.double() / how.temperature.double()[:, None], dim=1).float()
    weights /= weights.amax(dim=1, keepdim=True)
    weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % 32))
    weights = zero_below(weights, min_p_threshold(weights, how.min_p[:, None]))
    weights = zero_below(weights, top_threshold(weights, how.top_k[:, None], how.top_p[:, None])).double()
    quotients = weights / race_times(how.keys, torch.arange(weights.shape[1], device=CUDA))
    reached = quotients.gather(1, tokens[:, None])
    # Where rounding decides whether the likeliest of what is cut off is kept, that may win as well.
    assert float((reached >= quotients.amax(dim=1, keepdim=True) * (1 - EDGE)).double().mean()) > 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "scale"), [(128256, 2.5), (151936, 6.0), (262144, 1.0), (50257, 3.0), (2048, 3.0)])
def test_tokens_are_drawn_from_large_vocabularies(vocab: int, scale: float, dtype: torch.dtype) -> None:
    logits, how = _logits(40, vocab, scale, dtype), _draw(40, seed=vocab)
    _check(logits, how, draw(logits, how))


def test_a_flat_distribution_is_cut_in_the_middle() -> None:
    logits, how = _logits(10, 128256, 0.01, torch.float32), _draw(10, seed=2)
    _check(logits, how, draw(logits, how))


def test_a_row_does_not_depend_on_others_nor_on_when_it_is_drawn() -> None:
    logits, how = _logits(300, 32000, 3.0, torch.bfloat16), _draw(300, seed=3)
    tokens = draw(logits, how)
    assert torch.equal(draw(logits, how), tokens)
    for row in (0, 7, 299):
        alone = draw(logits[row : row + 1], DrawParameters(*(part[row : row + 1] for part in how)))
        assert torch.equal(alone, tokens[row : row + 1])


def test_greedy_rows_take_the_first_of_equal_maxima() -> None:
    logits, how = _logits(4, 128256, 1.0, torch.bfloat16), _draw(4, seed=4)
    logits[:, [127, 128, 90000]] = 50.0
    assert draw(logits, how._replace(temperature=torch.zeros(4, device=CUDA))).tolist() == [127] * 4


def test_a_draw_can_be_captured() -> None:
    logits, how = _logits(8, 32000, 3.0, torch.bfloat16), _draw(8, seed=5)
    draw(logits, how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw(logits, how)
    logits.copy_(logits.flip(1))
    graph.replay()
    assert torch.equal(tokens, draw(logits, how))
