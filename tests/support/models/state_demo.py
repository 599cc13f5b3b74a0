"""The demo model with two Mamba-2 layers among its own: what it says is still text, and depends on their states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.paths import DEMO_MODEL

LAYERS = ("attention", "mamba", "attention", "attention", "mamba", "attention", "attention")
STRENGTH = 0.02
"""Of the projections that bring what the states say into the residual."""
HEADS, HEAD_DIM, STATE, KERNEL = 8, 64, 16, 4
INNER = HEADS * HEAD_DIM
CHANNELS = INNER + 2 * STATE


def write_state_demo(folder: Path) -> Path:
    """As a Granite 4 without experts, whose scales are all 1. Returns `folder`."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": len(LAYERS),
        "layer_types": LAYERS,
        "num_local_experts": 0,
        "shared_intermediate_size": config["intermediate_size"],
        "position_embedding_type": "rope",
        "attention_multiplier": config["head_dim"] ** -0.5,
        "mamba_n_heads": HEADS,
        "mamba_d_head": HEAD_DIM,
        "mamba_d_state": STATE,
        "mamba_n_groups": 1,
        "mamba_d_conv": KERNEL,
        "mamba_expand": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(config: dict[str, Any]) -> dict[str, Tensor]:
    demo = load_file(DEMO_MODEL / "model.safetensors")
    weights = {name: tensor for name, tensor in demo.items() if not name.startswith("model.layers.")}
    attending, generator = 0, torch.Generator().manual_seed(0)
    for number, kind in enumerate(LAYERS):
        name = f"model.layers.{number}"
        if kind == "mamba":
            own = _mamba_layer(config["hidden_size"], config["intermediate_size"], generator)
        else:
            own = _attention_layer(demo, f"model.layers.{attending}.")
            attending += 1
        weights |= {f"{name}.{part}": tensor.to(torch.bfloat16).contiguous() for part, tensor in own.items()}
    return weights


def _attention_layer(demo: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    own = {each.removeprefix(name): tensor for each, tensor in demo.items() if each.startswith(name)}
    gate, up = own.pop("mlp.gate_proj.weight"), own.pop("mlp.up_proj.weight")
    down = own.pop("mlp.down_proj.weight")
    return own | {"shared_mlp.input_linear.weight": torch.cat((gate, up)), "shared_mlp.output_linear.weight": down}


def _mamba_layer(hidden: int, mlp: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Its MLP adds nothing."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
        "mamba.in_proj.weight": drawn(INNER + CHANNELS + HEADS, hidden) * 0.1,
        "mamba.conv1d.weight": drawn(CHANNELS, 1, KERNEL) * 0.5,
        "mamba.conv1d.bias": drawn(CHANNELS) * 0.1,
        "mamba.A_log": torch.linspace(-5, 0, HEADS),
        "mamba.D": torch.ones(HEADS),
        "mamba.dt_bias": torch.zeros(HEADS),
        "mamba.norm.weight": torch.ones(INNER),
        "mamba.out_proj.weight": drawn(hidden, INNER) * STRENGTH,
        "shared_mlp.input_linear.weight": torch.zeros(2 * mlp, hidden),
        "shared_mlp.output_linear.weight": torch.zeros(hidden, mlp),
    }
