"""Which model is measured, and on what."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from services.worker.loaded_model import dtype_of
from services.worker.model.config import ModelConfig, ModelError
from services.worker.model.hf_config import read_model_config
from services.worker.roofline.findings import KernelsAsked, Started, StepsAsked
from services.worker.roofline.shapes import shape_file, shape_names

_DEFAULT_SHAPES = {"cpu": "qwen3-0.6b", "cuda": "llama-3.1-8b"}


class CannotMeasure(Exception):
    """The text says what to change."""


class Chosen(NamedTuple):
    """What is computed with."""

    name: str
    folder: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype


@contextmanager
def chosen(asked: StepsAsked | KernelsAsked) -> Iterator[Chosen]:
    """The model's folder and the device that `asked` means. Raises CannotMeasure."""
    rank, ranks = (asked.rank, asked.tp) if isinstance(asked, StepsAsked) else (0, 1)
    device = _device(asked.device, rank, ranks)
    torch.set_num_threads(asked.threads or max(1, torch.get_num_threads() // ranks))
    shape = _DEFAULT_SHAPES[device.type] if asked.shape is asked.model is None else asked.shape
    with _folder(shape, asked.model) as folder:
        try:
            config = read_model_config(folder)
        except ModelError as error:
            raise CannotMeasure(str(error)) from None
        dtype = getattr(torch, dtype_of(asked.dtype, config, device))
        yield Chosen(asked.name or shape or folder.name, folder, config, device, dtype)


def _device(wanted: str, rank: int, ranks: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CannotMeasure("--device cuda: PyTorch sees no CUDA device here")
    if ranks > torch.cuda.device_count():
        raise CannotMeasure(f"--tp {ranks}: each rank needs a GPU of its own, {torch.cuda.device_count()} are there")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@contextmanager
def _folder(shape: str | None, model: str | None) -> Iterator[Path]:
    """A shape's is made, and gone afterwards."""
    if shape is None:
        assert model is not None, "there is one of the two"
        yield Path(model)
        return
    path = shape_file(shape)
    if path is None:
        raise CannotMeasure(f"--shape {shape}: none of {', '.join(shape_names())}")
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        (Path(folder) / "config.json").write_bytes(path.read_bytes())
        yield Path(folder)


def started(made: Chosen) -> Started:
    on_cpu = made.device.type == "cpu"
    return Started(
        device="CPU" if on_cpu else torch.cuda.get_device_name(made.device),
        model=made.name,
        dtype=str(made.dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if on_cpu else None,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def give_back(device: torch.device) -> None:
    """What was freed, to the device: PyTorch keeps a GPU's, and it counts as taken."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
