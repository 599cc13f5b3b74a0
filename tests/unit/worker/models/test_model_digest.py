"""A model's digest: the same for the same model however it lies on disk, another for every other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.models.checkpoint import model_digest
from services.worker.models.config import ModelError
from services.worker.models.hf_config import read_model_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(64, 64, generator=generator) for name in ("a.weight", "b.weight")} | {"n": torch.ones(3)}


def written(folder: Path, files: dict[str, dict[str, Tensor]], **changes: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    for name, part in files.items():
        save_file(part, folder / name)
    if "model.safetensors" not in files:
        index = {"weight_map": {tensor: name for name, part in files.items() for tensor in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return model_digest(folder, read_model_config(folder))


@pytest.fixture
def plain(tmp_path: Path) -> str:
    return written(tmp_path / "plain", {"model.safetensors": tensors()})


def test_a_model_cut_into_files_is_the_same(tmp_path: Path, plain: str) -> None:
    whole = tensors()
    files = {"x.safetensors": {"b.weight": whole.pop("b.weight")}, "y.safetensors": whole}
    assert written(tmp_path / "cut", files) == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["b.weight"][0, 0].add_(1e-3),
        lambda t: t["b.weight"][-1, -1].add_(1e-3),
        lambda t: t["n"].mul_(2),
        lambda t: t.update({"a.weight": t["a.weight"].bfloat16()}),
        lambda t: t.update({"a.weight": t["a.weight"].view(32, 128)}),
        lambda t: t.update({"c.weight": t.pop("b.weight")}),
        lambda t: t.update({"c.weight": torch.zeros(2)}),
    ],
    ids=["first element", "last element", "small tensor", "dtype", "shape", "name", "one more"],
)
def test_other_weights_are_another_model(tmp_path: Path, plain: str, change) -> None:  # type: ignore[no-untyped-def]
    changed = tensors()
    change(changed)
    assert written(tmp_path / "other", {"model.safetensors": changed}) != plain


def test_another_configuration_is_another_model(tmp_path: Path, plain: str) -> None:
    same = {"model.safetensors": tensors()}
    assert written(tmp_path / "rope", same, rope_theta=20000.0) != plain
    assert written(tmp_path / "eps", same, rms_norm_eps=1e-5) != plain
    assert written(tmp_path / "eos", same, eos_token_id=2) == plain, "keys and values do not depend on it"


def test_a_broken_file_is_named(tmp_path: Path, plain: str) -> None:
    folder = tmp_path / "plain"
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        model_digest(folder, read_model_config(folder))
