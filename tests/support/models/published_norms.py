"""Tiny checkpoints in published layouts whose layers norm what they give: a Llama whose layers get such norms and are
gone through several times (Ouro), and a Gemma 3 (PLaMo 3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.support.models.published_shapes import DIM, HIDDEN, QKV, Layout, plain

LOOPS = 3
WINDOW = 24


def _post_norms(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm_2 = nn.RMSNorm(HIDDEN, eps=1e-5)
        layer.post_attention_layernorm_2 = nn.RMSNorm(HIDDEN, eps=1e-5)


def _looping(model: Any) -> None:
    """As the published code has it: all layers and the norm behind them, several times."""
    model.config.use_cache = False

    def behind(norm: Any) -> Any:
        def hook(_module: Any, _given: Any, made: Any) -> Any:
            return (norm(made[0]), *made[1:]) if isinstance(made, tuple) else norm(made)

        return hook

    layers = list(model.model.layers)
    for layer in layers:
        layer.self_attn.register_forward_hook(behind(layer.input_layernorm_2))
        layer.mlp.register_forward_hook(behind(layer.post_attention_layernorm_2))
    passed = [0]

    def begin(_layer: Any, given: tuple[Tensor, ...], named: dict[str, Any]) -> Any:
        rows = given[0] if passed[0] % LOOPS == 0 else model.model.norm(given[0])
        passed[0] += 1
        return (rows, *given[1:]), named

    layers[0].register_forward_pre_hook(begin, with_kwargs=True)
    model.model.layers = _Loops(layers)


class _Loops(nn.ModuleList):
    """Layers that are gone through again and again where all are asked for."""

    def __getitem__(self, at: Any) -> Any:
        return list(self) * LOOPS if isinstance(at, slice) else super().__getitem__(at)


def _norms_of_plamo(model: Any) -> None:
    """Weights are the difference from other numbers than 1; embeddings are not scaled."""
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data += 1 / 5 - 1
        layer.post_feedforward_layernorm.weight.data += 1 / 5**1.5 - 1
    model.model.embed_tokens.embed_scale.fill_(1.0)


_PLAMO_NAMES = (
    ("model.layers", "model.layers.layers"),
    ("input_layernorm", "pre_mixer_norm"),
    ("post_attention_layernorm", "post_mixer_norm"),
    ("pre_feedforward_layernorm", "pre_mlp_norm"),
    ("post_feedforward_layernorm", "post_mlp_norm"),
    ("self_attn", "mixer"),
)
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

NORMED: dict[str, Layout] = {
    "OuroForCausalLM": Layout(
        plain(total_ut_steps=LOOPS, early_exit_threshold=1.0, layer_types=["full_attention"] * 3),
        adapt=_looping,
        extend=_post_norms,
    ),
    "Plamo3ForCausalLM": Layout(
        {
            **{key: value for key, value in plain().items() if key != "hidden_act"},
            "head_dim": DIM,
            "window_size": WINDOW,
            "sliding_window_pattern": 2,
            "rope_theta": 100_000.0,
            "rope_local_theta": 10_000.0,
            "scale_embedding": False,
        },
        _PLAMO_NAMES,
        {"mixer.qkv_proj": (QKV, 1), "mlp.gate_up_proj": (("mlp.gate_proj", "mlp.up_proj"), 1)},
        reference="Gemma3TextConfig",
        shape={
            "layer_types": _KINDS,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": DIM,
            "hidden_activation": "silu",
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        adapt=_norms_of_plamo,
    ),
}
