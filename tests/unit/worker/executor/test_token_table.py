"""Tokens on a device: put there by the host, fed by what is drawn, read by rows and as histories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.executor.token_table import TokenTable, table_bytes
from services.worker.models.config import ModelError
from services.worker.ops.triton.decode_inputs import feed
from tests.support.kernels.kernel_device import DEVICE

SEQUENCES, WIDTH = 3, 40
CPU = torch.device("cpu")


def filled(device: torch.device) -> TokenTable:
    """Sequence s holds 100 * s + its positions."""
    table = TokenTable(SEQUENCES, WIDTH, device)
    seq_indices, positions = (each.ravel() for each in np.indices((SEQUENCES, WIDTH)))
    table.put(table.cells(seq_indices, positions.astype(np.int32)), (100 * seq_indices + positions).astype(np.int32))
    return table


def places(*pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    seq_indices, positions = zip(*pairs, strict=True)
    return np.array(seq_indices, dtype=np.intp), np.array(positions, dtype=np.int32)


@pytest.mark.parametrize("device", {CPU, DEVICE}, ids=str)
def test_rows_read_what_was_put_and_what_was_fed_behind_them(device: torch.device) -> None:
    table = filled(device)
    cells = torch.from_numpy(table.cells(*places((0, 3), (2, 39), (1, 0)))).to(device)
    assert table.read(cells).tolist() == [3, 239, 100]
    drawing = torch.tensor([2, 0], dtype=torch.int32, device=device)
    table.feed(cells, drawing, torch.tensor([7, 8], device=device))
    behind = torch.from_numpy(table.cells(*places((1, 1), (0, 4), (2, 39), (1, 2)))).to(device)
    assert table.read(behind).tolist() == [7, 8, 239, 102]


def test_histories_are_as_long_as_the_longest_and_end_before_what_is_about_to_be_drawn() -> None:
    table = filled(CPU)
    history = table.history(np.array([5, 9, 2], dtype=np.int32))
    tokens, lengths, prompts = history(*places((2, 3), (0, 1)))
    assert isinstance(tokens, torch.Tensor)
    assert (lengths.tolist(), prompts.tolist()) == ([5, 6], [2, 5])
    assert tokens.tolist() == [[200 + at for at in range(6)], list(range(6))]


@pytest.mark.parametrize("count", [0, 1, 128, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("named", [False, True])
def test_the_kernel_feeds_what_copies_do(count: int, dtype: torch.dtype, named: bool) -> None:
    chance = torch.Generator().manual_seed(count)
    rows = 310
    cells = torch.randperm(1000, generator=chance)[:rows].to(torch.int32) * 2
    tokens = torch.randint(0, 150_000, (count,), generator=chance, dtype=dtype)
    drawing = torch.randperm(rows, generator=chance)[:count].to(torch.int32) if named else None
    expected = torch.zeros(2001, dtype=torch.int32)
    own = cells[:count] if drawing is None else cells[drawing.long()]
    expected[own.long() + 1] = tokens.int()
    found = torch.zeros(2001, dtype=torch.int32, device=DEVICE)
    feed(found, cells.to(DEVICE), None if drawing is None else drawing.to(DEVICE), tokens.to(DEVICE))
    assert torch.equal(found.cpu(), expected)


def test_more_tokens_than_can_be_numbered_are_refused() -> None:
    assert table_bytes(SEQUENCES, WIDTH) == SEQUENCES * WIDTH * 4
    with pytest.raises(ModelError, match="max_num_seqs or max_model_len"):
        TokenTable(4096, 1 << 20, torch.device("meta"))
