"""A tiny Nemotron-NAS checkpoint with a block of every kind, and what `transformers` makes of its numbers: a Llama
whose blocks are changed as the published modeling code has them (`no_op`, `replace_with_linear`)."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel

HIDDEN, HEADS, DIM = 64, 4, 16
_LINEAR, _NOTHING = {"replace_with_linear": True}, {"no_op": True}
BLOCKS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"n_heads_in_group": 2}, {"intermediate_size": 128}),
    (_NOTHING, {"ffn_mult": 2.0}),
    (_LINEAR, {"intermediate_size": 96}),
    ({"n_heads_in_group": 1}, _NOTHING),
    ({"n_heads_in_group": 4}, _LINEAR),
    (_LINEAR, _LINEAR),
    (_NOTHING, _NOTHING),
    ({"n_heads_in_group": 2}, {"intermediate_size": 64}),
    (_NOTHING, {"intermediate_size": 96}),
)
"""Attention and MLP of each."""
_BY_FACTOR = 256
"""Columns of `ffn_mult` 2.0: two thirds of 128, rounded up."""
_WHERE_NONE = {"no_op": False, "replace_with_linear": False, "sparsify": None}
_OF_ATTENTION = {"n_heads_in_group": None, "num_sink_tokens": None, "window_length": None, "unshifted_sink": False}

CONFIG: dict[str, Any] = {
    "model_type": "nemotron-nas",
    "architectures": ["DeciLMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"},
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": None,
    "num_hidden_layers": len(BLOCKS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": None,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "block_configs": [
        {"attention": {**_WHERE_NONE, **_OF_ATTENTION, **attention}, "ffn": {**_WHERE_NONE, "ffn_mult": None, **ffn}}
        for attention, ffn in BLOCKS
    ],
}


class LinearAttention(nn.Module):
    """As the published code calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.linear_attn(hidden_states), None


class NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class LinearMlp(nn.Module):
    """As the published code calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_mlp = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_mlp(x)


class NoMlp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class NasModel(TinyModel):
    """The reference keeps nothing between steps: the library's cache does not know blocks without attention."""

    def _generated(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def make_nas(folder: Path, **config: Any) -> NasModel:
    """Writes the checkpoint to `folder`, the same weights every time. `config`: other keys of its `config.json`."""
    model = nas_reference()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(drawn if weight.ndim > 1 else 1 + drawn)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return NasModel("nemotron-nas", folder, model)


def nas_reference() -> Any:
    """The Llama with its blocks changed."""
    named = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    kept = {key: CONFIG[key] for key in (*named, "rms_norm_eps", "tie_word_embeddings")}
    rope = {**CONFIG["rope_scaling"], "rope_theta": CONFIG["rope_theta"]}
    config = LlamaConfig(**kept, intermediate_size=16, rope_parameters=rope, pad_token_id=0)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    for number, (layer, (attention, ffn)) in enumerate(zip(model.model.layers, BLOCKS, strict=True)):
        own = deepcopy(config)
        if (group := attention.get("n_heads_in_group")) is not None:
            own.num_key_value_heads = HEADS // group
            layer.self_attn = LlamaAttention(own, number)
        else:
            layer.self_attn = NoAttention() if attention is _NOTHING else LinearAttention()
        layer.input_layernorm = nn.Identity() if attention is _NOTHING else layer.input_layernorm
        if ffn is _NOTHING:
            layer.mlp, layer.post_attention_layernorm = NoMlp(), nn.Identity()
        elif ffn is _LINEAR:
            layer.mlp = LinearMlp()
        else:
            own.intermediate_size = ffn.get("intermediate_size", _BY_FACTOR)
            layer.mlp = LlamaMLP(own)
    return model.eval()
