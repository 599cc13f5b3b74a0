"""Reads the `config.json` of architectures whose Python code comes with their checkpoints: as that of the Llama which
each differs from, and what it differs in. What its tensors are called is in `hf_layers.tensor_names`.

Defaults are those of the code that is published. What it computes otherwise behind a number of tokens is served up to
that number, exactly, as rotations are whose base depends on a prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from services.worker.models.config import LayerConfig, Mixture, ModelError, SkipConnections, require_positive
from services.worker.models.hf_layers.compressed import HY4
from services.worker.models.hf_layers.tensor_names import OURO
from services.worker.models.published.glm_next import GLM_NEXT, glm_next
from services.worker.models.published.hunyuan import hy4
from services.worker.models.published.jais import JAIS, jais
from services.worker.models.published.layout import Published, converted
from services.worker.models.published.llamas import (
    GRANITE_DOCLING_TEXT,
    GRANITE_SPEECH_TEXT,
    GRANITE_VISION,
    MLLAMA_TEXT,
    granite_docling,
    granite_speech,
    granite_vision,
    mllama,
)
from services.worker.models.published.minimax import MINIMAX_M3, minimax_m3
from services.worker.models.published.mistral_large import MISTRAL_LARGE_4, mistral_large
from services.worker.models.published.mistral_small import MINISTRAL_3, MISTRAL_4, ministral, mistral_small
from services.worker.models.published.mixtures import (
    all_mixing,
    bailing,
    bailing_2,
    deepseek,
    param2,
    sarvam,
    sarvam_latent,
)
from services.worker.models.published.nas import NEMOTRON_NAS, nemotron_nas
from services.worker.models.published.norms import ouro, plamo_3
from services.worker.models.published.qwen import QWEN4, qwen4

_Keys = Mapping[str, Any]


def published_config(raw: dict[str, Any], architecture: str) -> Published:
    """What `raw`, the object in a `config.json`, says of a model of `architecture`. Raises ModelError, and
    msgspec.ValidationError."""
    read = PUBLISHED[architecture](raw)
    kept = {key: raw[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in raw}
    base = {key: value for key, value in (kept | read.base).items() if key != "quantization_config"}
    return read._replace(base=base | {"architectures": [read.like]})


def _llama(raw: _Keys) -> Published:
    if raw.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv {raw['clip_qkv']} is not supported; supported: null")
    return Published(dict(raw), {})


class _RawInternLm(Struct):
    bias: bool = True
    rotary: dict[str, Any] | None = None


def _internlm(raw: _Keys) -> Published:
    """The first and the second: `bias` is of all of attention. Of the first, `rotary` may say how heads are rotated."""
    own = msgspec.convert(raw, _RawInternLm)
    rope = {} if own.rotary is None else {"rope_theta": own.rotary.get("base"), "rope_scaling": None}
    if own.rotary is not None and own.rotary.get("type") not in ("origin", "dynamic"):
        raise ModelError(f"rotary type {own.rotary.get('type')!r} is not supported; supported: origin, dynamic")
    return Published({**raw, **rope, "attention_bias": own.bias, "mlp_bias": False}, {})


class _RawInternLm3(Struct):
    qkv_bias: bool = False
    bias: bool = False


def _internlm3(raw: _Keys) -> Published:
    own = msgspec.convert(raw, _RawInternLm3)
    base = {key: value for key, value in raw.items() if key != "qkv_bias"}
    return Published(base | {"attention_bias": own.qkv_bias, "mlp_bias": own.bias}, {"output_bias": own.bias})


class _RawBaichuan(Struct):
    vocab_size: int
    max_position_embeddings: int | None = None
    model_max_length: int = 4096
    z_loss_weight: float | None = None


_BAICHUAN2_WORDS = 125_696


def _baichuan(raw: _Keys) -> Published:
    """The code of 13B, whose heads are not rotated but have ALiBi, knows no `max_position_embeddings`. The second
    release multiplies with rows of the head that have length 1."""
    own = msgspec.convert(raw, _RawBaichuan)
    base = {**raw, "max_position_embeddings": own.max_position_embeddings or own.model_max_length}
    second = own.vocab_size == _BAICHUAN2_WORDS or own.z_loss_weight is not None
    changes: dict[str, Any] = {"normed_head": second}
    if own.max_position_embeddings is None:
        changes |= {"alibi": True, "rotary_dim": 0}
    return Published(base, changes)


def _orion(raw: _Keys) -> Published:
    return Published(dict(raw), {"layer_norms": True})


class _RawSparse(Struct):
    dense_len: int = 8192


class _RawMiniCpm(Struct, kw_only=True):
    hidden_size: int
    num_hidden_layers: int
    scale_emb: float = 1.0
    scale_depth: float = 1.0
    dim_model_base: float = 1.0
    num_experts: int = 0
    num_experts_per_tok: int = 2
    intermediate_size: int
    mixer_types: list[str] | None = None
    sparse_config: _RawSparse | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True


def _minicpm(raw: _Keys) -> Published:
    """Sparse attention (InfLLM-V2) attends to everything up to `dense_len` tokens; how heads are rotated does not
    depend on that."""
    own = msgspec.convert(raw, _RawMiniCpm)
    if own.mixer_types is not None:
        raise ModelError(f"mixer_types {own.mixer_types} is not supported: all layers have to attend")
    if own.num_hidden_layers < 1 or own.dim_model_base <= 0:
        raise ModelError(
            f"num_hidden_layers {own.num_hidden_layers} and dim_model_base {own.dim_model_base} have to be positive"
        )
    longest = None if own.sparse_config is None else own.sparse_config.dense_len
    if longest is not None and longest < 2:
        raise ModelError(f"sparse_config: dense_len {longest} is not supported: without sparse attention it is above 1")
    base = {
        **raw,
        "max_position_embeddings": own.max_position_embeddings,
        "tie_word_embeddings": own.tie_word_embeddings,
    }
    changes: dict[str, Any] = {
        "embedding_scale": own.scale_emb,
        "residual_scale": own.scale_depth / math.sqrt(own.num_hidden_layers),
        "logits_divisor": own.hidden_size / own.dim_model_base,
    }
    if not own.num_experts:
        return Published(base, changes, longest)
    mixture = Mixture(
        experts=own.num_experts,
        chosen=own.num_experts_per_tok,
        intermediate_size=own.intermediate_size,
        renormalised=True,
    )
    return all_mixing(base, mixture, own.num_hidden_layers, changes)._replace(longest=longest)


class _RawChatGlm(Struct, kw_only=True):
    padded_vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    kv_channels: int = 128
    seq_length: int = 2048
    layernorm_epsilon: float = 1e-5
    rmsnorm: Literal[True] = True
    apply_residual_connection_post_layernorm: Literal[False] = False
    post_layer_norm: Literal[True] = True
    add_bias_linear: Literal[False] = False
    add_qkv_bias: bool = False
    multi_query_attention: bool = False
    multi_query_group_num: int = 1
    rope_ratio: float = 1.0
    original_rope: bool = True
    quantization_bit: Literal[0] = 0
    tie_word_embeddings: bool = False


_CHATGLM_THETA = 10_000.0


def _chatglm(raw: _Keys) -> Published:
    """Half of a head is rotated, each element with its neighbour, or (CogAgent) with one half of that part further
    on."""
    if "position_encoding_2d" in raw:
        raise ModelError("position_encoding_2d is not supported: ChatGLM-6B, the first, is of another layout")
    if raw.get("vision_config") is not None:
        raise ModelError("vision_config is not supported: only models of texts are")
    own = converted(raw, _RawChatGlm)
    base = {
        "vocab_size": own.padded_vocab_size,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.ffn_hidden_size,
        "num_hidden_layers": own.num_layers,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.multi_query_group_num if own.multi_query_attention else own.num_attention_heads,
        "head_dim": own.kv_channels,
        "max_position_embeddings": own.seq_length,
        "rms_norm_eps": own.layernorm_epsilon,
        "rope_theta": _CHATGLM_THETA * own.rope_ratio,
        "tie_word_embeddings": own.tie_word_embeddings,
    }
    if own.kv_channels % 4:
        raise ModelError(f"kv_channels {own.kv_channels}: half of it has no pairs")
    rotation = {"rotary_dim": own.kv_channels // 2, "rotary_pairs": own.original_rope}
    return Published(base, {"qkv_bias": own.add_qkv_bias, **rotation})


class _RawQwen(Struct, kw_only=True):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_channels: int = 128
    seq_length: int = 2048
    layer_norm_epsilon: float = 1e-6
    rotary_emb_base: float = 10_000.0
    rotary_pct: float = 1.0
    no_bias: Literal[True] = True
    tie_word_embeddings: bool = False


def _qwen(raw: _Keys) -> Published:
    """Its MLP has half as many columns as is said. Up to `seq_length` tokens neither NTK scaling nor logn attention
    changes anything."""
    if raw.get("visual") is not None:
        raise ModelError("visual is not supported: only models of texts are")
    own = converted(raw, _RawQwen)
    if own.rotary_pct != 1.0:
        raise ModelError(f"rotary_pct {own.rotary_pct} is not supported; supported: 1.0")
    base = {
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size // 2,
        "num_hidden_layers": own.num_hidden_layers,
        "num_attention_heads": own.num_attention_heads,
        "head_dim": own.kv_channels,
        "max_position_embeddings": own.seq_length,
        "rms_norm_eps": own.layer_norm_epsilon,
        "rope_theta": own.rotary_emb_base,
        "tie_word_embeddings": own.tie_word_embeddings,
    }
    return Published(base, {"qkv_bias": True})


class _RawTeleChat(Struct, kw_only=True):
    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    n_layer: int
    n_head: int
    num_key_value_heads: int | None = None
    layer_norm_epsilon: float = 1e-5
    base_seqlen: int = 4096
    training_seqlen: int = 8192
    embed_layernorm: Literal[False] = False
    apply_residual_connection_post_layernorm: Literal[False] = False
    tie_word_embeddings: bool = False


_TELECHAT_THETA = 10_000.0


def _telechat(raw: _Keys) -> Published:
    """Up to `training_seqlen` tokens, the base of the rotation is the one that prompts of so many have."""
    own = converted(raw, _RawTeleChat)
    require_positive(n_head=own.n_head, base_seqlen=own.base_seqlen, training_seqlen=own.training_seqlen)
    dim = own.hidden_size // own.n_head
    if dim < 4:
        raise ModelError(f"n_head {own.n_head}: heads of {dim} elements are not supported; 4 and more are")
    stretched = max(2 ** math.ceil(math.log2(own.training_seqlen / own.base_seqlen) + 1) - 1, 1)
    base = {
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.ffn_hidden_size,
        "num_hidden_layers": own.n_layer,
        "num_attention_heads": own.n_head,
        "num_key_value_heads": own.num_key_value_heads,
        "max_position_embeddings": own.training_seqlen,
        "rms_norm_eps": own.layer_norm_epsilon,
        "rope_theta": _TELECHAT_THETA * stretched ** (dim / (dim - 2)),
        "tie_word_embeddings": own.tie_word_embeddings,
    }
    return Published(base, {"output_bias": True, "down_bias": True})


_EXAONE_KEYS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def _exaone(raw: _Keys) -> Published:
    """As `transformers` reads it."""
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    return Published({**defaults, **{_EXAONE_KEYS.get(key, key): value for key, value in raw.items()}}, {})


class _RawSolar(Struct, kw_only=True):
    num_hidden_layers: int
    bskcn_1: list[int]
    bskcn_2: list[int]
    bskcn_3: list[int]
    bskcn_4: list[int]
    bskcn_tv: tuple[float, float]
    sliding_window: int | None = 2047


def _solar(raw: _Keys) -> Published:
    """Solar Pro. Of the two weights of what is kept the second is that of inference. Implementations differ in whether
    there is a window, so that prompts are served up to it."""
    own = msgspec.convert(raw, _RawSolar)
    for key in ("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4"):
        if any(not 0 <= layer < own.num_hidden_layers for layer in getattr(own, key)):
            raise ModelError(f"{key} {getattr(own, key)}: there are {own.num_hidden_layers} layers")
    if own.sliding_window is not None and own.sliding_window < 2:
        raise ModelError(f"sliding_window {own.sliding_window} is not supported; 2 and more are")
    return Published(dict(raw), {}, own.sliding_window, partial(_skipping, own))


def _skipping(own: _RawSolar, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    def skips(number: int) -> SkipConnections | None:
        kept = tuple(place for place, layers in enumerate((own.bskcn_1, own.bskcn_2)) if number in layers)
        joined = tuple(place for place, layers in enumerate((own.bskcn_3, own.bskcn_4)) if number in layers)
        return SkipConnections(kept, joined, own.bskcn_tv[1]) if kept or joined else None

    return tuple(msgspec.structs.replace(layer, skips=skips(number)) for number in range(own.num_hidden_layers))


def _mimo(raw: _Keys) -> Published:
    """A Qwen2; layers for multi-token prediction (`model.mtp_layers`) are not read."""
    base = {key: value for key, value in raw.items() if key not in ("attention_bias", "mlp_bias")}
    if raw.get("use_sliding_window"):
        raise ModelError("use_sliding_window true is not supported")
    return Published(base, {"qkv_bias": True})


def _gritlm(raw: _Keys) -> Published:
    """A Mistral, which writes; as one that embeds it sees whole prompts, which is not served."""
    return Published(dict(raw), {}, like="MistralForCausalLM")


class _RawTeleFlm(Struct, kw_only=True):
    use_mup: bool = False
    input_mult: float = 1.0
    output_mult: float = 1.0
    mup_scale_factor: float = 1.0


def _teleflm(raw: _Keys) -> Published:
    """A Llama whose embeddings and logits are scaled (arXiv:2304.06875)."""
    own = msgspec.convert(raw, _RawTeleFlm)
    if not own.use_mup:
        return Published(dict(raw), {})
    for key in ("input_mult", "output_mult", "mup_scale_factor"):
        if key not in raw or getattr(own, key) <= 0:
            raise ModelError(f"{key} {raw.get(key)} is not supported: with use_mup it is a number above 0")
    return Published(
        dict(raw), {"embedding_scale": own.input_mult, "logits_divisor": own.mup_scale_factor / own.output_mult}
    )


class _RawPangu(Struct, kw_only=True):
    bias: bool = True
    qkv_bias: bool | None = None
    rope_theta: float = 16_000_000.0
    param_sink_number: Literal[0] = 0
    interleaved_sliding_window: None = None
    sliding_window: None = None


def _pangu(raw: _Keys) -> Published:
    """openPangu Embedded: `bias` is of all of attention."""
    own = msgspec.convert(raw, _RawPangu)
    base = {key: value for key, value in raw.items() if key not in ("bias", "qkv_bias", "mlp_bias", "attention_bias")}
    theta = {} if raw.get("rope_parameters") is not None else {"rope_theta": own.rope_theta}
    qkv = own.bias if own.qkv_bias is None else own.qkv_bias
    return Published(base | theta, {"qkv_bias": qkv, "output_bias": own.bias})


PUBLISHED: dict[str, Callable[[_Keys], Published]] = {
    **dict.fromkeys(
        (
            *("AquilaModel", "AquilaForCausalLM", "LLaMAForCausalLM", "XverseForCausalLM", "YiForCausalLM"),
            *("IQuestCoderForCausalLM", "TeleChat3ForCausalLM"),
        ),
        _llama,
    ),
    **dict.fromkeys(("InternLMForCausalLM", "InternLM2ForCausalLM"), _internlm),
    "InternLM3ForCausalLM": _internlm3,
    **dict.fromkeys(("BaichuanForCausalLM", "BaiChuanForCausalLM"), _baichuan),
    "MiniCPMForCausalLM": _minicpm,
    "OrionForCausalLM": _orion,
    **dict.fromkeys(("ChatGLMModel", "ChatGLMForConditionalGeneration"), _chatglm),
    "QWenLMHeadModel": _qwen,
    **dict.fromkeys(("TeleChat2ForCausalLM", "TelechatForCausalLM"), _telechat),
    "ExaoneForCausalLM": _exaone,
    NEMOTRON_NAS: nemotron_nas,
    "MiMoForCausalLM": _mimo,
    "SolarForCausalLM": _solar,
    "BailingMoeForCausalLM": bailing,
    "BailingMoeV2ForCausalLM": bailing_2,
    "DeepseekForCausalLM": deepseek,
    "Param2MoEForCausalLM": param2,
    "SarvamMoEForCausalLM": sarvam,
    "SarvamMLAForCausalLM": sarvam_latent,
    "GritLM": _gritlm,
    "TeleFLMForCausalLM": _teleflm,
    "PanguEmbeddedForCausalLM": _pangu,
    JAIS: jais,
    OURO: ouro,
    "Plamo3ForCausalLM": plamo_3,
    GRANITE_SPEECH_TEXT: granite_speech,
    GRANITE_DOCLING_TEXT: granite_docling,
    MINIMAX_M3: minimax_m3,
    HY4: hy4,
    GLM_NEXT: glm_next,
    MISTRAL_LARGE_4: mistral_large,
    MINISTRAL_3: ministral,
    MISTRAL_4: mistral_small,
    QWEN4: qwen4,
    MLLAMA_TEXT: mllama,
    GRANITE_VISION: granite_vision,
}
"""Who reads the configuration of which architecture."""
