"""Tensors and ranges of them, read by bytes, are those that the safetensors library wrote."""

from __future__ import annotations

import json
import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from services.worker.models import tensor_file
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import ModelError
from services.worker.models.tensor_file import TensorFileError, TensorFiles, read_header

CPU = torch.device("cpu")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors take many pieces, too."""
    monkeypatch.setattr(tensor_file, "_CHUNK", 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = {"a": made((5, 7), dtype), "b": made((3,), dtype), "none": made((0, 4), dtype)}
    save_file(wanted, tmp_path / "m.safetensors", metadata={"format": "pt"})
    with TensorFiles(CPU) as files:
        stored = files.open(tmp_path / "m.safetensors")
        assert set(stored) == set(wanted)
        assert all(same(files.read(stored[name]), tensor) for name, tensor in wanted.items())


@pytest.mark.usefixtures("small_chunks")
@settings(deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 12), min_size=1, max_size=3), large=st.booleans())
def test_ranges_of_rows_and_columns(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int], large: bool
) -> None:
    path = tmp_path_factory.mktemp("files") / "m.safetensors"
    whole = made((*shape, 40 if large else 2), torch.float16)
    save_file({"x": whole}, path)

    def part(size: int) -> tuple[int, int] | None:
        first = data.draw(st.integers(0, size - 1))
        return data.draw(st.sampled_from([None, (first, data.draw(st.integers(first, size)))]))

    rows, columns = part(whole.shape[0]), part(whole.shape[1])
    with TensorFiles(CPU) as files:
        read = files.read(files.open(path)["x"], rows, columns)
    assert same(read, whole[slice(*(rows or (None,)))][:, slice(*(columns or (None,)))])
    assert files.bytes_read == read.nbytes


def test_a_scalar_is_a_tensor_too(tmp_path: Path) -> None:
    save_file({"x": torch.tensor(3.5)}, tmp_path / "m.safetensors")
    with TensorFiles(CPU) as files:
        assert files.read(files.open(tmp_path / "m.safetensors")["x"]).item() == 3.5


def test_what_is_no_safetensors_file_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b'\x10\0\0\0\0\0\0\0{"x": 1}')
    for name in ("m.safetensors", "missing.safetensors"):
        with TensorFiles(CPU) as files, pytest.raises(TensorFileError, match=name):
            files.open(tmp_path / name)


def test_a_file_that_cannot_be_mapped_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    size = 1 << 38
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # sparse
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 37, before[1]))
    try:
        with pytest.raises(TensorFileError, match=r"huge\.safetensors: .*[Cc]annot allocate memory"):
            read_header(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_file_that_becomes_shorter_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1000)}, path)
    with open_checkpoint(tmp_path, torch.float32) as checkpoint:
        with path.open("r+b") as file:
            file.truncate(2000)
        with pytest.raises(ModelError, match=r"tensor x: .*model\.safetensors ends at byte 2000"):
            checkpoint.read("x", (1000,))


def test_a_checkpoint_counts_what_it_has_read_and_converts(tmp_path: Path) -> None:
    save_file({"x": torch.ones(6, 4, dtype=torch.float32)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, torch.bfloat16) as checkpoint:
        assert checkpoint.read("x", (6, 4), rows=(1, 3), columns=(0, 3)).dtype == torch.bfloat16
        assert checkpoint.bytes_read == 2 * 3 * 4
        with pytest.raises(ModelError, match="no tensor y"):
            checkpoint.read("y", (1,))
        with pytest.raises(ModelError, match=r"has shape \[6, 4\], the config asks for \[4, 6\]"):
            checkpoint.read("x", (4, 6))


def test_every_thread_that_reads_for_a_gpu_has_it_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: entered.setdefault(threading.get_ident(), device))
    with TensorFiles(torch.device("cuda", 1)) as files:
        thread = files._threads.submit(threading.get_ident).result()
    assert entered == {thread: torch.device("cuda", 1)}


def test_other_devices_are_read_for_through_main_memory(tmp_path: Path) -> None:
    save_file({"a": made((40, 30), torch.float32)}, tmp_path / "model.safetensors")
    with TensorFiles(torch.device("meta")) as files:
        read = files.read(files.open(tmp_path / "model.safetensors")["a"], rows=(3, 20), columns=(2, 9))
    assert (read.shape, read.device.type) == ((17, 7), "meta")
