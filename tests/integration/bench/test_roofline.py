"""The measurements themselves, on models small enough to be quick: everything real but the size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.bench.device import roofline
from services.bench.device.measurement import findings
from services.bench.errors import BenchError
from services.worker.measure.roofline import cases as kernel_case
from services.worker.measure.roofline import ceilings
from services.worker.measure.roofline import gpu_cases as device_cases
from services.worker.measure.roofline.__main__ import main
from services.worker.measure.roofline.cases import Cases, KernelContext, batch_of
from services.worker.measure.roofline.gpu_cases import kv_blocks, masks, sampling, verification
from services.worker.measure.roofline.kernels import FAMILIES, measure_kernels
from services.worker.measure.roofline.measured_rank import CannotMeasure
from services.worker.measure.roofline.steps import measure_steps
from services.worker.measure.roofline.wire import (
    Ceilings,
    Finding,
    KernelMeasured,
    KernelSkipped,
    KernelsRequest,
    MeasureStarted,
    ModelReady,
    StepCase,
    StepMeasured,
    StepSkipped,
    StepsRequest,
)
from services.worker.models.hf_config import read_model_config
from services.worker.ops.interface import BatchMeta
from services.worker.ops.torch_ops import TorchOps
from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.interface import MemoryReading
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.models.tiny_models import make_config


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are is no concern here."""
    monkeypatch.setattr(ceilings, "_COPIED_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "_SQUARES", {"cpu": (64,)})
    monkeypatch.setattr(ceilings, "_PROBED_STEPS", 800)
    monkeypatch.setattr(kernel_case, "_COLD_BYTES", {"cpu": 4096})


def folder(path: Path, family: str = "qwen3", **changes: object) -> str:
    config = make_config(family, **changes)
    architecture = type(config).__name__.replace("Config", "ForCausalLM")
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [architecture]}))
    return str(path)


def steps(model: str, **different: object) -> list[Finding]:
    asked = {
        "name": "tiny",
        "model": model,
        "device": "cpu",
        "threads": 1,
        "seconds": 3.0,
        "batches": (1, 5),
        "contexts": (1, 100),
        "prefills": (40,),
    }
    return list(measure_steps(StepsRequest(**(asked | different))))


def test_steps_are_measured_one_after_the_other_behind_the_ceilings(tmp_path: Path) -> None:
    started, limits, ready, *found, again = steps(folder(tmp_path))
    assert isinstance(started, MeasureStarted)
    assert isinstance(limits, Ceilings)
    assert isinstance(again, Ceilings)
    assert again.memory >= limits.memory
    assert isinstance(ready, ModelReady)
    assert ready.eager is not None
    assert [each.case for each in found if isinstance(each, StepMeasured)] == [
        StepCase("decode", 1, 1),
        StepCase("decode", 5, 1),
        StepCase("decode", 1, 100),
        StepCase("decode", 5, 100),
        StepCase("prefill", 1, 40),
    ]
    for step in found:
        assert isinstance(step, StepMeasured)
        assert step.forward.best <= step.forward.median
        assert step.whole is not None
        assert step.whole.best > 0
        assert step.work.bytes > step.weight_bytes > 0


def test_what_the_model_the_memory_or_the_time_has_no_room_for_is_left_out_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder(tmp_path)
    *_, long, _ = steps(model, batches=(), prefills=(100_000,))
    assert long == StepSkipped(StepCase("prefill", 1, 100_000), "the model has 256 positions")
    *_, late, _ = steps(model, batches=(), prefills=(40,), seconds=1e-6)
    assert isinstance(late, StepSkipped)
    assert "time is up" in late.reason
    readings = iter([MemoryReading(free=1 << 30)])  # the weights fit
    monkeypatch.setattr(CpuPlatform, "memory", lambda platform: next(readings, MemoryReading(free=100_000)))
    *_, small, large, _ = steps(model, batches=(1, 100), contexts=(32,), prefills=())
    assert isinstance(small, StepMeasured)
    assert isinstance(large, StepSkipped)
    assert "GiB of KV memory" in large.reason


def test_a_batch_is_what_a_scheduler_would_give_out() -> None:
    ids, meta = batch_of(StepCase("decode", 3, 33), 20, 50, torch.device("cpu"))
    assert ids.max() < 50
    assert meta.context_lens.tolist() == [33] * 3
    assert len(set(meta.block_tables.flatten().tolist())) == 9, "no block is shared"
    assert meta.slots.tolist() == [(int(row[2])) * BLOCK_SIZE for row in meta.block_tables]
    ids, meta = batch_of(StepCase("prefill", 2, 20), 20, 50, torch.device("cpu"))
    assert len(ids) == 40
    assert meta.positions.tolist() == [*range(20), *range(20)]
    assert meta.query_starts.tolist() == [0, 20, 40]
    assert meta.logits_rows.tolist() == [19, 39]
    assert meta.slots.tolist() == [_slot(meta, row, at) for row in range(2) for at in range(20)]


def _slot(meta: BatchMeta, row: int, position: int) -> int:
    return int(meta.block_tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def test_steps_are_measured_with_the_blocks_of_the_stack(tmp_path: Path) -> None:
    case = StepCase("decode", 2, 70)
    _, meta = batch_of(case, 8, 100, torch.device("cpu"), 64)
    assert (meta.block_size, meta.block_tables.shape) == (64, (2, 2))
    assert [int(slot) % 64 for slot in meta.slots] == [69 % 64] * 2
    model = folder(tmp_path)
    small, large = (steps(model, batches=(5,), contexts=(100,), seconds=1.0, block_size=size) for size in (16, 64))
    blocks = [next(each for each in found if isinstance(each, ModelReady)) for found in (small, large)]
    assert blocks[1].kv_block_bytes == 4 * blocks[0].kv_block_bytes
    assert blocks[1].kv_blocks < blocks[0].kv_blocks
    assert any(isinstance(each, StepMeasured) for each in large)


def test_every_family_of_kernels_is_measured_beside_torchs_own(tmp_path: Path) -> None:
    asked = KernelsRequest(
        model=folder(tmp_path), device="cpu", dtype="bfloat16", threads=1, rows=(1, 3), contexts=(20,), seconds=1.0
    )
    started, limits, *found, again = measure_kernels(asked)
    assert isinstance(started, MeasureStarted)
    assert started.model == tmp_path.name
    assert isinstance(limits, Ceilings)
    assert isinstance(again, Ceilings)
    measured = [each for each in found if isinstance(each, KernelMeasured)]
    on_gpus = {"sampling", "masks", "verification", "kv-blocks"}
    assert {each.family for each in measured} == set(FAMILIES) - {"moe"} - on_gpus
    assert all(each.ours.best > 0 and each.work.bytes > 0 for each in measured)
    skipped = {each.family: each.reason for each in found if isinstance(each, KernelSkipped)}
    assert set(skipped) == {"moe"} | on_gpus
    assert skipped["moe"] == "Qwen3ForCausalLM has none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are measured there")
@pytest.mark.parametrize("cases", [sampling, masks, verification, kv_blocks])
def test_what_is_measured_on_gpus_runs_in_the_interpreter_too(
    tmp_path: Path, cases: Callable[[KernelContext], Cases], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cases, "_HELD", 4)
    monkeypatch.setattr(device_cases, "_MOVED", (3,))
    config = read_model_config(Path(folder(tmp_path, num_hidden_layers=2)))
    device, dtype = torch.device("cpu"), torch.float32
    ops = TorchOps(device, dtype)
    for case in cases(KernelContext(config, device, dtype, ops, ops, (2,), (), 1 << 30)):
        assert case.work.bytes > 0
        for call in case.ours[:1] + case.rival[:1]:
            call()


def test_a_mixture_is_measured_where_the_model_has_one(tmp_path: Path) -> None:
    model = folder(
        tmp_path, "qwen3-moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_hidden_layers=2
    )
    *_, found, _ = measure_kernels(
        KernelsRequest(model=model, device="cpu", threads=1, rows=(3,), only=("moe",), seconds=0.5)
    )
    assert isinstance(found, KernelMeasured)
    assert isinstance(steps(model, batches=(2,), contexts=(9,), prefills=())[-2], StepMeasured)


def test_what_cannot_be_measured_is_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotMeasure, match="num_attention_heads"):
        steps(folder(tmp_path, num_attention_heads=3))
    assert main(['{"type":"steps","name":"x","shape":"nothing"}']) == 1
    assert "none of llama-3.1-8b" in capfd.readouterr().out
    assert main(["{"]) == 2
    assert main([]) == 2


def test_the_command_runs_the_measuring_process_and_prints_what_it_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, picture = folder(tmp_path), tmp_path / "plot.png"
    flags = ["--model", model, "--device", "cpu", "--threads", "1", "--seconds", "1", "--plot", str(picture)]
    assert roofline.main([*flags, "--batch", "2", "--context", "20", "--prefill", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["kind"], each["batch"], each["context"]) for each in found["steps"]] == [("decode", 2, 20)]
    assert found["steps"][0]["share"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchError, match=r"none of llama-3\.1-8b"):
        list(findings(StepsRequest(name="x", shape="nothing", device="cpu")))
