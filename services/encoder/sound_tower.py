"""Encoders of sounds, by `transformers`, of models that see, too: samples to rows that stand in place of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from services.encoder.audio_tower import SampleReader, Samples, check_a_sound, read_extractor
from services.encoder.image_decoder import DecodedFrames, ImageDecoder
from services.encoder.image_process import DecodedImage
from services.encoder.processors.sound_processors import SoundProcessor, Waveform
from services.encoder.tower import (
    DTYPES,
    DtypeChoice,
    ImageTower,
    TowerUnusable,
    load_tower,
    own_dtype,
    packed_rows,
    refusing,
)
from shared.messages.encoder import EncodeInput
from shared.messages.generation import EmbeddingDtype, PromptEmbeds
from shared.models.audio_models import read_sound_model


class SoundTower:
    """Owns the weights of an encoder of sounds and its projector, and what prepares these. One thread at a time.

    A sound is encoded alone, so its rows depend on no other.
    """

    def __init__(self, folder: Path, dtype: DtypeChoice = "auto") -> None:
        """Loads it on the processors. Raises TowerUnusable."""
        from transformers import AutoConfig

        sounds = read_sound_model(folder)
        if sounds is None:
            raise TowerUnusable(f"{folder}: the model takes no sounds")
        with refusing(folder):
            config = AutoConfig.from_pretrained(folder)
            self._prepare = SoundProcessor(folder, config).prepared
        self.dtype: EmbeddingDtype = own_dtype(config) if dtype == "auto" else dtype
        self.size, self._rate = sounds.row_size, sounds.sample_rate
        self._model = load_tower(folder, config, DTYPES[self.dtype])
        check_a_sound(folder, self.encode, self._rate)

    @torch.inference_mode()
    def encode(self, sound: Samples) -> PromptEmbeds:
        """The rows of a sound. One shorter than a tenth of a second, as what a file's last window may be left with, is
        heard with silence behind it: some towers make no row of it, or nothing at all. Raises TowerUnusable where they
        are no numbers."""
        samples = np.frombuffer(sound.samples, np.dtype("<f4"))
        rows = self._rows(np.pad(samples, (0, max(0, self._rate // 10 - len(samples)))))
        packed = packed_rows(rows, self.dtype, "sound")
        return PromptEmbeds(dtype=self.dtype, size=self.size, rows=packed, runs=((0, len(rows)),))

    def _rows(self, samples: Waveform) -> Tensor:
        """[rows, hidden]."""
        made = self._prepare(samples)
        made["input_features"] = made["input_features"].to(DTYPES[self.dtype])
        if self._model.config.model_type == "qwen2_audio":
            return _qwen_rows(self._model, made["input_features"], made["attention_mask"])
        rows: Tensor = self._model.get_audio_features(**made).pooler_output
        return rows.reshape(-1, self.size)


def _qwen_rows(model: Any, features: Tensor, frames: Tensor) -> Tensor:
    """A row for each 40 ms, as `Qwen2AudioModel.forward` makes them: a window is padded, and what pads it is seen by
    nothing. `frames`: 1 for those that are of the sound."""
    from transformers.masking_utils import create_bidirectional_mask

    tower = model.audio_tower
    lengths, counts = tower._get_feat_extract_output_lengths(frames.sum(-1))
    most = (features.shape[-1] - 2) // 2 + 1
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=torch.zeros(1, most, 1, dtype=features.dtype),
        attention_mask=(torch.arange(most)[None] < lengths[:, None]).long(),
    )
    hidden = tower(features, attention_mask=mask).last_hidden_state
    rows: Tensor = model.multi_modal_projector(hidden)[0, : int(counts[0])]
    return rows


class MediaReader:
    """Takes images, frames and sounds, of a model that sees and hears."""

    def __init__(self, images: ImageDecoder, sounds: SampleReader) -> None:
        self._images, self._sounds = images, sounds

    async def decode(self, question: EncodeInput) -> DecodedImage | DecodedFrames | Samples:
        """Raises ImageRefused."""
        return await (self._sounds if question.sound else self._images).decode(question)

    async def close(self) -> None:
        """Ends what decodes images."""
        await self._images.close()


class OmniTower(ImageTower):
    """Owns the towers of Qwen-Omni, Gemma 4 or Phi-4 Multimodal, and what prepares images and sounds for them.
    One thread at a time."""

    hears = True

    def __init__(self, folder: Path, dtype: DtypeChoice = "auto", max_pixels: int | None = None) -> None:
        """As ImageTower. Raises TowerUnusable."""
        sounds = read_sound_model(folder)
        if sounds is None:
            raise TowerUnusable(f"{folder}: the model takes no sounds")
        config, self._extractor = read_extractor(folder)
        self._rate, self._kind = sounds.sample_rate, config.model_type
        self._around: tuple[int, ...] = ()
        """The tokens that stand before and behind a sound's rows, where the template does not write them."""
        if self._kind.startswith("gemma4"):
            self._around = (config.boa_token_id, getattr(config, "eoa_token_id", None) or config.eoa_token_index)
        super().__init__(folder, dtype, max_pixels)
        check_a_sound(folder, self.encode, self._rate)

    def heeds_others(self, *, sound: bool) -> bool:
        """See `ImageTower.heeds_others`."""
        return self._kind == "phi4_multimodal" if sound else super().heeds_others(sound=sound)

    @torch.inference_mode()
    def encode(self, given: DecodedImage | DecodedFrames | Samples) -> PromptEmbeds:
        """Of a sound, a row for each 40 ms (Qwen3-Omni: 80), which adds nothing behind the first layers. Raises
        TowerUnusable where rows are no numbers."""
        if not isinstance(given, Samples):
            return super().encode(given)
        samples = np.frombuffer(given.samples, np.dtype("<f4"))
        if self._kind == "phi4_multimodal":
            rows = self._heard_by_conformer(samples, beside_images=given.beside_images)
        else:
            rows = self._heard(samples)
        count, texts = len(rows), tuple[tuple[int, tuple[int, ...]], ...]()
        if self._around:
            begin, end = self._around
            texts = ((0, (begin,)), (1 + count, (end,)))
        packed = packed_rows(pad(rows, (0, self.size - rows.shape[1])), self.dtype, "sound")
        return PromptEmbeds(
            dtype=self.dtype, size=self.size, rows=packed, runs=((len(texts) // 2, count),), texts=texts
        )

    def _heard(self, samples: np.ndarray[Any, Any]) -> Tensor:
        """[rows, hidden]."""
        padded: dict[str, Any] = {"padding": True, "truncation": False}
        if self._kind.startswith("qwen2_5"):  # to a window, of which what lies further behind changes no frame
            most = min(len(samples) + 2 * self._extractor.n_fft, self._extractor.n_samples)
            padded = {"padding": "max_length", "max_length": most}
        made = self._extractor(
            [samples], sampling_rate=self._rate, return_attention_mask=True, return_tensors="pt", **padded
        )
        features, encode = made.input_features.to(DTYPES[self.dtype]), self._model.get_audio_features
        if self._kind.startswith("gemma4"):
            heard = encode(features, made.input_features_mask)
            own: Tensor = heard.pooler_output[heard.attention_mask]
            return own
        rows: Tensor = encode(features, feature_attention_mask=made.attention_mask).last_hidden_state
        return rows

    def _heard_by_conformer(self, samples: np.ndarray[Any, Any], *, beside_images: bool) -> Tensor:
        """[rows, hidden] of Phi-4 Multimodal's, whose tower puts rows in place of tokens itself, and projects those of
        a chat with images otherwise."""
        made = self._extractor(samples, sampling_rate=self._rate, return_tensors="pt")
        ids = torch.full((1, int(made.audio_embed_sizes)), self._model.config.audio_config.audio_token_id)
        empty = torch.zeros(1, ids.shape[1], self.size, dtype=DTYPES[self.dtype])
        how = "vision" if beside_images else "speech"
        embed = self._model.embed_tokens_extend.audio_embed
        rows: Tensor = embed(ids, empty, **made, audio_projection_mode=how)[0]
        return rows
