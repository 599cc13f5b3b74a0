"""Sounds to hear, and their files."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000


def sweep(seed: int = 0, seconds: float = 1.5, rate: int = SAMPLE_RATE) -> NDArray[np.float32]:
    """A tone that rises or falls, and a little noise."""
    random = np.random.default_rng(seed)
    low, high = random.uniform(100, 3000, 2)
    time = np.arange(int(seconds * rate)) / rate
    phase = 2 * np.pi * (low * time + (high - low) * time**2 / (2 * seconds))
    return (0.5 * np.sin(phase) + 0.02 * random.standard_normal(len(time))).astype(np.float32)


def wav(sound: NDArray[np.float32], rate: int = SAMPLE_RATE) -> bytes:
    """The file of a sound, in 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as to:
        to.setnchannels(1)
        to.setsampwidth(2)
        to.setframerate(rate)
        to.writeframes((sound * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def in_sixteen_bits(sound: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is left of a sound in such a file."""
    return ((sound * 32767).round().astype(np.int16) / np.float32(32768)).astype(np.float32)


def encoded(sound: NDArray[np.float32], form: str, codec: str, rate: int) -> bytes:
    """The file of a sound in another format, as FFmpeg calls it."""
    import av  # other sounds need no library

    file = io.BytesIO()
    with av.open(file, "w", format=form) as to:
        stream: Any = to.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray((sound * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        for made in (*av.AudioResampler(stream.codec_context.format.name, "mono", rate).resample(frame), None):
            to.mux(stream.encode(made))
    return file.getvalue()
