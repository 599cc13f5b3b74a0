"""A GPU on which Triton cannot launch kernels is served by PyTorch's operations, and says what is missing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops import gpu as triton_here
from services.worker.ops.gpu import runs_triton, why_no_triton
from services.worker.ops.interface import Ops, OpsName, OpsUnavailable
from services.worker.ops.selector import OpsChoice
from services.worker.platforms.installed import built_in_platform

GPU = torch.device("cuda", 0)


def ops_called(name: OpsName) -> Ops:
    return built_in_platform(GPU).create_ops(OpsChoice(name, GPU, torch.bfloat16))


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    why_no_triton.cache_clear()
    yield
    why_no_triton.cache_clear()


def without_compiler() -> None:
    raise RuntimeError("Failed to find C compiler.")


def test_where_it_starts_its_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_here, "_start", lambda: None)
    assert runs_triton(GPU)
    assert ops_called("auto").name == "triton"


def test_without_a_compiler_all_is_done_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_here, "_start", without_compiler)
    assert not runs_triton(GPU)
    with caplog.at_level(logging.INFO):
        assert ops_called("auto").name == "torch"
    assert "Failed to find C compiler." in caplog.text
    with pytest.raises(OpsUnavailable, match="gcc or clang with Python's headers"):
        ops_called("triton")


def test_gpus_before_ampere_do_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_here, "_start", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not runs_triton(GPU)
    with pytest.raises(OpsUnavailable, match=r"need a GPU of compute capability 8\.0, cuda:0 has 7\.5"):
        ops_called("triton")
