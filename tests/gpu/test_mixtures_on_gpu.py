"""Mixtures of experts in the sizes of real models on a real GPU: against float64, captured and replayed."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.interface import Routing
from services.worker.ops.triton.moe.mixture import choose_experts, mixture
from tests.support.models.expert_mixtures import MixedExperts, Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

QWEN3 = Shape(experts=128, chosen=8, hidden=2048, size=768, dtype=torch.bfloat16)
QWEN2 = Shape(experts=64, chosen=8, hidden=3584, size=2560, dtype=torch.bfloat16)
MIXTRAL_OF_8_RANKS = Shape(experts=8, chosen=2, hidden=4096, size=14336 // 8, dtype=torch.bfloat16)


def mixed(made: MixedExperts) -> torch.Tensor:
    shape = made.shape
    picks = choose_experts(made.logits, Routing(shape.chosen, shape.renormalised))
    return mixture(made.x, picks, made.gate_up, made.down, kind=shape.kind)


@pytest.mark.parametrize("rows", [1, 3, 16, 200, 500, 3000])
@pytest.mark.parametrize(
    "shape", [QWEN3, QWEN2, MIXTRAL_OF_8_RANKS], ids=["Qwen3-30B-A3B", "Qwen2-57B-A14B", "Mixtral-8x7B of 8 ranks"]
)
def test_a_mixture_is_what_it_is_in_float64(shape: Shape, rows: int) -> None:
    made = MixedExperts(shape, rows)
    made.check(mixed(made))


@pytest.mark.parametrize("rows", [2, 64])
def test_a_captured_mixture_goes_where_the_rows_of_its_replay_go(rows: int) -> None:
    """Other rows choose other experts, and other numbers of them."""
    made = MixedExperts(QWEN3, rows)
    mixed(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixed(made)
    for seed in (1, 2):
        other = MixedExperts(QWEN3, rows, seed)
        made.x.copy_(other.x)
        made.logits.copy_(other.logits)
        graph.replay()
        made.check(out)


def test_a_mixture_gives_the_same_bits_every_time() -> None:
    made = MixedExperts(QWEN3, 300)
    assert all(torch.equal(mixed(made), mixed(made)) for _ in range(20))
