"""Tiny random models that hear, and what `transformers` makes of their chats: the reference."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    AutoTokenizer,
    GenerationConfig,
    GlmAsrConfig,
    GlmAsrForConditionalGeneration,
    GlmAsrProcessor,
    GraniteSpeechConfig,
    GraniteSpeechForConditionalGeneration,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3ASRProcessor,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.granite_speech.feature_extraction_granite_speech import GraniteSpeechFeatureExtractor

from services.encoder.processors.sound_processors import GraniteFeatures
from tests.support.models.sounds import SAMPLE_RATE
from tests.support.models.tiny_qwen_audio import EAR, WINDOW_S, Sound
from tests.support.models.tiny_towers import TEXT
from tests.support.paths import DEMO_MODEL

_PARTS = "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
_TEXT = "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
_END = "{% endif %}{% endfor %}{% endif %}"
_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    + _PARTS
    + _TEXT
    + "AUDIO"
    + _END
    + "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VOXTRAL = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    + _PARTS
    + _TEXT
    + "[BEGIN_AUDIO][AUDIO]"
    + _END
    + "[/INST]{% else %}"
    + _PARTS
    + _TEXT
    + _END
    + "</s>{% endif %}{% endfor %}"
)
_ROLES = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    + _PARTS
    + _TEXT
    + "<|begin_of_audio|><|pad|><|end_of_audio|>"
    + _END
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class _Kind(NamedTuple):
    config: Any
    model: Any
    text: str
    """The language model's `model_type`."""
    tower: dict[str, Any]
    template: str
    token: str
    """Which stands for a row."""
    others: tuple[str, ...]
    """Special tokens that its template writes."""


_QWEN_EAR = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "n_window": 50,
    "n_window_infer": 100,
    "output_dim": 64,
    "downsample_hidden_size": 8,
    "initializer_range": 0.2,
}
_GLM_EAR = {
    "num_mel_bins": 16,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_CONFORMER = {
    "input_dim": 32,
    "num_layers": 2,
    "hidden_dim": 32,
    "num_heads": 2,
    "output_dim": 8,
    "context_size": 20,
    "max_pos_emb": 32,
    "conv_kernel_size": 7,
}
_QFORMER = {
    "model_type": "blip_2_qformer",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "encoder_hidden_size": 32,
    "cross_attention_frequency": 1,
    "initializer_range": 0.2,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}
_CHATML = ("<|im_start|>", "<|im_end|>")
HEARING: dict[str, _Kind] = {
    "voxtral": _Kind(
        VoxtralConfig,
        VoxtralForConditionalGeneration,
        "llama",
        {"audio_config": {**EAR, "encoder_ffn_dim": 128}},
        _VOXTRAL,
        "[AUDIO]",
        ("<s>", "</s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"),
    ),
    "qwen3-asr": _Kind(
        Qwen3ASRConfig,
        Qwen3ASRForConditionalGeneration,
        "qwen3",
        {"audio_config": _QWEN_EAR},
        _TURNS.replace("AUDIO", "<|audio_start|><|audio_pad|><|audio_end|>"),
        "<|audio_pad|>",
        (*_CHATML, "<|audio_start|>", "<|audio_end|>"),
    ),
    "granite-speech": _Kind(
        GraniteSpeechConfig,
        GraniteSpeechForConditionalGeneration,
        "granite",
        {"encoder_config": _CONFORMER, "projector_config": _QFORMER, "has_lora_adapter": False},
        _TURNS.replace("AUDIO", "<|audio|>"),
        "<|audio|>",
        _CHATML,
    ),
    "flamingo": _Kind(
        AudioFlamingo3Config,
        AudioFlamingo3ForConditionalGeneration,
        "qwen2",
        {"audio_config": EAR},
        _TURNS.replace("AUDIO", "<sound>"),
        "<sound>",
        _CHATML,
    ),
    "glm-asr": _Kind(
        GlmAsrConfig,
        GlmAsrForConditionalGeneration,
        "llama",
        {"audio_config": _GLM_EAR},
        _ROLES,
        "<|pad|>",
        ("<|user|>", "<|assistant|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
    ),
}


class HearingModel(NamedTuple):
    """A model that was written to a folder, and the library's own of the same weights."""

    path: Path
    reference: Any
    tokenizer: Any
    kind: _Kind
    processor: Any
    """The library's; None of Granite Speech, whose needs torchaudio."""

    @torch.inference_mode()
    def rows_of(self, sound: Sound) -> torch.Tensor:
        """[rows, hidden] of a sound alone, as many as the library's processor writes tokens for it."""
        made = self._prepared(sound)
        count = made.pop("count")
        rows = self.reference.get_audio_features(**made).pooler_output.reshape(-1, TEXT["hidden_size"])
        assert len(rows) == count
        return rows

    def _prepared(self, sound: Sound) -> dict[str, Any]:
        if isinstance(self.processor, VoxtralProcessor):
            size = WINDOW_S * SAMPLE_RATE
            windows = self.processor._retrieve_input_features(
                [sound],
                100 * WINDOW_S,
                sampling_rate=SAMPLE_RATE,
                padding=True,
                truncation=False,
                pad_to_multiple_of=size,
                return_tensors="pt",
            )
            return {"input_features": windows, "count": -(-len(sound) // size) * WINDOW_S * 50 // 4}
        if self.processor is None:
            own = SimpleNamespace(
                melspec_kwargs={"hop_length": 160}, projector_window_size=15, projector_downsample_rate=5
            )
            (count,) = GraniteSpeechFeatureExtractor._get_num_audio_features(own, [len(sound)])  # type: ignore[arg-type]
            return {"input_features": GraniteFeatures(self.path)(sound), "count": count}
        made = self.processor(text=self.kind.token, audio=[sound], sampling_rate=SAMPLE_RATE)
        count = int((made.pop("input_ids") == self.reference.config.audio_token_id).sum())
        made.pop("attention_mask")
        return {**made, "count": count}

    def prompt(self, text: str, rows: list[torch.Tensor]) -> list[int]:
        """The ids of a rendered chat with a token for each of the rows of its sounds."""
        before, *pieces = text.split(self.kind.token)
        whole = before + "".join(self.kind.token * len(each) + piece for each, piece in zip(rows, pieces, strict=True))
        ids: list[int] = self.tokenizer(whole, add_special_tokens=False).input_ids
        return ids

    def inputs(self, messages: list[dict[str, Any]], sounds: list[Sound], **how: Any) -> dict[str, torch.Tensor]:
        """What the library makes of a chat. `messages`: with parts as clients give them."""
        return self.of_text(self.rendered(messages, **how), sounds)

    def rendered(self, messages: list[dict[str, Any]], **how: Any) -> str:
        """A chat by the model's template."""
        shown = [
            {**each, "content": [p if p["type"] == "text" else {"type": "audio"} for p in each["content"]]}
            for each in messages
        ]
        how = {"add_generation_prompt": True, **how}
        text: str = self.tokenizer.apply_chat_template(shown, tokenize=False, **how)
        return text

    def asked(self, language: str | None = None, prompt: str | None = None) -> str:
        """The prompt by which the library has a sound written down; of Voxtral Mistral's own
        (`encode_transcription`), of Granite Speech that of its model card."""
        told = {} if prompt is None else {"prompt": prompt}
        if isinstance(self.processor, VoxtralProcessor):
            return f"<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{f'lang:{language}' if language else ''}[TRANSCRIBE]"
        if self.processor is None:
            said = f"<|audio|>{prompt or 'can you transcribe the speech into a written format?'}"
            chat = [{"role": "user", "content": said}]
            text: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            return text
        if isinstance(self.processor, Qwen3ASRProcessor):
            told |= {} if language is None else {"language": language}
        (text,) = self.processor.apply_transcription_request([np.zeros(160)], tokenize=False, **told)
        return text

    def written(self, sound: Sound, length: int, **how: str) -> str:
        """What it writes down of a window, where prompt and answer have `length` tokens."""
        inputs = self.of_text(self.asked(**how), [sound])
        ids = self.greedy_of(inputs, length - inputs["input_ids"].shape[1])
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @torch.inference_mode()
    def of_text(self, text: str, sounds: list[Sound]) -> dict[str, torch.Tensor]:
        """The same of a rendered one."""
        rows = [self.rows_of(each) for each in sounds]
        ids = torch.tensor([self.prompt(text, rows)])
        if len(sounds) == 1 and self.processor is not None and not isinstance(self.processor, VoxtralProcessor):
            own = self.processor(text=text, audio=sounds, sampling_rate=SAMPLE_RATE)
            assert own["input_ids"].tolist() == ids.tolist()
        embedded = self.reference.get_input_embeddings()(ids)
        if rows:
            embedded[ids == self.reference.config.audio_token_id] = torch.cat(rows)
        return {"input_ids": ids, "inputs_embeds": embedded}

    @torch.inference_mode()
    def greedy_of(self, inputs: dict[str, torch.Tensor], count: int) -> list[int]:
        """`count` tokens as the library's `generate` draws them."""
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
        output = self.reference.generate(inputs_embeds=inputs["inputs_embeds"], generation_config=settings)
        tokens: list[int] = output[0, -count:].tolist()
        return tokens

    def greedy(self, messages: list[dict[str, Any]], sounds: list[Sound], count: int) -> list[int]:
        """The same of a chat."""
        return self.greedy_of(self.inputs(messages, sounds), count)


def make_hearing_model(folder: Path, name: str, seed: int = 0) -> HearingModel:
    """Writes a model of a kind of `HEARING` to `folder`, with the demo model's tokenizer."""
    kind = HEARING[name]
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [kind.token, *kind.others]})
    tokenizer.chat_template = kind.template
    token = tokenizer.convert_tokens_to_ids(kind.token)
    text = {**TEXT, "model_type": kind.text, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None}
    text |= _MULTIPLIERS if kind.text == "granite" else {}
    config = kind.config(**kind.tower, text_config=text, audio_token_id=token, initializer_range=0.2)
    torch.manual_seed(seed)
    reference = kind.model(config).eval()
    if kind.text == "granite":  # what the library begins with zeros
        torch.nn.init.normal_(reference.model.projector.query, std=0.5)
    reference.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = _save_processor(folder, name, tokenizer)
    return HearingModel(folder, reference, tokenizer, kind, processor)


def _save_processor(folder: Path, name: str, tokenizer: Any) -> Any:
    if name == "granite-speech":
        raw = {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "sampling_rate": SAMPLE_RATE, "n_mels": 16}
        (folder / "preprocessor_config.json").write_text(json.dumps(raw))
        return None
    if name == "qwen3-asr":
        extractor: Any = Qwen3ASRFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
        tokenizer.audio_token = "<|audio_pad|>"
        tokenizer.audio_bos_token, tokenizer.audio_eos_token = "<|audio_start|>", "<|audio_end|>"
    else:
        extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    processors: Any = {
        "voxtral": VoxtralProcessor,
        "qwen3-asr": Qwen3ASRProcessor,
        "flamingo": AudioFlamingo3Processor,
        "glm-asr": GlmAsrProcessor,
    }
    more = {} if name == "voxtral" else {"chat_template": tokenizer.chat_template}
    processor = processors[name](extractor, tokenizer, **more)
    extractor.save_pretrained(folder)
    return processor


def sound_url_part(file: bytes) -> dict[str, Any]:
    """A part of a message, as vLLM has it."""
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(file).decode()}"}}
