"""What configs say of Nemotron-H, as NVIDIA's on the Hub have it and as transformers 5 does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.models.config import MambaConfig, Mixture, ModelConfig, ModelError
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.loaded_model import LoadSettings
from services.worker.models.model_loader import load_model
from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.interface import MemoryReading
from tests.support.models.config_files import active_parameters

NANO_9B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "conv_kernel": 4,
    "eos_token_id": 12,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 80,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "max_position_embeddings": 131072,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}
NANO_30B_A3B: dict[str, Any] = {
    **NANO_9B,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}


def read(folder: Path, base: dict[str, Any], *, quantized: bool = False, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    return read_model_config(folder, quantized=quantized)


def test_nano_of_9_billion_is_read(tmp_path: Path) -> None:
    """27 Mamba-2 layers, four that attend, and 25 MLPs, each a part of the layer before it."""
    config = read(tmp_path, NANO_9B)
    assert is_native(tmp_path)
    assert config.states == MambaConfig(
        heads=128, head_dim=80, groups=8, state_dim=128, kernel=4, conv_bias=True, bias=False
    )
    states, mlps = sum(each.has_state for each in config.layers), sum(each.has_mlp for each in config.layers)
    assert (config.num_layers, states, mlps) == (31, 27, 25)
    assert [each.blocks for each in config.layers[2:5]] == [(4, 5), (6, 6), (7, 8)]
    found = [config.layers_of_block(block) for block in (4, 5, 6, 7, 8, 55, 56)]
    assert found == [(2,), (2,), (3,), (4,), (4,), (30,), ()]
    assert (config.rotated_dim, config.eos_token_ids, config.activation) == (0, (12,), "relu2")
    assert round(config.parameters / 1e9, 1) == 8.9
    listed = {"*": "full_attention", "M": "linear_attention", "-": "mlp"}
    pattern = NANO_9B["hybrid_override_pattern"]
    newer = {
        key: value for key, value in NANO_9B.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")
    }
    assert read(tmp_path, newer, layers_block_type=[listed[letter] for letter in pattern]) == config


def test_memory_for_a_quantised_checkpoint_is_that_of_all_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 56 that it counts, of which we make 31."""
    codes = {"quant_method": "gptq", "bits": 4}
    read(tmp_path, NANO_9B, quantization_config=codes, quantized=True)
    size = 64 << 20
    header = json.dumps(
        {
            f"backbone.layers.{layer}.mixer.in_proj.qweight": {
                "dtype": "I8",
                "shape": [size],
                "data_offsets": [layer * size, (layer + 1) * size],
            }
            for layer in range(56)
        }
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 56 * size)  # nothing is stored of what nobody reads
    monkeypatch.setattr(CpuPlatform, "memory", lambda _: MemoryReading(free=3 << 30))
    with pytest.raises(ModelError, match=r"the weights take 3\.50 GiB"):
        load_model(LoadSettings(folder=tmp_path, platform=CpuPlatform(0)))


def test_nano_with_experts_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, NANO_30B_A3B)
    assert config.mixture == Mixture(
        experts=128,
        chosen=6,
        intermediate_size=1856,
        renormalised=True,
        shared_size=3712,
        shared_gated=False,
        scoring="sigmoid",
        corrected=True,
        exact_router=True,
        scale=2.5,
        gated=False,
    )
    assert sum(layer.mixes for layer in config.layers) == 23
    assert round(config.parameters / 1e9, 1) == 31.6
    assert round(active_parameters(config) / 1e9, 1) == 3.2


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (
            NANO_9B,
            {"hybrid_override_pattern": "M--"},
            "layers_block_type: layer 2, mlp, stands behind mlp, not behind a",
        ),
        (NANO_9B, {"hybrid_override_pattern": "-M"}, "layers_block_type: layer 0, mlp, stands behind nothing, not"),
        (
            NANO_9B,
            {"hybrid_override_pattern": "M?"},
            "layers_block_type '?' is not supported; supported: mamba, attention",
        ),
        (NANO_9B, {"hybrid_override_pattern": None}, "layers_block_type and hybrid_override_pattern are missing"),
        (NANO_9B, {"hybrid_override_pattern": "*-"}, "layers_block_type: no layer is mamba"),
        (NANO_9B, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; supported: relu2"),
        (NANO_9B, {"n_groups": 7}, "n_groups 7: 128 heads do not divide by it"),
        (NANO_30B_A3B, {"moe_latent_size": 1024}, "moe_latent_size 1024 is not supported"),
        (NANO_30B_A3B, {"n_group": 3}, "n_group 3: 128 experts are not so many groups of two and more"),
        (NANO_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok 129: there are 128 experts in 1 groups"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError) as error:
        read(tmp_path, base, **changes)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {complaint}")
