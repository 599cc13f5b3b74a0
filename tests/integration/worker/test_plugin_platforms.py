"""Devices of installed packages as a worker opens them: the example in docs/examples, and broken ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from services.worker.backend import BackendError
from services.worker.config import WorkerConfig
from services.worker.executor.backend_choice import make_backend
from services.worker.executor.host_runner import HostRunner
from services.worker.platforms.interface import Platform
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.plugin_packages import pip_installed, written_package
from tests.support.worker.library_situations import check_mixed_batch, check_resumed_sequences

OTHERS = """
from msgspec.structs import replace
from services.worker.platforms.cpu import CpuPlatform

class Gone(CpuPlatform):
    @classmethod
    def why_unavailable(cls):
        return "its driver is not loaded"

class Broken(CpuPlatform):
    def __init__(self, index):
        raise RuntimeError("a bug")

class Grasping(CpuPlatform):
    def check_settings(self, settings):
        return replace(settings, world_size=2)

class Careless(CpuPlatform):
    def check_settings(self, settings):
        return replace(settings, dtype="float64")

class Unusable(CpuPlatform):
    def activate(self):
        raise RuntimeError("out of memory\\nand so on")

class Nothing:
    pass
"""
ENTRIES = {name.lower(): f"others:{name}" for name in ("Gone", "Broken", "Grasping", "Careless", "Unusable", "Nothing")}


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    pocket = pip_installed("pocket-platform", tmp_path_factory)
    others = written_package(tmp_path_factory.mktemp("others"), "others", OTHERS, {"baton.platforms": ENTRIES})
    with pytest.MonkeyPatch.context() as patch:
        for folder in map(str, (pocket, others)):
            patch.syspath_prepend(folder)
        yield
    for name in ("pocket_platform", "others"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("model"))


def opened(model: TinyModel, **different: Any) -> HostRunner:
    """As `python -m services.worker` opens it."""
    chosen = {"engine": "e", "device": "pocket", "max_num_seqs": 24, "max_batch_tokens": 256, "threads": 1}
    made = make_backend(WorkerConfig(model=str(model.path), **(chosen | different)))
    assert isinstance(made, HostRunner)
    return made


def test_a_device_of_a_package_says_what_the_library_does(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(model, local_rank=3, kv_memory=8 << 20)
    platform = backend.rank.platform
    assert (backend.device, backend.device_name, backend.card.dtype) == ("pocket:1", "pocket:1", "float32")
    assert type(backend.rank.decoder.ops).__name__ == "PocketOps"
    awaited: list[int] = []
    monkeypatch.setattr(type(platform), "synchronize", lambda _: awaited.append(backend.rank.steps))
    check_mixed_batch(model, backend)
    assert awaited == list(range(1, backend.rank.steps)), "each step is waited for once, but the last computes nothing"
    backend.reset()
    check_resumed_sequences(model, backend)


def test_its_memory_is_what_there_is(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(model, max_num_seqs=4, max_batch_tokens=32)
    memory = backend.rank.platform.memory()
    assert (memory.total, memory.free + memory.own) == (1 << 30, 1 << 30)
    whole = 4 * backend.card.max_model_len // backend.card.block_size
    assert backend.num_blocks == 4 * whole, "of a memory of its own it takes more than of main memory"
    with pytest.raises(BackendError, match=r"2\.00 GiB of KV memory do not fit: (0\.\d\d|1\.00) GiB are free"):
        opened(model, kv_memory=2 << 30)

    def full(platform: Platform) -> None:
        raise torch.OutOfMemoryError(f"{platform} is full")

    monkeypatch.setattr(type(backend.rank.platform), "synchronize", full)
    with pytest.raises(BackendError, match="a step of 32 tokens and 4 sequences does not fit beside the weights"):
        opened(model, max_num_seqs=4, max_batch_tokens=32)


@pytest.mark.parametrize(
    ("different", "why"),
    [
        (
            {"device": "pokcet"},
            r"device = pokcet: no installed package .* are: auto, cpu, cuda, sim, broken, .* pocket",
        ),
        ({"device": "cpu:1"}, "device = cpu:1: no installed package brings it"),
        ({"dtype": "bfloat16"}, "device = pocket: dtype = bfloat16: it computes in float32; auto and float32 are"),
        ({"ops": "native"}, "ops = native: on pocket there are auto, torch"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype = fp8: PyTorch's own operations read no such"),
        (
            {"rank": 2, "world_size": 3, "rendezvous": "127.0.0.1:1"},
            "device = pocket: rank 2 has no device of its own: it is number 2 here, 2 are there",
        ),
        ({"device": "gone"}, "device = gone: its driver is not loaded"),
        ({"device": "broken"}, r"device = broken: RuntimeError\('a bug'\)"),
        ({"device": "grasping"}, "device = grasping: the platform may not change world_size"),
        ({"device": "careless"}, r"device = careless: .*dtype"),
        ({"device": "unusable"}, "^unusable cannot be used: out of memory$"),
        ({"device": "nothing"}, r"others 1.0 \(nothing = others:Nothing\): a subclass of Platform is expected"),
    ],
)
def test_what_cannot_be_is_said_by_name(model: TinyModel, different: dict[str, Any], why: str) -> None:
    with pytest.raises(BackendError, match=why):
        opened(model, **different)
