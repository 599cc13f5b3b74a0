"""Which rows see which blocks where attention is by chunks of positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.fallback.chunked_attention import in_chunks
from services.worker.ops.interface import BatchMeta
from tests.support.models.library_models import library_model
from tests.support.worker.tiny_backend import tiny_backend


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(*sequences: tuple[int, int], decodes: int) -> BatchMeta:
    """(rows, context) of each; the table of sequence s holds the blocks 10 s, 10 s + 1 and so on."""
    rows, contexts = zip(*sequences, strict=True)
    positions = [length - count + i for count, length in sequences for i in range(count)]
    return BatchMeta(
        query_starts=ints(0, *torch.tensor(rows).cumsum(0).tolist()),
        context_lens=ints(*contexts),
        block_tables=torch.arange(10 * len(sequences), dtype=torch.int32).view(len(sequences), 10),
        slots=ints(*range(sum(rows))),
        positions=ints(*positions),
        logits_rows=ints(0),
        num_decodes=decodes,
        prefills=tuple(sequences[decodes:]),
        max_query=max(rows),
        max_context=max(contexts),
        block_size=16,
    )


def test_a_step_within_the_first_chunk_stays_as_it_is() -> None:
    meta = step((1, 32), (20, 20), decodes=1)
    assert in_chunks(meta, 32) is meta


def test_rows_of_different_chunks_are_sequences_of_their_own() -> None:
    """A decode of position 69 in the third chunk, and positions 60 to 99: four in the second, 32 in the third, four."""
    seen = in_chunks(step((1, 70), (40, 100), (1, 5), decodes=1), 32)
    assert seen.query_starts.tolist() == [0, 1, 5, 37, 41, 42]
    assert seen.context_lens.tolist() == [6, 32, 32, 4, 5]
    assert seen.block_tables.tolist() == [[4, 0], [12, 13], [14, 15], [16, 0], [20, 0]]
    assert (seen.num_decodes, seen.prefills) == (1, ((4, 32), (32, 32), (4, 4), (1, 5)))
    assert (seen.max_query, seen.max_context) == (32, 32)
    assert seen.positions.tolist() == [5, *range(28, 32), *range(32), *range(4), 4]


def test_a_chunk_of_half_a_block_is_refused(tmp_path: Path) -> None:
    library_model("Llama4Text", tmp_path, attention_chunk_size=24)
    with pytest.raises(ModelError, match="attention_chunk_size 24 is not a multiple of block_size 16"):
        tiny_backend(tmp_path)
