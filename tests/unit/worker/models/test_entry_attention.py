"""What rows attend to of many entries: as in float64, by blocks of their own group, some rows of a prompt at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.models.compressed import attention
from services.worker.models.compressed.attention import LayerStep, Queries, _EntryAttention
from services.worker.models.compressed.cache import EntryCache, RowCache
from services.worker.ops.torch_latent import best_tokens
from tests.support.worker.native_batches import Rows, meta_of, scattered_blocks

HEADS, DIM, INDEX_HEADS, INDEX_DIM, SCALE = 3, 16, 4, 8, 0.25
WINDOW, CHOSEN, RATE, BLOCK, ROWS = 8, 6, 4, 16, 21


@pytest.mark.parametrize("context", [95, 400], ids=["few", "many"])
def test_rows_attend_to_entries_that_are_chosen_and_scores_are_bounded(
    context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []

    def watched(scores: Tensor, count: int) -> Tensor:
        scored.append(len(scores))
        return best_tokens(scores, count)

    monkeypatch.setattr(attention, "best_tokens", watched)
    monkeypatch.setattr(attention, "_MAX_SCORES", 8 * INDEX_HEADS * (context // RATE))  # of eight rows
    torch.manual_seed(0)
    (blocks,), (entry_blocks,) = scattered_blocks([context], 1, BLOCK), scattered_blocks([context], 2, BLOCK)
    keys, entries = torch.randn(len(blocks) + 1, BLOCK, DIM), torch.randn(len(blocks) + 1, BLOCK // RATE, 24)
    asked = Queries(torch.randn(ROWS, HEADS, DIM), torch.randn(ROWS, INDEX_HEADS, INDEX_DIM), torch.rand(ROWS, 4))
    layer: Any = SimpleNamespace(sinks=torch.randn(HEADS))
    sizes: Any = SimpleNamespace(window=WINDOW, index_chosen=CHOSEN)
    meta, of_entries = (meta_of([Rows(ROWS, context, each)], BLOCK) for each in (blocks, entry_blocks))
    step = LayerStep(layer, None, RowCache(keys, None, meta), EntryCache(entries, RATE, BLOCK, of_entries))
    mixed = torch.cat([*_EntryAttention(step, asked, SCALE, sizes).prefills()])
    assert scored == [8, 8, 5]
    lying = keys[list(blocks)].flatten(0, 1).double(), entries[list(entry_blocks)].flatten(0, 1).double()
    expected = torch.stack([exact(row, context - ROWS + row, asked, *lying, layer.sinks) for row in range(ROWS)])
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-6)


def exact(row: int, position: int, asked: Queries, keys: Tensor, entries: Tensor, sinks: Tensor) -> Tensor:
    """[H, D] of a row in float64; `keys` and `entries` in the order of their tokens."""
    assert asked.index_q is not None
    assert asked.counts is not None
    seen = entries[: (position + 1) // RATE]
    worth = (asked.index_q[row].double() @ seen[:, DIM:].T).relu()
    best = (asked.counts[row].double() @ worth).topk(CHOSEN).indices
    read = torch.cat((keys[position + 1 - WINDOW : position + 1], seen[best, :DIM]))
    scores = torch.cat((asked.heads[row].double() @ read.T * SCALE, sinks.double().unsqueeze(1)), dim=1)
    return scores.softmax(1)[:, :-1] @ read
