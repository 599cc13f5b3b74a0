"""A model's encoder of sounds, by `transformers`: samples to rows that the decoder's tokens attend to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from services.encoder.image_decoder import ImageRefused
from services.encoder.token_aligner import TokenAligner
from services.encoder.tower import DTYPES, DtypeChoice, TowerUnusable, load_part, own_dtype, packed_rows, refusing
from shared.messages.encoder import EncodeInput, WrittenTokens
from shared.messages.generation import EmbeddingDtype, PromptEmbeds
from shared.messages.model_card import AudioModel, SoundModel
from shared.models.audio_models import SAMPLE_BYTES, read_audio_model

FRAMES_OF_A_ROW = 2
"""Of a mel spectrogram: its encoder's second convolution takes every other one."""

_EXTRACTORS = {
    "gemma4": "Gemma4AudioFeatureExtractor",
    "gemma4_unified": "Gemma4UnifiedAudioFeatureExtractor",
    "phi4_multimodal": "Phi4MultimodalFeatureExtractor",
}
"""By `model_type`, the library's classes of those that have one of their own."""


class Samples(Struct, frozen=True):
    """A window of a sound: float32, little-endian, of one channel and the model's rate."""

    samples: bytes
    beside_images: bool = False
    """Whether its chat has images, too."""

    @property
    def measures(self) -> dict[str, int]:
        """For logs."""
        return {"samples": len(self.samples) // SAMPLE_BYTES}


class SampleReader:
    """Takes what gateways have decoded, in a process of their own (ADR 112): no decoder of strangers' files is here."""

    def __init__(self, audio: AudioModel | SoundModel) -> None:
        self._most = audio.window_s * audio.sample_rate

    async def decode(self, question: EncodeInput) -> Samples:
        """The samples. Raises ImageRefused where these are none, or more than a window."""
        file = question.content
        count, rest = divmod(len(file), SAMPLE_BYTES)
        if rest or not 0 < count <= self._most:
            raise ImageRefused(f"{len(file)} bytes of samples are not allowed; {self._most} of {SAMPLE_BYTES} are")
        return Samples(file, question.several)

    async def close(self) -> None:
        """Nothing is open."""


class AudioTower:
    """Owns the weights of a model's encoder, and what makes mel spectrograms for it. One thread at a time.

    A window is encoded alone, so its rows depend on no other.
    """

    def __init__(self, folder: Path, dtype: DtypeChoice = "auto") -> None:
        """Loads it on the processors. Raises TowerUnusable."""
        from transformers import WhisperModel

        audio = read_audio_model(folder)
        if audio is None:
            raise TowerUnusable(f"{folder}: the model hears nothing")
        config, self._extractor = read_extractor(folder)
        self.dtype: EmbeddingDtype = own_dtype(config) if dtype == "auto" else dtype
        self.size, self._rate = audio.row_size, audio.sample_rate
        self._folder, self._row_s = folder, audio.timestamp_s
        self._aligner: TokenAligner | None = None
        """Loaded when times are first asked for: most requests need none, and a decoder is large."""
        config.decoder_layers = 0
        model = load_part(WhisperModel, folder, config, DTYPES[self.dtype], lambda name: name.startswith("encoder."))
        self._encoder = model.get_encoder().eval()
        check_a_sound(folder, self.encode, self._rate)

    @torch.inference_mode()
    def encode(self, window: Samples) -> PromptEmbeds:
        """The rows of a window, as many however short it is. Raises TowerUnusable where they are no numbers."""
        rows = self._rows(window)[0]
        packed = packed_rows(rows, self.dtype, "sound")
        return PromptEmbeds(dtype=self.dtype, size=self.size, rows=packed, runs=((0, len(rows)),), encoded=True)

    @torch.inference_mode()
    def times(self, window: Samples, written: WrittenTokens) -> tuple[float, ...]:
        """When each token of an answer ends, in seconds. Raises TowerUnusable for too many tokens, or one that is
        not of the vocabulary."""
        if self._aligner is None:
            self._aligner = TokenAligner(self._folder, self.dtype)
        rows, heard = self._rows(window)
        return tuple(each * self._row_s for each in self._aligner.ends(rows, written, heard))

    def _rows(self, window: Samples) -> tuple[Tensor, int]:
        """[rows, size], and how many of them are of the sound, not of the silence behind it."""
        samples = np.frombuffer(window.samples, np.dtype("<f4"))
        prepared = self._extractor(samples, sampling_rate=self._rate, return_tensors="pt", return_attention_mask=True)
        rows = self._encoder(prepared.input_features.to(DTYPES[self.dtype])).last_hidden_state[0]
        return rows, max(int(prepared.attention_mask.sum()) // FRAMES_OF_A_ROW, 1)


def check_a_sound(folder: Path, encode: Callable[[Samples], PromptEmbeds], rate: int) -> None:
    """That a tower and what makes spectrograms for it belong together. Raises TowerUnusable."""
    with refusing(folder):
        encode(Samples(bytes(SAMPLE_BYTES * (rate // 10))))


def read_extractor(folder: Path) -> tuple[Any, Any]:
    """The model's configuration, and what makes mel spectrograms for it. Raises TowerUnusable."""
    import transformers

    with refusing(folder):
        config = transformers.AutoConfig.from_pretrained(folder)
        extractors: Any = getattr(transformers, _EXTRACTORS.get(config.model_type, "WhisperFeatureExtractor"))
        return config, extractors.from_pretrained(folder)
