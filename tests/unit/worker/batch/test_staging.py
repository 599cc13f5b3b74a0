"""Rows on their way to a device that computes late: nothing is overwritten that is still to be read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.worker.batch.rows import Int32s, RowRuns, Rows, rows_of
from services.worker.batch.staging import STAGING_BUFFERS, RotatingStaging, rows_on_device
from services.worker.ops.interface import BatchMeta
from services.worker.ops.transfer import pack_bytes, to_device, to_device_together, to_host, unpack_tensors
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE

CPU = torch.device("cpu")
FIELDS = ("query_starts", "context_lens", "block_tables", "slots", "positions", "logits_rows")


class LateDevice:
    """Its copies and whatever else it is told to do happen only when somebody waits for them, in their order."""

    def __init__(self) -> None:
        self.told: list[Callable[[], None]] = []

    def catch_up(self, count: int) -> None:
        """Does the first `count` things that it was told and has not done."""
        for _ in range(count):
            self.told.pop(0)()


class LateLane:
    """A lane to a late device."""

    def __init__(self, device: LateDevice, capacity: int) -> None:
        self.host: Int32s = np.zeros(capacity, dtype=np.int32)
        self._there = torch.zeros(capacity, dtype=torch.int32)
        self._device = device
        self._sent: Callable[[], None] | None = None

    def wait(self) -> None:
        if self._sent in self._device.told:
            self._device.catch_up(self._device.told.index(self._sent) + 1)

    def send(self, length: int) -> torch.Tensor:
        def copy() -> None:
            self._there[:length] = torch.from_numpy(self.host[:length])

        self._sent = copy
        self._device.told.append(copy)
        return self._there[:length]


def rows_with(counts: list[int], starts: list[int], width: int = 8) -> Rows:
    """Sequences of `counts` new tokens behind `starts` others."""
    number = len(counts)
    tables = (1 + np.arange(number * width, dtype=np.int32)).reshape(number, width)
    tokens = np.arange(number * width * BLOCK_SIZE, dtype=np.int32).reshape(number, -1)
    seq_indices = np.arange(number)
    units = RowRuns(seq_indices, seq_indices, np.array(starts, dtype=np.int32), np.array(counts, dtype=np.int32))
    return rows_of(units, tables, tokens, BLOCK_SIZE)


def assert_holds(placed: tuple[torch.Tensor, BatchMeta], rows: Rows, logits_rows: Int32s) -> None:
    ids, meta = placed
    assert ids.tolist() == rows.ids.tolist()
    wanted = (rows.query_starts, rows.context_lens, rows.block_tables, rows.kv_slots, rows.positions, logits_rows)
    for field, array in zip(FIELDS, wanted, strict=True):
        tensor = getattr(meta, field)
        assert tensor.tolist() == array.tolist(), field
        assert tensor.is_contiguous(), field
        assert tensor.data_ptr() % 64 == ids.data_ptr() % 64, field
    assert (meta.num_decodes, meta.prefills) == (rows.num_decodes, rows.prefills)
    assert (meta.max_query, meta.max_context) == (rows.max_query, rows.max_context)


def test_what_is_placed_is_what_the_rows_say() -> None:
    rows = rows_with([1, 5, 1, 3], [17, 0, 40, 60])
    assert_holds(rows_on_device(rows, rows.last_rows, CPU), rows, rows.last_rows)


def test_steps_in_flight_do_not_overwrite_each_other() -> None:
    device = LateDevice()
    staging = RotatingStaging(lambda capacity: LateLane(device, capacity))
    computed = 0

    def compute(number: int) -> None:
        """A step: its rows are sent, and read by the device some time later."""
        rows = rows_with([1] * (1 + number % 5), [number + 3 * place for place in range(1 + number % 5)])
        placed = staging.place(rows, rows.last_rows)

        def read() -> None:
            nonlocal computed
            assert_holds(placed, rows, rows.last_rows)
            computed += 1

        device.told.append(read)

    for number in range(STAGING_BUFFERS):
        compute(number)
    assert computed == 0, "nobody waited yet"
    for number in range(STAGING_BUFFERS, 12):
        device.catch_up(2)
        compute(number)
    device.catch_up(len(device.told))
    assert computed == 12


def test_a_host_that_is_far_ahead_waits_for_the_buffer_it_needs() -> None:
    device = LateDevice()
    staging = RotatingStaging(lambda capacity: LateLane(device, capacity))
    rows = [rows_with([1, 1], [start, start + 1]) for start in range(6)]
    for step, each in enumerate(rows):
        placed = staging.place(each, each.last_rows)
        assert len(device.told) <= STAGING_BUFFERS, step
    device.catch_up(len(device.told))
    assert_holds(placed, rows[-1], rows[-1].last_rows)


def test_buffers_grow_to_what_a_step_needs() -> None:
    device = LateDevice()
    capacities: list[int] = []

    def make(capacity: int) -> LateLane:
        capacities.append(capacity)
        return LateLane(device, capacity)

    staging = RotatingStaging(make)
    large = rows_with([1] * 40, [16 * 4095] * 40, width=4096)
    for rows in (rows_with([1], [3]), large, large, large, rows_with([2], [3])):
        placed = staging.place(rows, rows.last_rows)
        device.catch_up(len(device.told))
        assert_holds(placed, rows, rows.last_rows)
    assert capacities == [1 << 16, 1 << 16, 1 << 18, 1 << 18]


@pytest.mark.parametrize(
    ("counts", "wanted", "every"),
    [
        ([1, 1, 1], [0, 1, 2], True),
        ([1, 1, 1], [0, 2, 1], False),
        ([1, 1, 1], [0, 1], False),
        ([1, 1, 1], [], False),
        ([1, 2], [0, 2], False),
    ],
)
def test_it_is_known_whether_all_rows_are_wanted_in_their_order(
    counts: list[int], wanted: list[int], every: bool
) -> None:
    rows = rows_with(counts, [20] * len(counts))
    _, meta = rows_on_device(rows, np.array(wanted, dtype=np.int32), CPU)
    assert meta.every_row is every


# Arrays that cross to a device together, and come out as they were.


ARRAYS = [
    np.array([0.25, 1.5, -3.0]),
    np.arange(5, dtype=np.int64),
    np.array([], dtype=np.float32),
    np.array([7.5], dtype=np.float32),
    np.arange(20, dtype=np.int32)[::3],
    np.array([1, 255], dtype=np.uint8),
]


def test_what_is_packed_comes_out_as_it_was_each_aligned_for_whole_vectors() -> None:
    together, starts = pack_bytes(ARRAYS)
    whole = torch.from_numpy(together)
    out = unpack_tensors(whole, ARRAYS, starts)
    for array, tensor in zip(ARRAYS, out, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
    assert all((tensor.data_ptr() - whole.data_ptr()) % 16 == 0 for tensor in out)


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(3)
    (there,) = to_device_together([array], CPU)
    for tensor in (there, to_device(array, CPU), to_host(there)):
        assert tensor.data_ptr() == array.ctypes.data
