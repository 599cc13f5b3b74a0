"""Which tokens an indexer chooses, and attention to those alone, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.models.rope import PlainRope, cos_sin_table
from services.worker.ops.interface import LatentCache, Ops
from services.worker.ops.torch_latent import best_tokens
from services.worker.ops.torch_ops import TorchOps
from tests.support.kernels.latent_reference import EPS, LatentRows, LatentShape
from tests.support.worker.native_batches import CPU, Rows, meta_of, native, random, rope_reference, scattered_blocks

SHAPE = LatentShape(heads=3, rank=40, rope_dim=6)
HEADS, DIM, CHOSEN = 5, 22, 24
CONTEXTS = [9, 70, 200]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class Sparse:
    """Sequences whose tokens have an indexer's key behind the rotated one."""

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        self.ops, self.dtype = ops, dtype
        self.cos_sin = cos_sin_table(PlainRope(10000.0), SHAPE.rope_dim, max(CONTEXTS))
        self.norm = random(SHAPE.rank, seed=1) * 0.1 + 1
        self.rows = [LatentRows(SHAPE, each, self.cos_sin, 10 + 5 * n) for n, each in enumerate(CONTEXTS)]
        self.keys = [random(each, DIM, seed=40 + n).bfloat16().float() for n, each in enumerate(CONTEXTS)]
        self.queries = [random(each, HEADS, DIM, seed=50 + n).bfloat16().float() for n, each in enumerate(CONTEXTS)]
        self.weights = [random(each, HEADS, seed=60 + n) for n, each in enumerate(CONTEXTS)]
        self.blocks = scattered_blocks(CONTEXTS, block_size=ops.block_size)
        caches = ops.latents.allocate(sum(map(len, self.blocks)) + 1, SHAPE.rank, SHAPE.rope_dim + DIM)
        self.cache = LatentCache.of(caches, SHAPE.rope_dim)

    def step(self, spans: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Each sequence's (first, end) positions → the slots that its rows choose, and what they attend to."""
        sequences = [Rows(end - first, end, blocks) for (first, end), blocks in zip(spans, self.blocks, strict=True)]
        meta = meta_of(sequences, self.ops.block_size)

        def cut(parts: list[Tensor]) -> Tensor:
            return torch.cat([part[first:end] for part, (first, end) in zip(parts, spans, strict=True)])

        latents = self.ops.latents
        cached = torch.cat((cut([each.latents for each in self.rows]), cut(self.keys)), dim=1).to(self.dtype)
        q = cut([each.q for each in self.rows]).to(self.dtype)
        q = latents.rope_and_store(q, cached, meta, self.cos_sin, self.cache, norm=self.norm, eps=EPS)
        queries = cut(self.queries).to(self.dtype)
        chosen = latents.choose(queries, cut(self.weights), meta, self.cos_sin, self.cache, CHOSEN)
        whole = torch.cat((cut([each.absorbed for each in self.rows]).to(q.dtype), q[:, :, SHAPE.nope_dim :]), dim=2)
        out = latents.attention(whole, self.cache, meta, scale=SHAPE.scale, chosen=chosen)
        counts = [rows.count for rows in sequences]
        return [*chosen.split(counts)], [*out.double().split(counts)]

    def places(self, sequence: int, slots: Tensor, position: int) -> list[int]:
        """The positions that a row sees of the slots that it chose."""
        size, blocks = self.ops.block_size, self.blocks[sequence]
        seen = slots[: min(position + 1, CHOSEN)].tolist()
        return [blocks.index(slot // size) * size + slot % size for slot in seen]

    def scores(self, sequence: int) -> Tensor:
        """float64 [context, context] of all rows and tokens, whether they see them or not."""
        turn = self.cos_sin[: CONTEXTS[sequence]]

        def rotated(x: Tensor) -> Tensor:
            kept, last = x[:, :, : -SHAPE.rope_dim], x[:, :, -SHAPE.rope_dim :]
            return torch.cat((kept.double(), rope_reference(last, turn)), dim=2)

        keys = rotated(self.keys[sequence].unsqueeze(1)).squeeze(1).to(self.dtype).double()
        products = torch.einsum("rhd,td->rht", rotated(self.queries[sequence]), keys).relu()
        return torch.einsum("rht,rh->rt", products, self.weights[sequence].double())

    def attended(self, sequence: int, position: int, places: list[int]) -> Tensor:
        """float64 [H, rank] of a row that sees these."""
        rows = self.rows[sequence]
        latents, rotated, _ = rows.cached(self.norm, self.dtype)
        keys = torch.cat((latents, rotated), dim=1)[places]
        weights = (rows.queries()[position] @ keys.T * SHAPE.scale).softmax(dim=1)
        return weights @ latents[places]


def agrees(sparse: Sparse) -> None:
    """Prefills but for two tokens of each, a step of decodes, then one beside a prefill."""
    steps = (
        [(0, each - 2) for each in CONTEXTS],
        [(each - 2, each - 1) for each in CONTEXTS],
        [(8, 9), (69, 70), (150, 200)],
    )
    tolerance = TOLERANCE[sparse.dtype]
    for spans in steps:
        chosen, out = sparse.step(spans)
        for sequence, (first, end) in enumerate(spans):
            scores = sparse.scores(sequence)
            for row, position in enumerate(range(first, end)):
                places = sparse.places(sequence, chosen[sequence][row], position)
                assert places == sorted(set(places))
                assert places[-1] <= position
                own = scores[position, : position + 1]
                left = [each for each in range(position + 1) if each not in places]
                if left:  # those that are as good as the worst that was taken differ by rounding alone
                    assert own[left].max() - own[places].min() < 0.5 * tolerance * own.abs().max()
                expected = sparse.attended(sequence, position, places)
                torch.testing.assert_close(out[sequence][row], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 32])
def test_rows_attend_to_what_their_indexer_scores_best(dtype: torch.dtype, size: int) -> None:
    agrees(Sparse(native(dtype, block_size=size), dtype))
    agrees(Sparse(TorchOps(CPU, dtype, block_size=size), dtype))


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
