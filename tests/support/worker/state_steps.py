"""Steps of sequences that keep states, as operations are given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta, StateCache, StateMixer, StateOps, StateRows
from services.worker.ops.torch_mixers.convolution import CHUNK
from tests.support.worker.native_batches import native


class Share(NamedTuple):
    """Rows of one sequence in a step."""

    slot: int
    first: int
    """Position of the first of them."""
    count: int


LENGTHS = {7: 3 * CHUNK + 5, 2: CHUNK + 1, 0: 2 * CHUNK, 5: 9}
"""Of four sequences, by slot, which `STEPS` cut differently."""
STEPS = (
    [Share(0, 0, 1), Share(7, 0, CHUNK + 3), Share(2, 0, 2)],
    [Share(0, 1, 1), Share(5, 0, 1), Share(7, CHUNK + 3, 2), Share(2, 2, CHUNK - 1)],
    [Share(7, CHUNK + 5, 1), Share(5, 1, 3), Share(0, 2, 2 * CHUNK - 2)],
    [Share(5, 4, 5), Share(7, CHUNK + 6, 2 * CHUNK - 1)],
)


def meta_of(shares: list[Share]) -> BatchMeta:
    """Those of one row first, as every step has them."""
    counts = torch.tensor([share.count for share in shares])
    ends = torch.tensor([share.first + share.count for share in shares])
    decodes = sum(share.count == 1 for share in shares)
    assert all(share.count == 1 for share in shares[:decodes])
    begins = torch.tensor([share.first == 0 for share in shares[:decodes]], dtype=torch.bool)
    starts = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0))).int()
    rows = torch.zeros(int(counts.sum()), dtype=torch.int32)
    return BatchMeta(
        query_starts=starts,
        context_lens=ends.int(),
        block_tables=torch.zeros(len(shares), 1, dtype=torch.int32),
        slots=rows,
        positions=rows,
        logits_rows=rows[:0],
        num_decodes=decodes,
        prefills=tuple(zip(counts[decodes:].tolist(), ends[decodes:].tolist(), strict=True)),
        max_query=int(counts.max()),
        max_context=int(ends.max()),
        block_size=16,
        states=StateRows(torch.tensor([share.slot for share in shares]), begins if begins.any() else None),
    )


def mixed_in_steps(
    mix: Callable[[Tensor, list[Share]], Tensor], rows: dict[int, Tensor], steps: Sequence[list[Share]] = STEPS
) -> dict[int, Tensor]:
    """The rows of each slot's sequence → what `mix` makes of them in these steps."""
    outputs: dict[int, list[Tensor]] = {slot: [] for slot in rows}
    for shares in steps:
        given = torch.cat([rows[share.slot][share.first : share.first + share.count] for share in shares])
        for share, part in zip(shares, mix(given, shares).split([share.count for share in shares]), strict=True):
            outputs[share.slot].append(part)
    mixed = {slot: torch.cat(parts) for slot, parts in outputs.items()}
    assert {slot: len(each) for slot, each in mixed.items()} == {slot: len(each) for slot, each in rows.items()}
    return mixed


def assert_steps_are_the_recurrence(
    ops: StateOps,
    mixer: StateMixer,
    cache: StateCache,
    reference: Callable[[Tensor], tuple[Tensor, Tensor]],
    width: int,
    *,
    atol: float = 2e-5,
    state_atol: float = 2e-5,
    rtol: float = 1e-4,
) -> dict[int, Tensor]:
    """Four sequences of rows of `width` numbers, cut differently, in slots of `cache` that hold what is no number until
    they begin, have the outputs and the last state that `reference` makes of their rows in float64. → the rows."""
    torch.manual_seed(6)
    rows = {slot: torch.randn(length, width) for slot, length in LENGTHS.items()}
    mixed = mixed_in_steps(lambda given, shares: ops.mix(given, mixer, cache, meta_of(shares)), rows)
    for slot in LENGTHS:
        expected, state = reference(rows[slot])
        torch.testing.assert_close(mixed[slot].double(), expected, atol=atol, rtol=rtol)
        torch.testing.assert_close(cache.states[slot].double(), state, atol=state_atol, rtol=rtol)
    others = [slot for slot in range(len(cache.states)) if slot not in LENGTHS]
    assert cache.states[others].isnan().all(), "nobody else's state is written"
    return rows


def assert_rows_do_not_depend_on_cuts(mixer: StateMixer, cache: Callable[[], StateCache], width: int) -> None:
    """The native library's, of `width` numbers, are the same to the last bit in one step or in many, alone or beside
    others, by one thread or two: who is computed again goes on alike. `cache`: makes one with seven slots and more."""
    whole, cut, length = cache(), cache(), CHUNK + 7
    rows = torch.randn(length, width)
    one, two = (native(torch.float32, threads=threads).states for threads in (1, 2))
    expected = one.mix(rows, mixer, whole, meta_of([Share(3, 0, length)]))
    parts, first = [], 0
    for count in (1, 2, 5, 1, 3, length - 12):
        given = torch.cat((torch.randn(1, width), rows[first : first + count]))
        parts.append(two.mix(given, mixer, cut, meta_of([Share(6, 0, 1), Share(4, first, count)]))[1:])
        first += count
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut.states[4], whole.states[3])
    assert torch.equal(cut.windows[4], whole.windows[3])
