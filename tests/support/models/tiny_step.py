"""A tiny Step-3.5 as it is published, and what `transformers` makes of its numbers: the language model of its Step-3.7,
beside a tower that nobody asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, Step3p7Config

from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel

KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "auto_map": {"AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"},
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": len(KINDS),
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 24,
    "layer_types": [*KINDS, "sliding_attention"],
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "att_impl_type": "GQA",
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
    "sink": False,
    "use_rope_layers": [],
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 64,
    },
    "yarn_only_types": ["full_attention"],
    "swiglu_limits": [0.0, 0.0, 0.0, 1.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 2.0, 2.0, 0.0],
    "num_nextn_predict_layers": 1,
}
"""Its last layer is one for multi-token prediction."""


def make_step(folder: Path, **config: Any) -> TinyModel:
    """Writes the checkpoint to `folder`, the same weights every time. `config`: other keys of its `config.json`."""
    torch.manual_seed(35)
    text = {key: value for key, value in CONFIG.items() if key not in ("architectures", "auto_map")}
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    described = Step3p7Config(text_config=text | {"initializer_range": 0.2}, vision_config=tower)
    model = AutoModelForImageTextToText.from_config(described, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, each in [*model.named_parameters(), *model.named_buffers()]:
            if each.ndim == 1 and ("norm" in name or "bias" in name):
                each.add_(torch.randn_like(each) * 0.2)
    model.generation_config.eos_token_id = None
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        if "vision" not in name and "projector" not in name:
            tensors |= _published(name.replace("language_model.", ""), tensor)
    tensors |= {"model.layers.4.enorm.weight": torch.ones(64)}
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return TinyModel("step3p5", folder, model)


def _published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    for old, new in (
        (".mlp.gate.weight", ".moe.gate.weight"),
        (".mlp.gate.e_score_correction_bias", ".moe.router_bias"),
        (".mlp.experts.down_proj", ".moe.down_proj.weight"),
        (".mlp.shared_experts.", ".share_expert."),
    ):
        name = name.replace(old, new)
    if not name.endswith(".mlp.experts.gate_up_proj"):
        return {name: tensor}
    gates, ups = tensor.chunk(2, dim=1)
    block = name.removesuffix("mlp.experts.gate_up_proj")
    return {f"{block}moe.gate_proj.weight": gates, f"{block}moe.up_proj.weight": ups}
