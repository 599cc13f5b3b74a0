"""Sequences whose keys and values lie in a paged cache, and what attention over them gives in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta
from services.worker.ops.triton.attention.paged_attention import paged_attention
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.kernels.kernel_device import DEVICE
from tests.support.worker.native_batches import Rows, attention_reference, meta_of, scattered_blocks

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the size of a row."""


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    """Of the cache, where it is not `dtype`."""
    window: int | None = None
    softcap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    block_size: int = BLOCK_SIZE
    sinks: bool = False
    alibi: bool = False
    distances: int = 0

    @property
    def scale(self) -> float:
        return self.dim**-0.5


class Cached:
    """Sequences of (rows of this step, context); those of one row come first. What no token wrote is NaN."""

    def __init__(
        self,
        shape: Shape,
        sequences: Sequence[tuple[int, int]],
        device: torch.device = DEVICE,
        dirty: bool = True,
        seed: int = 0,
    ) -> None:
        self.shape, self.device = shape, device
        self._chance = torch.Generator(self.device).manual_seed(seed)
        blocks = scattered_blocks([context for _, context in sequences], seed, shape.block_size)
        self.rows = [Rows(*lengths, ids) for lengths, ids in zip(sequences, blocks, strict=True)]
        cache = (1 + sum(map(len, blocks)), shape.kv_heads, shape.block_size, shape.dim)
        nothing = float("nan") if dirty else 0.0
        self.k_cache, self.v_cache = (
            torch.full(cache, nothing, device=self.device).to(shape.cache or shape.dtype) for _ in range(2)
        )
        self.keys, self.values = [], []
        for rows in self.rows:
            self.keys.append(self._written(self.k_cache, rows, shape.k_scale))
            self.values.append(self._written(self.v_cache, rows, shape.v_scale))
        self.q = self._random(sum(rows.count for rows in self.rows), shape.heads, shape.dim)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._chance, device=self.device).to(self.shape.dtype)

    def _written(self, cache: Tensor, rows: Rows, scale: float | None) -> Tensor:
        """Random tokens into the sequence's blocks → what the cache then holds, [context, KV, D] float64."""
        stored = self._random(rows.context, self.shape.kv_heads, self.shape.dim).to(cache.dtype)
        # Bytes, as a float8 cannot be assigned by index.
        at = torch.arange(rows.context, device=self.device)
        blocks = torch.tensor(rows.blocks, device=self.device)[at // self.shape.block_size]
        cache.view(torch.uint8)[blocks, :, at % self.shape.block_size] = stored.view(torch.uint8)
        return stored.double().cpu() * (1.0 if scale is None else scale)

    def meta(self) -> BatchMeta:
        meta = meta_of(self.rows, self.shape.block_size)
        moved = {
            name: getattr(meta, name).to(self.device)
            for name in ("query_starts", "context_lens", "block_tables", "slots", "positions", "logits_rows")
        }
        return replace(meta, **moved)

    def attended(self) -> Tensor:
        out = paged_attention(self.q, self.k_cache, self.v_cache, self.meta(), **self.asked(), **self.scales())
        assert out.shape == (len(self.q), self.shape.heads * self.shape.dim)
        return out

    def asked(self) -> dict[str, Any]:
        """The keyword arguments of every attention."""
        plain = {"scale": self.shape.scale, "window": self.shape.window, "softcap": self.shape.softcap}
        return plain | self.of_heads()

    def of_heads(self) -> dict[str, Tensor]:
        """Those that models of some families have besides."""
        number = torch.arange(1, self.shape.heads + 1, device=self.device)
        found = {}
        if self.shape.sinks:
            found["sinks"] = number * 0.7 - 1.0
        if self.shape.alibi:
            found["alibi_slopes"] = 2.0 ** (-0.7 * number)
        if self.shape.distances:
            found["distance_biases"] = torch.sin(
                number.view(-1, 1) + torch.arange(self.shape.distances, device=self.device)
            )
        return found

    def scales(self) -> dict[str, Tensor | None]:
        """And ours besides."""
        scales = {"k_scale": self.shape.k_scale, "v_scale": self.shape.v_scale}
        return {
            name: None if scale is None else torch.tensor([scale], device=self.device) for name, scale in scales.items()
        }

    def expected(self) -> Tensor:
        """On the CPU."""
        queries = self.q.cpu().split([rows.count for rows in self.rows])
        parts = [
            attention_reference(*rows, **self.asked()) for rows in zip(queries, self.keys, self.values, strict=True)
        ]
        return torch.cat(parts)

    def check(self, out: Tensor | None = None) -> None:
        assert_rows_close(self.attended() if out is None else out, self.expected())


def assert_rows_close(out: Tensor, expected: Tensor) -> None:
    """Within a tolerance of each row's own size: a mean over many values is small, and must be as exact."""
    size = expected.pow(2).mean(dim=1, keepdim=True).sqrt()
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double().cpu() / size, expected / size, rtol=tolerance, atol=tolerance)
