"""What towers of models that hear take of a sound, as each model's own processor in `transformers` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from shared.models.processor_files import read_processor

Waveform = NDArray[np.float32]
Prepared = dict[str, Tensor]
"""What `get_audio_features` takes; a window of the sound each, one behind the other."""


class _RawGraniteFeatures(Struct):
    sampling_rate: int = 16_000
    n_fft: int = 512
    win_length: int = 400
    hop_length: int = 160
    n_mels: int = 80
    feature_size: int | None = None


class GraniteFeatures:
    """Makes the log-mel spectrograms of Granite Speech, two frames in each step, as `GraniteSpeechFeatureExtractor`
    does by torchaudio, which is not needed here. Stateless."""

    def __init__(self, folder: Path) -> None:
        """Reads the model's files. Raises OSError and ValueError."""
        from transformers.audio_utils import mel_filter_bank

        self._raw = raw = read_processor(folder, "feature_extractor", _RawGraniteFeatures)
        filters = mel_filter_bank(
            num_frequency_bins=raw.n_fft // 2 + 1,
            num_mel_filters=raw.feature_size or raw.n_mels,
            min_frequency=0.0,
            max_frequency=raw.sampling_rate / 2,
            sampling_rate=raw.sampling_rate,
            norm=None,
            mel_scale="htk",
        )
        self._filters = torch.from_numpy(filters).float()
        self._window = torch.hann_window(raw.win_length)

    def __call__(self, samples: Waveform) -> Tensor:
        """[1, steps, 2 * mels]."""
        raw = self._raw
        spectrum = torch.stft(
            torch.from_numpy(samples.copy()),
            *(raw.n_fft, raw.hop_length, raw.win_length),
            window=self._window,
            return_complex=True,
        )
        mel = (spectrum.abs().square().T @ self._filters).clamp(min=1e-10).log10()
        mel = torch.maximum(mel, mel.amax() - 8.0) / 4 + 1
        even = mel[: len(mel) // 2 * 2]
        return even.reshape(1, len(even) // 2, -1)


class SoundProcessor:
    """Knows what one model's tower takes. Stateless."""

    def __init__(self, folder: Path, config: Any) -> None:
        """`config`: the library's, of the model in `folder`. Raises what the library does."""
        from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

        self._config = config
        whisper: Any = WhisperFeatureExtractor
        qwen: Any = Qwen3ASRFeatureExtractor
        extractors = {"qwen3_asr": qwen.from_pretrained, "granite_speech": GraniteFeatures}
        self._extract: Any = extractors.get(config.model_type, whisper.from_pretrained)(folder)
        self._prepare = _PREPARED[config.model_type]

    def prepared(self, samples: Waveform) -> Prepared:
        """Raises ValueError for what the library does not take."""
        return self._prepare(self._extract, samples, self._config)


def _qwen_audio(extract: Any, samples: Waveform, config: Any) -> Prepared:
    made = extract(
        samples,
        sampling_rate=extract.sampling_rate,
        return_attention_mask=True,
        padding="max_length",
        return_tensors="pt",
    )
    return {"input_features": made.input_features, "attention_mask": made.attention_mask}


def _voxtral(extract: Any, samples: Waveform, config: Any) -> Prepared:
    """Silence behind a sound is heard, up to the end of its last window."""
    frames = 2 * config.audio_config.max_source_positions
    made = extract(
        samples,
        sampling_rate=extract.sampling_rate,
        padding=True,
        truncation=False,
        pad_to_multiple_of=frames * extract.hop_length,
        return_tensors="pt",
    ).input_features
    return {"input_features": made.reshape(extract.feature_size, -1, frames).transpose(0, 1)}


def _qwen_asr(extract: Any, samples: Waveform, config: Any) -> Prepared:
    made = extract(
        samples,
        sampling_rate=extract.sampling_rate,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        n_window=config.audio_config.n_window,
    )
    return {"input_features": made.input_features, "input_features_mask": made.attention_mask}


def _flamingo(extract: Any, samples: Waveform, config: Any) -> Prepared:
    """Windows of a sound know nothing of each other."""

    def windows() -> Iterator[Waveform]:
        for start in range(0, len(samples), extract.n_samples):
            yield samples[start : start + extract.n_samples]

    made = extract(
        list(windows()), sampling_rate=extract.sampling_rate, return_attention_mask=True, return_tensors="pt"
    )
    return {"input_features": made.input_features, "input_features_mask": made.attention_mask}


def _granite(extract: Any, samples: Waveform, config: Any) -> Prepared:
    return {"input_features": extract(samples)}


_PREPARED: dict[str, Callable[[Any, Waveform, Any], Prepared]] = {
    "qwen2_audio": _qwen_audio,
    "voxtral": _voxtral,
    "qwen3_asr": _qwen_asr,
    "audioflamingo3": _flamingo,
    "glmasr": _flamingo,
    "granite_speech": _granite,
}
"""By `model_type`."""
