"""gpt-oss with its experts in blocks of four bits (MXFP4), against `transformers` with the numbers they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from services.worker.models.config import ModelError
from services.worker.models.loaded_model import ModelImpl
from tests.support.models.mxfp4 import mxfp4_model, pack_blocks
from tests.support.models.tiny_models import VOCABULARY, TinyModel
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(40)]
OUTPUT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return mxfp4_model(tmp_path_factory.mktemp("mxfp4"))


def test_blocks_stand_for_what_transformers_makes_of_them() -> None:
    weight = torch.randn(3, 10, 96, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[0, 0, :32] = 0
    blocks, scales, numbers = pack_blocks(weight)
    made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # the other way round: [.., in, out]
    torch.testing.assert_close(made.transpose(1, 2), numbers, rtol=0, atol=0)
    assert (numbers - weight).abs().max() < weight.abs().max() / 5


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_greedy_text_and_logits_are_those_of_the_numbers(
    impl: ModelImpl, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Natively they stay codes, of eight bits."""
    recorded = record_logits(monkeypatch)
    driver = Driver(tiny_backend(model.path, ops="native", dtype="float32", model_impl=impl))
    recorded.clear()  # what it tried when it was started
    sequence = driver.add(PROMPT, OUTPUT)
    driver.run()
    expected = model.logits(sequence.tokens)[len(PROMPT) - 1 : -1]
    assert (torch.cat(recorded[:OUTPUT]) - expected).abs().max() < 1e-3
    library = AutoModelForCausalLM.from_pretrained(
        model.path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    library.generation_config.eos_token_id = None
    text = library.generate(torch.tensor([PROMPT]), max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0)[0]
    assert sequence.tokens == text.tolist()


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_what_is_missing_or_asked_for_besides_is_named(impl: ModelImpl, model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="quantization int8: the checkpoint is quantised already, by mxfp4"):
        tiny_backend(model.path, quantization="int8", model_impl=impl)
    tensors = load_file(model.path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model.path / "config.json").read_text())
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        tiny_backend(tmp_path, model_impl=impl)
    whole = (model.path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        tiny_backend(tmp_path, model_impl=impl)
