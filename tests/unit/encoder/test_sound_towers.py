"""Rows of sounds are what the library makes of the same samples, however long they are, in one window or several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from services.encoder.audio_tower import Samples
from services.encoder.processors.sound_processors import GraniteFeatures
from services.encoder.sound_tower import SoundTower
from tests.support.models.sounds import SAMPLE_RATE, sweep
from tests.support.models.tiny_hearing import HEARING, make_hearing_model
from tests.support.models.tiny_qwen_audio import WINDOW_S


@pytest.mark.parametrize("kind", HEARING)
def test_rows_of_sounds_are_the_librarys(kind: str, tmp_path: Path) -> None:
    model = make_hearing_model(tmp_path, kind)
    tower = SoundTower(tmp_path)
    for number, seconds in enumerate((0.1, 0.73, WINDOW_S - 0.01, WINDOW_S, 2.5 * WINDOW_S)):
        sound = sweep(number, seconds)
        made, expected = tower.encode(Samples(sound.astype("<f4").tobytes())), model.rows_of(sound)
        rows = torch.frombuffer(bytearray(made.rows), dtype=torch.float32).view(-1, made.size)
        torch.testing.assert_close(rows, expected)
        assert rows.std() > 0.1, "rows this flat would agree with anything"
        assert made.runs == ((0, len(expected)),)
    short = sweep(0, 0.05).astype("<f4")
    silence = np.zeros(SAMPLE_RATE // 10 - len(short), "<f4")
    made, padded = (tower.encode(Samples(each.tobytes())) for each in (short, np.concatenate([short, silence])))
    assert made == padded, "what is left of a file is heard, however short it is"
    assert made.count > 0
    if kind == "granite-speech":
        _granites_features_are_spectrograms(tmp_path)


def _granites_features_are_spectrograms(folder: Path) -> None:
    """As torchaudio makes them, by the library's own code of the same."""
    sound = sweep(3, 0.731)
    filters = mel_filter_bank(257, 16, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, norm=None, mel_scale="htk")
    hann = window_function(400, "hann")
    mel = spectrogram(
        sound, hann, 400, 160, fft_length=512, power=2.0, mel_filters=filters, mel_floor=1e-10, log_mel="log10"
    ).T
    expected = np.maximum(mel, mel.max() - 8.0) / 4 + 1
    even = expected[: len(expected) // 2 * 2].reshape(1, -1, 32)
    np.testing.assert_allclose(GraniteFeatures(folder)(sound).numpy(), even, atol=2e-5)
