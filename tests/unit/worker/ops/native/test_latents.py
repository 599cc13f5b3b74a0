"""Native latent attention against float64, and the same to the last bit in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.models.rope import PlainRope, cos_sin_table
from services.worker.ops.interface import LatentCache, Ops
from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.torch_ops import TorchOps
from tests.support.kernels.latent_reference import EPS, LatentRows, LatentShape
from tests.support.worker.native_batches import CPU, Rows, meta_of, native, random, scattered_blocks

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
LITE = LatentShape(heads=16, rank=512, rope_dim=64)


class Cached:
    """Sequences of given lengths, whose latents are written step by step."""

    def __init__(self, ops: Ops, dtype: torch.dtype, shape: LatentShape, contexts: list[int]) -> None:
        self.ops, self.dtype, self.shape, self.contexts = ops, dtype, shape, contexts
        self.cos_sin = cos_sin_table(PlainRope(10000.0), shape.rope_dim, max(contexts))
        self.norm = random(shape.rank, seed=1) * 0.1 + 1
        self.rows = [LatentRows(shape, context, self.cos_sin, 10 + 5 * n) for n, context in enumerate(contexts)]
        self.blocks = scattered_blocks(contexts, block_size=ops.block_size)
        count = sum(map(len, self.blocks)) + 1
        self.cache = LatentCache(*ops.latents.allocate(count, shape.rank, shape.rope_dim))

    def step(self, counts: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
        """Sequences' (first, end) positions in one step → the attention's rows of each."""
        sequences = [Rows(end - first, end, self.blocks[number]) for number, (first, end) in counts.items()]
        meta = meta_of(sequences, self.ops.block_size)

        def of_all(name: str) -> Tensor:
            return torch.cat([getattr(self.rows[each], name)[first:end] for each, (first, end) in counts.items()])

        latents = self.ops.latents
        cached, q = of_all("latents").to(self.dtype), of_all("q").to(self.dtype)
        q = latents.rope_and_store(q, cached, meta, self.cos_sin, self.cache, norm=self.norm, eps=EPS)
        whole = torch.cat((of_all("absorbed").to(q.dtype), q[:, :, self.shape.nope_dim :]), dim=2)
        out = latents.attention(whole, self.cache, meta, scale=self.shape.scale)
        return dict(zip(counts, out.split([rows.count for rows in sequences]), strict=True))


def agrees(cached: Cached) -> None:
    """Prefills all but two tokens of each sequence in one step, then two steps of decodes."""
    contexts = dict(enumerate(cached.contexts))
    bounds = (
        {number: (0, context - 2) for number, context in contexts.items()},
        {number: (context - 2, context - 1) for number, context in contexts.items()},
        {number: (context - 1, context) for number, context in contexts.items()},
    )
    tolerance = TOLERANCE[cached.dtype]
    for counts in bounds:
        for number, rows in cached.step(counts).items():
            expected = cached.rows[number].expected(cached.norm, cached.dtype, *counts[number])
            torch.testing.assert_close(rows.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [LITE, LatentShape(3, 32, 8), LatentShape(1, 40, 6), LatentShape(5, 20, 2), LatentShape(128, 16, 4)],
    ids=str,
)
def test_equals_float64_for_any_shape(dtype: torch.dtype, shape: LatentShape) -> None:
    agrees(Cached(native(dtype), dtype, shape, [5, 64, 300]))
    agrees(Cached(TorchOps(CPU, dtype), dtype, shape, [5, 64, 130]))


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("size", [32, 64])
def test_every_level_of_instructions_and_size_of_blocks_agrees(level: Level, size: int) -> None:
    agrees(Cached(native(torch.bfloat16, level=level, block_size=size), torch.bfloat16, LITE, [3, 65, 290]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_every_batch_chunk_and_number_of_threads(dtype: torch.dtype) -> None:
    contexts = [700, 33, 530, 4]
    together = Cached(native(dtype, threads=2), dtype, LITE, contexts)
    together.step({number: (0, context - 1) for number, context in enumerate(contexts)})
    found = together.step({number: (context - 1, context) for number, context in enumerate(contexts)})
    for threads, cut in ((1, 300), (2, 17)):
        alone = Cached(native(dtype, threads=threads), dtype, LITE, contexts)
        alone.step({0: (0, cut)})
        prompt = alone.step({0: (cut, 700)})[0]
        assert torch.equal(prompt[-1], found[0][0])


def test_what_is_behind_the_last_token_of_a_page_does_not_count() -> None:
    cached = Cached(native(torch.float32), torch.float32, LatentShape(2, 32, 8), [20])
    cached.cache.latents.fill_(1e30)
    agrees(cached)
