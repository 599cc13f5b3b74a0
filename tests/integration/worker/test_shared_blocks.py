"""Zamba2, whose layers share blocks of attention and an MLP, beyond what is tested of every family: its variants, what
its checkpoints hold, and what is in memory once."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.lora.slots import LoraSettings
from services.worker.models.weights import DenseMlp, LayerWeights
from services.worker.ops.interface import OpsName
from services.worker.ops.native.kernels import PackedMatrix
from shared.ids import ModelName
from tests.support.models.embedded_prompts import logits_of_rows, own_embeddings, prompt_embeds, random_rows
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(110)]
OUTPUT = 5


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.fixture(scope="module")
def zamba(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("zamba2", tmp_path_factory.mktemp("zamba2"))


def agrees(model: TinyModel, recorded: list[Tensor], **settings: Any) -> None:
    """Logits of a prompt in chunks and of what follows it are the reference's."""
    backend = tiny_backend(model.path, dtype="float32", **settings)
    sequence = assert_logits_agree(backend, model, PROMPT, OUTPUT, recorded, budget=77)
    assert sequence.output == model.greedy(PROMPT, OUTPUT)


@pytest.mark.parametrize(
    ("changes", "ops"),
    [
        ({}, "native"),
        ({}, "torch"),
        ({"num_mem_blocks": 1, "use_mem_rope": False}, "native"),
        (
            {
                "use_shared_attention_adapter": False,
                "num_key_value_heads": 2,
                "head_dim": 20,
                "num_mem_blocks": 3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                "layers_block_type": ["hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
            },
            "native",
        ),
    ],
    ids=["native", "torch", "one-block", "no-adapters-of-attention"],
)
def test_variants_are_as_the_reference_has_them(
    tmp_path: Path, recorded: list[Tensor], changes: dict[str, Any], ops: OpsName
) -> None:
    agrees(make_model("zamba2", tmp_path, **changes), recorded, ops=ops)


@pytest.mark.parametrize(("hidden", "heads"), [(160, 2), (224, 2)])
def test_heads_of_the_published_sizes_agree(tmp_path: Path, recorded: list[Tensor], hidden: int, heads: int) -> None:
    """160 elements (1.2B: 128, 2.7B: 160) and 224 (7B): Mamba's heads have 64 of them."""
    changes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden}
    mamba = {"n_mamba_heads": 2 * hidden // 64, "mamba_ngroups": 1, "initializer_range": 0.08}
    agrees(make_model("zamba2", tmp_path, **changes, **mamba), recorded, ops="native")


def test_a_block_is_in_memory_once_and_each_depth_has_a_cache(zamba: TinyModel) -> None:
    decoder = tiny_backend(zamba.path, dtype="float32", ops="native").rank.decoder
    assert isinstance(decoder, Decoder)
    first, second, again = (layer for layer in decoder.weights.layers if layer.depth is not None)
    assert matrices(first) == matrices(again)
    assert not set(matrices(first)) & set(matrices(second))
    assert first.depth is not None
    assert again.depth is not None
    assert address(first.depth.output) != address(again.depth.output)
    caches = decoder.allocate_kv(3, 2)
    of_blocks = [cache for cache, layer in zip(caches, decoder.weights.layers, strict=True) if layer.depth is not None]
    assert len({keys.data_ptr() for keys, _ in of_blocks}) == 3


def matrices(layer: LayerWeights) -> list[int]:
    assert isinstance(layer.mlp, DenseMlp)
    return [address(each) for each in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)]


def address(packed: object) -> int:
    assert isinstance(packed, PackedMatrix)
    return packed.groups.data_ptr()


def test_a_block_is_found_at_whichever_depth_the_checkpoint_has_it(
    tmp_path: Path, zamba: TinyModel, recorded: list[Tensor]
) -> None:
    """The library writes the first; the first block's layers are 1 and 4 of the checkpoint."""
    tensors = load_file(zamba.path / "model.safetensors")
    assert not any(name.startswith("model.layers.4.shared_transformer") for name in tensors)
    moved = {name.replace("layers.1.shared", "layers.4.shared"): tensor for name, tensor in tensors.items()}
    (tmp_path / "config.json").write_bytes((zamba.path / "config.json").read_bytes())
    save_file(moved, tmp_path / "model.safetensors")
    agrees(TinyModel("zamba2", tmp_path, zamba.reference), recorded)
    lacking = {name: tensor for name, tensor in moved.items() if "adapter_list.2.1" not in name}
    save_file(lacking, tmp_path / "model.safetensors")
    missing = "model.layers.4.shared_transformer.self_attn.linear_q_adapter_list.2.1.weight"
    with pytest.raises(ModelError, match=re.escape(missing)):
        tiny_backend(tmp_path)


@pytest.mark.features("prompt embeds", "states")
def test_rows_of_a_client_are_what_blocks_read_beside_the_residual(zamba: TinyModel, recorded: list[Tensor]) -> None:
    """As the library has `inputs_embeds`, in a prompt of two steps."""
    rows = random_rows(zamba.reference, 40)
    driver = Driver(tiny_backend(zamba.path, dtype="float32", ops="native", prompt_embeds=True), budget=25)
    recorded.clear()
    sequence = driver.add([0] * len(rows), OUTPUT, prompt_embeds=prompt_embeds(rows))
    driver.run()
    whole = torch.cat((rows, own_embeddings(zamba.reference, sequence.output)))
    expected = logits_of_rows(zamba.reference, whole)[len(rows) - 1 : -1]
    assert torch.cat(recorded[-OUTPUT:]).sub(expected).abs().max() < 1e-3


@pytest.mark.extras
@pytest.mark.features("LoRA", "states")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # what PEFT asks transformers
def test_an_adapter_as_peft_writes_it_is_of_each_depth_alone(zamba: TinyModel, tmp_path: Path) -> None:
    """Beside the model alone. Merged it would be that of all depths, whose weights are one."""
    peft = pytest.importorskip("peft", reason="of the extra dev")
    modules = ["q_proj", "o_proj", "gate_up_proj", "down_proj", "linear", "in_proj"]
    config = peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(zamba.reference), config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
    adapted.save_pretrained(tmp_path)
    settings = LoraSettings(((ModelName("a"), tmp_path),), 1, 8)
    backend = tiny_backend(zamba.path, dtype="float32", ops="native", loras=settings)
    driver = Driver(backend, budget=33)
    sequences = [driver.add(PROMPT[:50], OUTPUT, lora=each) for each in (backend.card.loras[0].id, None)]
    driver.run()
    for sequence, model in zip(sequences, (TinyModel("peft", tmp_path, adapted), zamba), strict=True):
        likeliest = model.logits(sequence.tokens)[49:-1].argmax(dim=1).tolist()
        assert sequence.output == likeliest
    assert sequences[0].output != sequences[1].output


def test_the_model_s_own_adapters_take_none(zamba: TinyModel, tmp_path: Path) -> None:
    write_adapter(zamba, tmp_path, modules=["q_proj"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    within = {name.replace("q_proj", "linear_q_adapter_list.0.0"): tensor for name, tensor in tensors.items()}
    save_file(within, tmp_path / "adapter_model.safetensors")
    complaint = (
        "shared_transformer.self_attn.linear_q_adapter_list.0.0 of layer 1 is no module that can have an adapter"
    )
    with pytest.raises(ModelError, match=re.escape(complaint)):
        tiny_backend(zamba.path, loras=LoraSettings(((ModelName("a"), tmp_path),), 1, 8))
