"""Drafters of tiny models, in the layouts of published checkpoints: random ones, and ones that foresee something."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.models.tiny_models import TinyModel, make_model


def medusa_tensors(model: TinyModel, heads: int = 3, *, layers: int = 1, noise: float = 0.3) -> dict[str, Tensor]:
    """By Medusa's own names; each head is the model's, disturbed."""
    torch.manual_seed(5)
    hidden = model.reference.config.hidden_size
    words = model.reference.lm_head.weight.detach()
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden) * noise / hidden**0.5
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden) * noise
        tensors[f"{head}.{layers}.weight"] = words + torch.randn_like(words) * noise * words.std()
    return tensors


def by_vllms_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in the layout of vLLM's converted Medusa checkpoints."""
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        renamed[f"blocks.{head}.layers.{layer}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"] = (
            tensor
        )
    return renamed


def make_medusa(model: TinyModel, folder: Path, *, heads: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(medusa_tensors(model, heads), folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": 1}))
    return folder


def eagle_tensors(model: TinyModel) -> dict[str, Tensor]:
    """By EAGLE's own names: the layer is the model's last one, the features pass through to it disturbed."""
    torch.manual_seed(6)
    hidden = model.reference.config.hidden_size
    state = model.reference.state_dict()
    last = f"model.layers.{model.reference.config.num_hidden_layers - 1}."
    tensors = {
        f"layers.0.{name.removeprefix(last)}": tensor.clone()
        for name, tensor in state.items()
        if name.startswith(last) and "input_layernorm" not in name
    }
    tensors["fc.weight"] = (
        torch.cat((torch.eye(hidden), torch.eye(hidden)), dim=1) + torch.randn(hidden, 2 * hidden) * 0.1
    )
    return tensors


def make_eagle(model: TinyModel, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(eagle_tensors(model), folder / "model.safetensors")
    own = json.loads((model.path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"num_hidden_layers": 1, "architectures": ["EagleModel"]}))
    return folder


WORDS = 61
"""Of an EAGLE-3 head: a part of the model's vocabulary."""


def eagle3_tensors(model: TinyModel, words: int = WORDS) -> dict[str, Tensor]:
    """By SafeAILab's names, random; of every other token, and those behind them."""
    torch.manual_seed(7)
    config = model.reference.config
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    heads, inner, vocabulary = config.num_attention_heads * config.head_dim, config.intermediate_size, config.vocab_size

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape) / shape[-1] ** 0.5

    drafted = torch.tensor(sorted(range(1, vocabulary, 2)) + list(range(0, vocabulary, 2)))[:words].sort().values
    return {
        "d2t": drafted - torch.arange(words),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, drafted, True),
        "fc.weight": random(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": 1 + 0.1 * torch.randn(hidden),
        "midlayer.hidden_norm.weight": 1 + 0.1 * torch.randn(hidden),
        "midlayer.self_attn.q_proj.weight": random(heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, heads),
        "midlayer.post_attention_layernorm.weight": 1 + 0.1 * torch.randn(hidden),
        "midlayer.mlp.gate_proj.weight": random(inner, hidden),
        "midlayer.mlp.up_proj.weight": random(inner, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, inner),
        "norm.weight": 1 + 0.1 * torch.randn(hidden),
        "lm_head.weight": 2 * torch.randn(words, hidden),
    }


def eagle3_config(model: TinyModel, words: int = WORDS) -> dict[str, object]:
    """Of a head that reads what goes into the second layer and comes out of it and of the last."""
    own = json.loads((model.path / "config.json").read_text())
    layers = int(own["num_hidden_layers"])
    return own | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": words,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, layers - 1], "use_aux_hidden_state": True},
    }


def make_eagle3(model: TinyModel, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(eagle3_tensors(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(eagle3_config(model)))
    return folder


def make_draft(model: TinyModel, folder: Path) -> Path:
    """A smaller model of the same family and vocabulary."""
    words = model.reference.config.vocab_size
    make_model(model.family, folder, vocab_size=words, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2)
    return folder
