"""Weights that are made up: functions of name and place, of a size that a model can bear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.worker.models.config import ModelError
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.hf_config import read_model_config
from services.worker.models.loading import load_weights
from services.worker.models.sharding import shard_of
from services.worker.models.weights import DenseMlp
from services.worker.ops.torch_ops import TorchOps
from tests.support.models.tiny_models import make_config
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

CPU = torch.device("cpu")


def tensors(**different: object) -> DummyTensors:
    return DummyTensors(torch.float32, CPU, **different)


def test_any_part_is_that_of_the_whole() -> None:
    whole = tensors().read("a.weight", (300, 1100))
    assert torch.equal(tensors().read("a.weight", (300, 1100), rows=(100, 250)), whole[100:250])
    assert torch.equal(tensors().read("a.weight", (300, 1100), columns=(7, 900)), whole[:, 7:900])
    experts = tensors().read("e.weight", (4, 30, 50))
    assert torch.equal(tensors().read("e.weight", (4, 30, 50), rows=(1, 3)), experts[1:3])
    assert torch.equal(tensors().read("e.weight", (4, 30, 50), columns=(10, 20)), experts[:, 10:20])


def test_an_element_is_the_same_on_every_machine_and_in_every_version() -> None:
    made = tensors().read("a.weight", (3, 4))
    expected = [
        [0.014198755845, -0.617431759834, 0.458664208651, 0.263351589441],
        [-0.364236980677, -0.141178712249, -0.496531963348, -0.582010269165],
        [0.097782365978, 0.344564646482, -0.719586312771, 0.737337410450],
    ]
    torch.testing.assert_close(made, torch.tensor(expected), rtol=1e-6, atol=0)


def test_a_product_with_normed_rows_has_variance_one() -> None:
    weight = tensors().read("a.weight", (500, 700))
    product = torch.randn(200, 700, generator=torch.Generator().manual_seed(1)) @ weight.T
    assert product.var().item() == pytest.approx(1.0, rel=0.03)
    assert product.mean().item() == pytest.approx(0.0, abs=0.02)


def test_rows_columns_tensors_and_seeds_have_nothing_to_do_with_each_other() -> None:
    one, other = tensors().read("a.weight", (256, 256)), tensors().read("b.weight", (256, 256))
    seeded = tensors(seed=1).read("a.weight", (256, 256))
    noise = 6 / 256
    for against in (other, seeded, one.T.contiguous()):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), against.flatten())))[0, 1]) < noise
    for lines in (one, one.T, torch.cat((one, other))):
        correlation = torch.corrcoef(lines) - torch.eye(len(lines))
        assert correlation.abs().max() < 6 / 256**0.5
    values = torch.linalg.svdvals(one)
    assert values[0] == pytest.approx(2.0, rel=0.05), "as of a matrix of independent elements (Marchenko, Pastur)"


def test_norms_change_nothing_and_biases_little() -> None:
    name = "model.layers.0.input_layernorm.weight"
    assert tensors().read(name, (5,)).tolist() == [1.0] * 5
    assert tensors(norm_offset=True).read(name, (5,)).tolist() == [0.0] * 5
    assert tensors().read("model.layers.0.self_attn.q_norm.weight", (5,)).tolist() == [1.0] * 5
    bias = tensors().read("model.layers.0.self_attn.q_proj.bias", (500,))
    assert 0 < bias.abs().max() <= 0.01


def folder(path: Path, family: str = "llama", **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    config = make_config(family, num_hidden_layers=24, **changes)
    architecture = type(config).__name__.replace("Config", "ForCausalLM")
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [architecture]}))
    return path


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_deep_model_of_such_weights_neither_overflows_nor_falls_silent(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiny_backend(folder(tmp_path / family, family), load_format="dummy", dtype="float16")
    record = record_logits(monkeypatch)
    driver = Driver(backend)
    for prompt in ([1, 2, 3], [4, 5, 6, 7]):
        driver.add(prompt, 4)
    driver.run()
    logits = torch.cat(record).float()
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 3.0
    assert abs(torch.corrcoef(logits[:2])[0, 1]) < 0.9, "they depend on the prompt"


def test_the_ranks_of_an_engine_have_shares_of_one_model(tmp_path: Path) -> None:
    config = read_model_config(folder(tmp_path / "m"))
    ops = TorchOps(CPU, torch.float32)

    def gate_up(rank: int, ranks: int) -> torch.Tensor:
        weights = load_weights(tensors(), config, shard_of(config, rank, ranks), ops, CPU, 64)
        inputs = torch.eye(config.hidden_size)
        mlp = weights.layers[3].mlp
        assert isinstance(mlp, DenseMlp)
        return ops.linear(inputs, mlp.gate_up)

    whole = torch.stack(gate_up(0, 1).chunk(2, dim=1))
    parts = [torch.stack(gate_up(rank, 2).chunk(2, dim=1)) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=2), whole)


def test_without_a_checkpoint_the_error_says_how_to_do_without(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="load_format dummy"):
        tiny_backend(folder(tmp_path / "m"))
