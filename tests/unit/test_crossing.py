"""Arrays that cross to a device together, and come out as they were."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.crossing import fetched, packed_bytes, sent, sent_together, unpacked

CPU = torch.device("cpu")
ARRAYS = [
    np.array([0.25, 1.5, -3.0]),
    np.arange(5, dtype=np.int64),
    np.array([], dtype=np.float32),
    np.array([7.5], dtype=np.float32),
    np.arange(20, dtype=np.int32)[::3],
    np.array([1, 255], dtype=np.uint8),
]


def test_what_is_packed_comes_out_as_it_was_each_aligned_for_whole_vectors() -> None:
    together, starts = packed_bytes(ARRAYS)
    whole = torch.from_numpy(together)
    out = unpacked(whole, ARRAYS, starts)
    for array, tensor in zip(ARRAYS, out, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
    assert all((tensor.data_ptr() - whole.data_ptr()) % 16 == 0 for tensor in out)


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(3)
    (there,) = sent_together([array], CPU)
    for tensor in (there, sent(array, CPU), fetched(there)):
        assert tensor.data_ptr() == array.ctypes.data
