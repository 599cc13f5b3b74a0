"""A GPU on which Triton cannot launch kernels is served by PyTorch's operations, and says what is missing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops import gpu as triton_here
from services.worker.ops.gpu import runs_triton, why_no_triton
from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.selector import create_ops

GPU = torch.device("cuda", 0)


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
    assert create_ops("auto", GPU, torch.bfloat16).name == "triton"


def test_without_a_compiler_all_is_done_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_here, "_start", without_compiler)
    assert not runs_triton(GPU)
    with caplog.at_level(logging.INFO):
        assert create_ops("auto", GPU, torch.bfloat16).name == "torch"
    assert "Failed to find C compiler." in caplog.text
    with pytest.raises(OpsUnavailable, match="gcc or clang with Python's headers"):
        create_ops("triton", GPU, torch.bfloat16)


def test_gpus_before_ampere_do_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_here, "_start", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not runs_triton(GPU)
    with pytest.raises(OpsUnavailable, match=r"need a GPU of compute capability 8\.0, cuda:0 has 7\.5"):
        create_ops("triton", GPU, torch.bfloat16)
