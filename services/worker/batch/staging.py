"""How a step's rows reach the device: packed in one buffer, sent in one copy that nobody waits for.

Steps are launched ahead of the device, so the page-locked buffers take turns: one is written again
only when what it held has left it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.batch import EncodedRows
from services.worker.batch.rows import Int32s, Rows
from services.worker.ops.interface import BatchMeta, EncodedInputs, StateRows
from services.worker.ops.transfer import to_device

STAGING_BUFFERS = 2
"""Number of buffers: as many steps may be in flight, see `backend.MAX_LAUNCHED_STEPS`."""

_FIRST_CAPACITY = 1 << 16
"""Numbers that a buffer has room for at first; it doubles as batches and contexts ask for more."""


class Staging(Protocol):
    """Copies what a step needs to the device. Used from one thread."""

    def place(self, rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
        """The rows' token ids [n] and the rest, on the device, in the order of its current stream.

        Both may be written to, and stay as they are until `place` has been called STAGING_BUFFERS times more.
        """


class Lane(Protocol):
    """A buffer on the host, and its counterpart on the device."""

    @property
    def host(self) -> Int32s:
        """The part on the host, to be written before `send`."""

    def wait(self) -> None:
        """Waits until all that was sent has left `host`."""

    def send(self, length: int) -> Tensor:
        """The first `length` numbers of `host` on the device, without waiting."""


class LaneMaker(Protocol):
    """Makes lanes for one device."""

    def __call__(self, capacity: int) -> Lane:
        """A lane of that many numbers."""


class PlainStaging:
    """For a processor, which has computed when a launch returns: nothing is in flight."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def place(self, rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
        """See `Staging.place`."""
        return rows_on_device(rows, logits_rows, self._device)


class RotatingStaging:
    """Owns several lanes, used one after the other."""

    def __init__(self, make_lane: LaneMaker, turns: int = STAGING_BUFFERS) -> None:
        self._make_lane = make_lane
        self._lanes = [make_lane(_FIRST_CAPACITY) for _ in range(turns)]
        self._turn = 0

    def place(self, rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
        """See `Staging.place`."""
        together = packed(rows, logits_rows)
        lane = self._next(together.length)
        together.write(lane.host)
        return together.tensors(lane.send(together.length))

    def _next(self, length: int) -> Lane:
        """The next lane, free, with room for `length` numbers."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._lanes)
        lane = self._lanes[turn]
        lane.wait()
        if len(lane.host) < length:
            lane = self._lanes[turn] = self._make_lane(1 << (length - 1).bit_length())
        return lane


class CudaLane:
    """Page-locked memory and a copy on the current stream. The device's side needs no waiting: whoever reads it is on
    that stream, before the next copy."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._pinned = torch.zeros(capacity, dtype=torch.int32, pin_memory=True)
        self._on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.host: Int32s = np.asarray(self._pinned.numpy())

    def wait(self) -> None:
        """Waits for the last copy."""
        self._left.synchronize()  # one that was never recorded is over

    def send(self, length: int) -> Tensor:
        """Copies the first `length` numbers on the current stream."""
        to_device = self._on_device[:length]
        to_device.copy_(self._pinned[:length], non_blocking=True)
        self._left.record()
        return to_device


def staging_for(device: torch.device) -> Staging:
    """What suits `device`. Each user of it needs one of its own."""
    if device.type != "cuda":
        return PlainStaging(device)
    return RotatingStaging(lambda capacity: CudaLane(device, capacity))


# From rows as numpy has them to the tensors that a decoder reads: one buffer, and where in it each array lies.


_ALIGNED = 16
"""An array's start is a multiple of so many numbers, 64 bytes. Kernels read whole vectors then; and Triton compiles a
kernel anew where a pointer is aligned otherwise than before."""


class PackedRows(NamedTuple):
    """A step's arrays one behind the other."""

    rows: Rows
    arrays: tuple[Int32s, ...]
    starts: tuple[int, ...]
    length: int
    """Numbers that a buffer must have room for."""

    def write(self, buffer: Int32s) -> None:
        """Writes the arrays into `buffer` [length or more]."""
        for array, start in zip(self.arrays, self.starts, strict=True):
            buffer[start : start + len(array)] = array

    def tensors(self, buffer: Tensor) -> tuple[Tensor, BatchMeta]:
        """The token ids and the rest, as views of `buffer`."""
        parts = zip(self.arrays, self.starts, strict=True)
        views = [buffer[start : start + len(array)] for array, start in parts]
        ids, positions, slots, query_starts, context_lens, logits_rows, tables = views
        meta = BatchMeta(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables.view(self.rows.block_tables.shape),
            slots=slots,
            positions=positions,
            logits_rows=logits_rows,
            num_decodes=self.rows.num_decodes,
            prefills=self.rows.prefills,
            max_query=self.rows.max_query,
            max_context=self.rows.max_context,
            block_size=self.rows.block_size,
            every_row=len(logits_rows) == len(ids) and bool((self.arrays[5] == np.arange(len(ids))).all()),
        )
        return ids, meta


def packed(rows: Rows, logits_rows: Int32s) -> PackedRows:
    """Where everything goes. `write` is still to be called. Not for groups of layers, which only CPUs have."""
    assert not rows.others, "a device has one table for all layers"
    arrays = (
        rows.ids,
        rows.positions,
        rows.kv_slots,
        rows.query_starts,
        rows.context_lens,
        logits_rows,
        rows.block_tables.ravel(),
    )
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-len(array) // _ALIGNED) * _ALIGNED
    return PackedRows(rows, arrays, tuple(starts), end)


def rows_on_device(rows: Rows, logits_rows: Int32s, device: torch.device) -> tuple[Tensor, BatchMeta]:
    """The rows' token ids and the rest as tensors on `device`, in one copy that the host waits for."""
    together = packed(rows, logits_rows)
    buffer = np.empty(together.length, dtype=np.int32)
    together.write(buffer)
    return together.tensors(torch.from_numpy(buffer).to(device))


def rows_in_place(rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
    """The rows' token ids and the rest as tensors in main memory, which are the arrays themselves."""
    meta = BatchMeta(
        query_starts=torch.from_numpy(rows.query_starts),
        context_lens=torch.from_numpy(rows.context_lens),
        block_tables=torch.from_numpy(rows.block_tables),
        slots=torch.from_numpy(rows.kv_slots),
        positions=torch.from_numpy(rows.positions),
        logits_rows=torch.from_numpy(logits_rows),
        num_decodes=rows.num_decodes,
        prefills=rows.prefills,
        max_query=rows.max_query,
        max_context=rows.max_context,
        block_size=rows.block_size,
        every_row=len(logits_rows) == len(rows.ids) and bool((logits_rows == np.arange(len(rows.ids))).all()),
    )
    if rows.others:
        others = [
            replace(meta, block_tables=torch.from_numpy(each.block_tables), slots=torch.from_numpy(each.kv_slots))
            for each in rows.others
        ]
        meta = replace(meta, others=tuple(others))
    return torch.from_numpy(rows.ids), meta


def state_rows(rows: Rows, device: torch.device) -> StateRows:
    """Which states a step goes on with: those at the indices of its sequences."""
    slots = rows.seq_indices[rows.query_starts[:-1]]
    begins = rows.positions[: rows.num_decodes] == 0
    return StateRows(to_device(slots, device), to_device(begins, device) if begins.any() else None)


def encoded_inputs(rows: EncodedRows, device: torch.device, dtype: torch.dtype, block_size: int) -> EncodedInputs:
    """What a step's rows attend to beside their sequences, for a model on `device` whose rows are of `dtype`."""
    tables, lengths, slots = (to_device(each, device) for each in (rows.tables, rows.lengths, rows.slots))
    values = None if rows.values is None else rows.values.to(device, dtype)
    count = len(lengths)
    heard = lengths > 0
    lengths = lengths.clamp(min=1)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    reads = BatchMeta(
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=device),
        context_lens=lengths,
        block_tables=tables,
        slots=torch.zeros_like(lengths),
        positions=lengths - 1,
        logits_rows=nothing,
        num_decodes=count,
        prefills=(),
        max_query=1,
        max_context=int(lengths.max()),
        block_size=block_size,
    )
    zeros = torch.zeros_like(slots)
    writes = BatchMeta(
        query_starts=torch.tensor([0, len(slots)], dtype=torch.int32, device=device),
        context_lens=torch.full((1,), len(slots), dtype=torch.int32, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        slots=slots,
        positions=zeros,
        logits_rows=nothing,
        num_decodes=0,
        prefills=((len(slots), len(slots)),),
        max_query=len(slots),
        max_context=len(slots),
        block_size=block_size,
    )
    return EncodedInputs(reads, None if bool(heard.all()) else heard, writes, values)
