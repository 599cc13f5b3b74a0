"""What is refused, and which tiles are chosen, on GPUs of other generations than the one that tests may run on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops import triton_ops
from services.worker.ops.gpu import AMPERE, HOPPER, generation
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.ops.selector import OpsChoice
from services.worker.ops.triton.attention.paged_attention import create_attention
from services.worker.ops.triton.attention.tiles import decode_tile, prefill_tile
from services.worker.platforms.installed import built_in_platform
from tests.support.models.attention_reference import FP8

CUDA = torch.device("cuda")


def _pretend(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (major, minor))
    monkeypatch.setattr(triton_ops, "why_no_triton", lambda _device: None)


@pytest.mark.parametrize("ops", ["auto", "triton"])
def test_float8_is_refused_by_name_where_no_instruction_converts_it(
    monkeypatch: pytest.MonkeyPatch, ops: OpsName
) -> None:
    _pretend(monkeypatch, 8, 0)
    with pytest.raises(OpsUnavailable, match=r"kv_cache_dtype = fp8 needs .* 8\.9, cuda has 8\.0"):
        built_in_platform(CUDA).create_ops(OpsChoice(ops, CUDA, torch.bfloat16, "fp8"))
    create_attention("auto", CUDA, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_float8_is_kept_where_one_does(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    _pretend(monkeypatch, *capability)
    create_attention("auto", CUDA, torch.bfloat16, FP8)


def test_attention_that_was_asked_for_and_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, 9, 0)
    with pytest.raises(OpsUnavailable, match="not installed"):
        built_in_platform(CUDA).create_ops(OpsChoice("auto", CUDA, torch.bfloat16, attention="flash-attn"))


@pytest.mark.parametrize(("major", "like"), [(8, AMPERE), (9, HOPPER), (10, 10), (12, AMPERE)])
def test_gpus_with_little_shared_memory_get_small_tiles(monkeypatch: pytest.MonkeyPatch, major: int, like: int) -> None:
    _pretend(monkeypatch, major, 0)
    assert generation.__wrapped__(CUDA) == like


def test_heads_too_wide_for_any_tile_are_refused() -> None:
    with pytest.raises(OpsUnavailable, match="512"):
        decode_tile(512, 8, 2)
    with pytest.raises(OpsUnavailable, match="ops = torch"):
        prefill_tile(257, 64, 2, 2, windowed=False, generation=HOPPER)
