"""What configurations say of the language model within a model that takes images, but Qwen's. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from shared.models.image_models import GEMMA, KIMI_K2_5, LFM2_VL, LLAVA_ONEVISION, MISTRAL3

LANGUAGE_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The language models that are read in LLaVA, LLaVA-NeXT and those that have tiles, by `model_type`."""
_OWN_MODELS = {
    GEMMA: {"gemma3_text": "Gemma3ForCausalLM"},
    MISTRAL3: {"mistral": "MistralForCausalLM"},
    LLAVA_ONEVISION: {"qwen2": "Qwen2ForCausalLM"},
    **{each: {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"} for each in KIMI_K2_5},
    LFM2_VL: {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"},
}
"""Those of others, by the architecture of the whole."""

_TIED, _TIED_LFM2 = "tie_word_embeddings", "tie_embedding"
_TIED_BY_DEFAULT = (GEMMA, MISTRAL3, "InternVLForConditionalGeneration", *KIMI_K2_5, LFM2_VL)
"""Those whose head is the embedding where nothing is said of the whole."""

LANGUAGE_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
}
"""What `transformers` takes where nothing is said, as in the files of LLaVA 1.5 and Gemma 3, which leave some
or most sizes out."""


class _RawLlava(Struct):
    text_config: dict[str, Any]
    tie_word_embeddings: bool | None = None
    tie_embedding: bool | None = None
    """Another name of it, of LFM2-VL, which comes first."""
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None


def language_model(text: bytes, architecture: str, has_head: Callable[[], bool | None] = lambda: None) -> bytes:
    """The configuration of the language model within `text`, the `config.json` of one of these, as if that were
    all. `has_head`: whether the checkpoint has a tensor for it; None: there are no tensors. Raises ValueError for one
    that is not read, and msgspec's errors."""
    whole = msgspec.json.decode(text, type=_RawLlava)
    known = _OWN_MODELS.get(architecture, LANGUAGE_MODELS)
    kind = whole.text_config.get("model_type", next(iter(known)))
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"text_config.model_type {kind!r} is not supported; supported: {', '.join(known)}")
    outside = {
        "dtype": whole.dtype or whole.torch_dtype,
        "eos_token_id": whole.eos_token_id,
        _TIED: _tied(whole, architecture, has_head),
    }
    given = {key: value for key, value in outside.items() if value is not None}
    text_config = {key: value for key, value in whole.text_config.items() if key not in (_TIED, _TIED_LFM2)}
    own = {**LANGUAGE_MODEL_DEFAULTS.get(kind, {}), **given, **text_config}
    return msgspec.json.encode({**own, "architectures": [known[kind]]})


def _tied(whole: _RawLlava, architecture: str, has_head: Callable[[], bool | None]) -> bool | None:
    """Whether the head is the embedding. The library goes by what is said of the whole, and by the tensors where there
    are two that differ; releases before its fifth said it in `text_config`."""
    own = whole.text_config.get(_TIED_LFM2, whole.text_config.get(_TIED))
    said = whole.tie_word_embeddings if whole.tie_embedding is None else whole.tie_embedding
    by_default = True if architecture in _TIED_BY_DEFAULT else None
    outside = by_default if said is None else said
    if outside == own or not (outside or own):
        return outside
    found = has_head()
    if found is None:
        return said if own is None else own
    return not found


def language_model_name(name: str) -> str:
    """What the language model alone calls a tensor of LLaVA's checkpoint `name`; others keep their names."""
    for whole, alone in _NAMES:
        if name.startswith(whole):
            return alone + name.removeprefix(whole)
    return name


_NAMES = (
    ("language_model.model.blocks.", "model.layers."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""As releases of `transformers` before 4.52, and those since, call them; the last one is Idefics3's and SmolVLM's. The
first is what the fifth release writes of Kimi K2.5, whose published files have `layers` there."""
