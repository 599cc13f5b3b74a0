"""A tiny random Qwen2-Audio, and what `transformers` makes of its chats: the reference."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from tests.support.models.tiny_towers import TEXT
from tests.support.paths import DEMO_MODEL

WINDOW_S = 2
_TEMPLATE: Any = Qwen2AudioProcessor.default_chat_template
TEMPLATE: str = _TEMPLATE.fget(None)
Sound = NDArray[np.float32]
EAR: dict[str, Any] = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 50 * WINDOW_S,
    "initializer_range": 0.2,
}
"""The sizes of a tower that hears."""


class SoundChatModel(NamedTuple):
    """A model that was written to a folder, and the library's own of the same weights."""

    path: Path
    reference: Any
    processor: Any

    def inputs(self, messages: list[dict[str, Any]], sounds: list[Sound]) -> Any:
        """What the library's processor makes of a chat. `messages`: with parts as clients give them."""
        shown = [
            {**each, "content": [{"type": "audio"} if p["type"] == "input_audio" else p for p in each["content"]]}
            for each in messages
        ]
        text = self.processor.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        more: dict[str, Any] = {"audio": sounds, "sampling_rate": 16_000} if sounds else {}
        return self.processor(text=text, return_tensors="pt", **more)

    @torch.inference_mode()
    def greedy(self, messages: list[dict[str, Any]], sounds: list[Sound], count: int) -> list[int]:
        """`count` tokens as the library's `generate` draws them."""
        inputs = self.inputs(messages, sounds)
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
        output = self.reference.generate(**inputs, generation_config=settings)
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def make_sound_model(folder: Path, seed: int = 0) -> SoundChatModel:
    """Writes it to `folder`, with the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    tokenizer.chat_template = TEMPLATE
    config = Qwen2AudioConfig(
        audio_config=EAR,
        text_config={
            **TEXT,
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    torch.manual_seed(seed)
    reference = Qwen2AudioForConditionalGeneration(config).eval()
    reference.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    extractor.save_pretrained(folder)
    return SoundChatModel(folder, reference, Qwen2AudioProcessor(extractor, tokenizer, chat_template=TEMPLATE))


def sound_part(file: bytes, form: str = "wav") -> dict[str, Any]:
    """A part of a message."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": form}}
