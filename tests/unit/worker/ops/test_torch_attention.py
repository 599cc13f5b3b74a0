"""Paged attention in portable PyTorch against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.worker.ops.torch_ops import TorchOps
from tests.support.models.attention_reference import Cached, Shape

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(softcap=2.0),
        Shape(sinks=True),
        Shape(alibi=True),
        Shape(distances=24),
        Shape(heads=6, softcap=2.0, sinks=True, alibi=True),
    ],
)
def test_equals_float64(shape: Shape, window: int | None) -> None:
    cached = Cached(replace(shape, window=window), [(1, 40), (1, 3), (9, 70), (5, 5)], CPU, dirty=False)
    ops = TorchOps(CPU, torch.float32)
    cached.check(ops.paged_attention(cached.q, cached.k_cache, cached.v_cache, cached.meta(), **cached.asked()))
