"""A writer that was stopped for longer than its lease and the slot's rest goes on in a slot that is another block's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from msgspec.structs import replace

from kvstore.arena.mapped_arena import MappedArena
from kvstore.arena.owned_arena import OwnedArena
from tests.support.kv.ranks import Rank, make_arena, make_layout, reserve, transfer

LAYOUT = make_layout("float32")
SLOT, FORMER, LATER = 3, 4, 1_000


class Killed(Exception):
    """The writer's process ends where this is raised."""


def moved(rank: Rank, kind: Literal["save", "load"], block: int) -> str:
    """Between the block and the slot as it is later."""
    asked = replace(transfer(kind, [block], [SLOT]), generations=LATER.to_bytes(8, "little"))
    return rank.transfers.run(asked, lambda: False)


def update_sequences(arena: OwnedArena, rank: Rank) -> None:
    """The store gives the slot to another block, which is written and shown."""
    reserve(arena, SLOT, LATER)
    assert moved(rank, "save", 2) == "done"
    arena.commit(SLOT, used=1)
    assert arena.is_sound(SLOT)


@pytest.mark.parametrize("reader", ["torch", "native"])
@pytest.mark.parametrize("ending", ["goes on", "killed"])
def test_what_a_stalled_writer_leaves_in_anothers_slot_is_read_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, ending: str
) -> None:
    arena = make_arena(tmp_path, LAYOUT)
    stalled, other = Rank("torch", LAYOUT, tmp_path), Rank("torch", LAYOUT, tmp_path)
    reading = Rank("torch" if reader == "torch" else "native", LAYOUT, tmp_path)
    stalled.compute(seed=1)
    other.compute(seed=2)
    generation = MappedArena.generation
    asked: list[MappedArena] = []

    def stalls(mapped: MappedArena, slot: int) -> int:
        """The first to ask stops right after it has seen that the slot is its own, and wakes up when it is not."""
        found = generation(mapped, slot)
        if not asked:
            asked.append(mapped)
            assert found == SLOT + 1
            update_sequences(arena, other)
        elif mapped is asked[0] and ending == "killed":
            raise Killed
        return found

    monkeypatch.setattr(MappedArena, "generation", stalls)
    if ending == "killed":
        with pytest.raises(Killed):
            stalled.save([FORMER], [SLOT])
    else:
        assert stalled.save([FORMER], [SLOT]) == "late"
    monkeypatch.undo()
    assert asked
    assert arena.header(SLOT).generation == LATER
    reading.compute(seed=3)
    assert moved(reading, "load", 5) == "failed"
    assert not torch.any(reading.block(5)), "what could not be loaded is zeros"
