"""Tiny checkpoints in published layouts with scales of embeddings and logits: Tele-FLM, which is a Granite then, and
Jais: a StableLM that has biases everywhere, ALiBi and no rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.support.models.published_shapes import ALL_HEADS, COLUMNS, DIM, HEADS, HIDDEN, LAYERS, QKV, Layout, plain
from tests.support.models.tiny_models import POSITIONS, VOCABULARY

_EMBEDDINGS, _WIDTH, _ALPHA = 2.5, 0.5, 1.5


def _biases(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj = nn.Linear(HIDDEN, HIDDEN)
        layer.mlp.gate_proj, layer.mlp.up_proj = nn.Linear(HIDDEN, COLUMNS), nn.Linear(HIDDEN, COLUMNS)
        layer.mlp.down_proj = nn.Linear(COLUMNS, HIDDEN)


def _scales(model: Any) -> None:
    model.model.rotary_emb.inv_freq.zero_()
    for layer in model.model.layers:
        layer.self_attn.scaling = 1 / DIM

    def times(factor: float) -> Any:
        def hook(_module: Any, _given: Any, made: Tensor) -> Tensor:
            return made * factor

        return hook

    model.model.embed_tokens.register_forward_hook(times(_EMBEDDINGS))
    model.lm_head.register_forward_hook(times(_WIDTH * _ALPHA))


_JAIS_NAMES = (
    ("model.embed_tokens", "transformer.wte"),
    ("model.layers", "transformer.h"),
    ("model.norm", "transformer.ln_f"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn.o_proj", "attn.c_proj"),
    ("self_attn", "attn"),
    ("mlp.gate_proj", "mlp.c_fc2"),
    ("mlp.up_proj", "mlp.c_fc"),
    ("mlp.down_proj", "mlp.c_proj"),
)

SCALED: dict[str, Layout] = {
    "TeleFLMForCausalLM": Layout(
        plain(use_mup=True, input_mult=3.0, output_mult=0.5, mup_scale_factor=2.0),
        reference="GraniteConfig",
        shape={
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 4.0,
            "attention_multiplier": DIM**-0.5,
            "initializer_range": 0.3,
        },
    ),
    "JAISLMHeadModel": Layout(
        {
            "vocab_size": VOCABULARY,
            "n_positions": POSITIONS,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_inner": COLUMNS,
            "activation_function": "swiglu",
            "layer_norm_epsilon": 1e-5,
            "position_embedding_type": "alibi",
            "reorder_and_upcast_attn": False,
            "mup_width_scale": _WIDTH,
            "mup_embeddings_scale": _EMBEDDINGS,
            "mup_output_alpha": _ALPHA,
            "mup_scale_qk_dot_by_d": True,
            "alibi_scaling": None,
        },
        _JAIS_NAMES,
        {"attn.c_attn": (QKV, 1)},
        reference="StableLmConfig",
        shape={
            **ALL_HEADS,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "use_qkv_bias": True,
            "tie_word_embeddings": True,
        },
        adapt=_scales,
        extend=_biases,
        alibi=True,
        dropped=("lm_head.weight",),
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight", "c_fc2.weight"),
    ),
}
