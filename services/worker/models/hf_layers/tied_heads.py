"""Whether the head of a model with a tower is its embedding, which its configuration may say twice. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from shared.models.image_models import (
    DEEPSEEK_VL,
    GEMMA,
    GLM_ASR,
    GOT_OCR2,
    GRANITE_DOCLING,
    GRANITE_SPEECH,
    KIMI_K2_5,
    LFM2_VL,
    LFM3_VL,
    LIGHTON_OCR,
    MISTRAL3,
    OVIS2,
    PADDLE_OCR,
    QWEN3_ASR,
)

TIED = "tie_word_embeddings"
_LFM2 = "tie_embedding"
"""Another name of it, of LFM2, which comes first."""
_BY_DEFAULT = (
    *(GEMMA, MISTRAL3, "InternVLForConditionalGeneration", *KIMI_K2_5, LFM2_VL, LFM3_VL, *DEEPSEEK_VL, OVIS2),
    *(LIGHTON_OCR, PADDLE_OCR, GOT_OCR2, QWEN3_ASR, GLM_ASR, GRANITE_SPEECH, GRANITE_DOCLING),
)
"""Those whose head is the embedding where nothing is said of the whole."""

HEADLESS = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
    "Gemma2Model": "Gemma2ForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "DeepseekV2Model": "DeepseekV2ForCausalLM",
    "DeepseekV3Model": "DeepseekV3ForCausalLM",
    "DeepseekV32Model": "DeepseekV32ForCausalLM",
    "GlmMoeDsaModel": "GlmMoeDsaForCausalLM",
    "Qwen2ForProcessRewardModel": "Qwen2ForCausalLM",
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
    **{
        f"{family}ForSequenceClassification": f"{family}ForCausalLM"
        for family in (
            *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe", "Gemma2"),
            *("DeepseekV2", "DeepseekV3"),
        )
    },
    **{
        f"{family}ForTokenClassification": f"{family}ForCausalLM"
        for family in (
            *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe", "Gemma2", "GptOss"),
            "DeepseekV3",
        )
    },
}
"""Architectures without a language model head, and those that have one."""

HasHead = Callable[[], bool | None]
"""Whether the checkpoint has a tensor of the head's own; None: there are no tensors."""


class _RawTies(Struct):
    tie_word_embeddings: bool | None = None
    tie_embedding: bool | None = None

    @property
    def said(self) -> bool | None:
        return self.tie_word_embeddings if self.tie_embedding is None else self.tie_embedding


class _RawTiesOfWhole(_RawTies):
    text_config: _RawTies | None = None


def without_tensors() -> bool | None:
    """A `HasHead` of a configuration alone."""
    return None


def without_ties(config: dict[str, Any]) -> dict[str, Any]:
    """`config` without what it says of the head."""
    return {key: value for key, value in config.items() if key not in (TIED, _LFM2)}


def tied_head(text: bytes, architecture: str, has_head: HasHead) -> bool | None:
    """Whether the head is the embedding by `text`, the `config.json` of `architecture`; None: it says nothing of it.

    The library goes by what is said of the whole, and in some models by `text_config`, too, where releases before its
    fifth said it, and often wrongly; of two tensors that differ it ties none. So tensors decide where the two differ.
    Raises msgspec's errors."""
    whole = msgspec.json.decode(text, type=_RawTiesOfWhole)
    own = None if whole.text_config is None else whole.text_config.said
    outside = True if whole.said is None and architecture in _BY_DEFAULT else whole.said
    if outside == own or not (outside or own):
        return outside
    if whole.said is not None and own is None:
        return outside
    found = has_head()
    if found is None:
        return own if whole.said is None else outside
    return not found
