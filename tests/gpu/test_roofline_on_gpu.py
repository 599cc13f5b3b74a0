"""The measurements on a real GPU, small: that they run, and that made-up weights are the CPU's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.worker.measure.roofline import ceilings
from services.worker.measure.roofline.kernels import FAMILIES, measure_kernels
from services.worker.measure.roofline.steps import measure_steps
from services.worker.measure.roofline.wire import (
    Ceilings,
    KernelMeasured,
    KernelSkipped,
    KernelsRequest,
    ModelReady,
    StepMeasured,
    StepsRequest,
)
from services.worker.models.dummy_weights import DummyTensors
from tests.support.models.tiny_models import make_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_COPIED_BYTES", {"cuda": 1 << 26})
    monkeypatch.setattr(ceilings, "_SQUARES", {"cuda": (512,)})


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = make_config("qwen3", head_dim=64, hidden_size=128).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    return str(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_made_up_weights_are_the_same_on_both_devices(dtype: torch.dtype) -> None:
    for shape in ((300, 1100), (3, 40, 70), (500,)):
        on_gpu = DummyTensors(dtype, torch.device("cuda")).read("a.weight", shape)
        assert torch.equal(on_gpu.cpu(), DummyTensors(dtype, torch.device("cpu")).read("a.weight", shape))


def test_steps_are_measured_with_captured_decodes(model: str) -> None:
    _, limits, ready, *found, _ = measure_steps(
        StepsRequest(
            name="tiny",
            model=model,
            device="cuda",
            dtype="bfloat16",
            seconds=20.0,
            batches=(1, 5),
            contexts=(40, 200),
            prefills=(100,),
        )
    )
    assert isinstance(limits, Ceilings)
    assert set(limits.memory_rates) == {"copy"}
    assert isinstance(ready, ModelReady)
    assert ready.eager is None
    assert len(found) == 5
    for step in found:
        assert isinstance(step, StepMeasured)
        assert step.forward.best > 0
        assert step.whole is not None
        assert step.whole.best > 0


def test_every_family_of_kernels_is_measured(model: str) -> None:
    _, _, *found, _ = measure_kernels(
        KernelsRequest(model=model, device="cuda", dtype="bfloat16", rows=(1, 3), contexts=(48,), seconds=30.0)
    )
    assert {each.family for each in found if isinstance(each, KernelMeasured)} == set(FAMILIES) - {"moe"}
    assert {each.family for each in found if isinstance(each, KernelSkipped)} == {"moe"}
