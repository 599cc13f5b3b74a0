"""A model's encoder of sounds, by `transformers`: samples to rows that the decoder's tokens attend to."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from services.encoder.image_decoder import ImageRefused
from services.encoder.tower import DTYPES, DtypeChoice, TowerUnusable, own_dtype, packed_rows
from shared.messages.encoder import EncodeImage
from shared.messages.generation import EmbeddingDtype, PromptEmbeds
from shared.messages.model_card import AudioModel, SoundModel
from shared.models.audio_models import SAMPLE_BYTES, read_audio_model

_log = logging.getLogger(__name__)


class Samples(Struct, frozen=True):
    """A window of a sound: float32, little-endian, of one channel and the model's rate."""

    samples: bytes

    @property
    def measures(self) -> dict[str, int]:
        """For logs."""
        return {"samples": len(self.samples) // SAMPLE_BYTES}


class SampleReader:
    """Takes what gateways have decoded, in a process of their own (ADR 112): no decoder of strangers' files is here."""

    def __init__(self, audio: AudioModel | SoundModel) -> None:
        self._most = audio.window_s * audio.sample_rate

    async def decode(self, question: EncodeImage) -> Samples:
        """The samples. Raises ImageRefused where these are none, or more than a window."""
        file = question.image
        count, rest = divmod(len(file), SAMPLE_BYTES)
        if rest or not 0 < count <= self._most:
            raise ImageRefused(f"{len(file)} bytes of samples are not allowed; {self._most} of {SAMPLE_BYTES} are")
        return Samples(file)

    async def close(self) -> None:
        """Nothing is open."""


class AudioTower:
    """Owns the weights of a model's encoder, and what makes mel spectrograms for it. One thread at a time.

    A window is encoded alone, so its rows depend on no other.
    """

    def __init__(self, folder: Path, dtype: DtypeChoice = "auto") -> None:
        """Loads it on the processors. Raises TowerUnusable."""
        audio = read_audio_model(folder)
        if audio is None:
            raise TowerUnusable(f"{folder}: the model hears nothing")
        config, self._extractor = read_extractor(folder)
        self.dtype: EmbeddingDtype = own_dtype(config) if dtype == "auto" else dtype
        self.size, self._rate = audio.row_size, audio.sample_rate
        self._encoder = _load(folder, config, DTYPES[self.dtype])
        self.encode(Samples(bytes(SAMPLE_BYTES * self._rate // 10)))

    @torch.inference_mode()
    def encode(self, window: Samples) -> PromptEmbeds:
        """The rows of a window, as many however short it is. Raises TowerUnusable where they are no numbers."""
        samples = np.frombuffer(window.samples, np.dtype("<f4"))
        prepared = self._extractor(samples, sampling_rate=self._rate, return_tensors="pt")
        rows = self._encoder(prepared.input_features.to(DTYPES[self.dtype])).last_hidden_state[0]
        packed = packed_rows(rows, self.dtype, "sound")
        return PromptEmbeds(dtype=self.dtype, size=self.size, rows=packed, runs=((0, len(rows)),), encoded=True)


def read_extractor(folder: Path) -> tuple[Any, Any]:
    """The model's configuration, and what makes mel spectrograms for it. Raises TowerUnusable."""
    from transformers import AutoConfig, WhisperFeatureExtractor

    extractors: Any = WhisperFeatureExtractor
    try:
        return AutoConfig.from_pretrained(folder), extractors.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TowerUnusable(f"{folder}: {error}") from None


def _load(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model's encoder alone. Raises TowerUnusable."""
    from safetensors import SafetensorError
    from transformers import WhisperModel
    from transformers.utils import logging as library_logging

    quiet: Any = library_logging
    quiet.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of the decoder's tensors, which are left out
    config.decoder_layers = 0
    models: Any = WhisperModel
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, found = models.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise TowerUnusable(f"{folder}: {error}") from None
    missing = sorted(name for name in found["missing_keys"] if name.startswith("encoder."))
    missing += sorted(str(each[0]) for each in found["mismatched_keys"])
    if missing:
        raise TowerUnusable(f"{folder}: the checkpoint has no {', '.join(missing[:3])} of the shape it needs")
    encoder = model.get_encoder().eval()
    _log.info("tower loaded: %d parameters", sum(each.numel() for each in encoder.parameters()))
    return encoder
