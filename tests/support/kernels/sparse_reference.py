"""Which tokens an indexer chooses, and attention to those alone, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.rope import PlainRope, cos_sin_table
from services.worker.ops.interface import LatentCache, Ops
from tests.support.kernels.latent_reference import EPS, LatentRows, LatentShape
from tests.support.worker.native_batches import (
    CPU,
    Rows,
    meta_of,
    on_device,
    random,
    rope_reference,
    scattered_blocks,
)

SHAPE = LatentShape(heads=3, rank=40, rope_dim=6)
HEADS, DIM, CHOSEN = 5, 22, 24
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class Sparse:
    """Sequences whose tokens have an indexer's key behind the rotated one."""

    def __init__(self, ops: Ops, dtype: torch.dtype, contexts: list[int], device: torch.device = CPU) -> None:
        self.ops, self.dtype, self.contexts, self.device = ops, dtype, contexts, device
        self.cos_sin = cos_sin_table(PlainRope(10000.0), SHAPE.rope_dim, max(contexts))
        self.norm = random(SHAPE.rank, seed=1) * 0.1 + 1
        self.rows = [LatentRows(SHAPE, each, self.cos_sin, 10 + 5 * n) for n, each in enumerate(contexts)]
        self.keys = [random(each, DIM, seed=40 + n).bfloat16().float() for n, each in enumerate(contexts)]
        self.queries = [random(each, HEADS, DIM, seed=50 + n).bfloat16().float() for n, each in enumerate(contexts)]
        self.weights = [random(each, HEADS, seed=60 + n) for n, each in enumerate(contexts)]
        self.blocks = scattered_blocks(contexts, block_size=ops.block_size)
        caches = ops.latents.allocate(sum(map(len, self.blocks)) + 1, SHAPE.rank, SHAPE.rope_dim + DIM)
        self.cache = LatentCache.of(caches, SHAPE.rope_dim)

    def step(self, spans: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Each sequence's (first, end) positions → the slots that its rows choose, and what they attend to."""
        sequences = [Rows(end - first, end, blocks) for (first, end), blocks in zip(spans, self.blocks, strict=True)]
        meta = on_device(meta_of(sequences, self.ops.block_size), self.device)
        cos_sin, norm = self.cos_sin.to(self.device), self.norm.to(self.device)

        def cut(parts: list[Tensor]) -> Tensor:
            each = [part[first:end] for part, (first, end) in zip(parts, spans, strict=True)]
            return torch.cat(each).to(self.device)

        latents = self.ops.latents
        cached = torch.cat((cut([each.latents for each in self.rows]), cut(self.keys)), dim=1).to(self.dtype)
        q = cut([each.q for each in self.rows]).to(self.dtype)
        q = latents.rope_and_store(q, cached, meta, cos_sin, self.cache, norm=norm, eps=EPS)
        queries = cut(self.queries).to(self.dtype)
        chosen = latents.choose(queries, cut(self.weights), meta, cos_sin, self.cache, CHOSEN)
        whole = torch.cat((cut([each.absorbed for each in self.rows]).to(q.dtype), q[:, :, SHAPE.nope_dim :]), dim=2)
        out = latents.attention(whole, self.cache, meta, scale=SHAPE.scale, chosen=chosen)
        counts = [rows.count for rows in sequences]
        return [*chosen.cpu().split(counts)], [*out.cpu().double().split(counts)]

    def places(self, sequence: int, slots: Tensor, position: int) -> list[int]:
        """The positions that a row sees of the slots that it chose."""
        size, blocks = self.ops.block_size, self.blocks[sequence]
        seen = slots[: min(position + 1, CHOSEN)].tolist()
        return [blocks.index(slot // size) * size + slot % size for slot in seen]

    def scores(self, sequence: int) -> Tensor:
        """float64 [context, context] of all rows and tokens, whether they see them or not."""
        turn = self.cos_sin[: self.contexts[sequence]]

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


def check_sparse(sparse: Sparse, again: int = 50) -> None:
    """Prefills but for two tokens of each, a step of decodes, then one beside a prefill of the last `again` tokens."""
    *others, last = sparse.contexts
    steps = (
        [(0, each - 2) for each in sparse.contexts],
        [(each - 2, each - 1) for each in sparse.contexts],
        [*((each - 1, each) for each in others), (last - again, last)],
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
