"""Decodes a sound: `python -m services.gateway.audio.audio_process RATE WINDOW MAX`, a process that may die of it.

It reads a file that a stranger made from standard input to its end, and writes its windows to standard output: samples
of one channel at RATE, WINDOW seconds at most in each. It has no network of its own making and no secrets; memory and
processor time are limited by the kernel. It decodes no further than it is read, so an hour of silence in a few bytes
takes no memory. FFmpeg opens nothing but that file: formats and codecs are named, so there are no playlists.
"""

from __future__ import annotations

import io
import sys
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.decoding.ffmpeg_errors import error_text
from shared.machine.helper_pipes import confine, write_message

FORMATS = "wav,flac,mp3,ogg,mov,mp4,m4a,matroska,webm,aac"
CODECS = (
    "pcm_u8,pcm_s16le,pcm_s16be,pcm_s24le,pcm_s32le,pcm_f32le,pcm_f64le,pcm_mulaw,pcm_alaw,adpcm_ms,adpcm_ima_wav,"
    "flac,mp3,mp3float,vorbis,opus,aac,alac"
)
SHOWN_FORMATS = "WAV, FLAC, MP3, OGG, M4A, MP4 and WebM"
MAX_MEMORY = 2**30
"""Bytes of address space."""
MAX_CPU_S = 120
"""Seconds of processor time."""
MIN_SECONDS = 0.1
SAMPLE_BYTES = 4
QUIET_SHARE = 30
"""A window ends at the quietest place of its last second, where it is 30 long."""
QUIET_PARTS = 10
"""Of that second: a tenth is as long as what is compared."""


class DecodedWindow(Struct, frozen=True, array_like=True, tag=True):
    """A part of the sound."""

    start: float
    """Seconds before it."""
    samples: bytes
    """float32, little-endian."""


class DecodedAll(Struct, frozen=True, array_like=True, tag=True):
    """There are no further windows."""

    seconds: float


class AudioRefusal(Struct, frozen=True, array_like=True, tag=True):
    """Why there are none, or no further ones."""

    message: str


AudioReply = DecodedWindow | DecodedAll | AudioRefusal


def decode_audio(file: bytes, rate: int, window_s: int, max_s: float) -> Iterator[AudioReply]:
    """The windows of a file, then its end, or why there is none."""
    import av

    try:
        yield from _windows(av, file, rate, window_s, max_s)
    except MemoryError:
        yield AudioRefusal("decoding the file takes too much memory")
    except _FileRefused as refused:
        yield AudioRefusal(str(refused))
    except Exception as error:  # whatever a decoder raises over what strangers made
        yield AudioRefusal(f"the file is no sound, or broken ({error_text(error)}); {SHOWN_FORMATS} are allowed")


class _FileRefused(Exception):
    """The text is for the client."""


def _windows(av: Any, file: bytes, rate: int, window_s: int, max_s: float) -> Iterator[AudioReply]:
    held, whole = array("f"), window_s * rate
    before = 0
    for samples in _samples(av, file, rate):
        held.frombytes(samples)
        if before + len(held) > max_s * rate:
            raise _FileRefused(f"more than {max_s:g} s are not allowed")
        while len(held) > whole:
            end = _quietest(held, whole)
            yield DecodedWindow(before / rate, held[:end].tobytes())
            del held[:end]
            before += end
    seconds = (before + len(held)) / rate
    if seconds < MIN_SECONDS:
        raise _FileRefused(f"{seconds:g} s of sound are not allowed; at least {MIN_SECONDS} are")
    if held:
        yield DecodedWindow(before / rate, held.tobytes())
    yield DecodedAll(seconds)


def _samples(av: Any, file: bytes, rate: int) -> Iterator[bytes]:
    """float32 of one channel at `rate`, in pieces."""
    options = {"format_whitelist": FORMATS, "codec_whitelist": CODECS}
    with av.open(io.BytesIO(file), "r", options=options, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise _FileRefused("there is no sound in the file")
        stream = container.streams.audio[0]
        if stream.codec_context is None or stream.codec_context.codec.name not in CODECS.split(","):
            raise _FileRefused(f"its codec is not allowed; {CODECS} are")  # FFmpeg heeds the list as it looks alone
        stream.codec_context.thread_count = 1
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        for frame in container.decode(stream):
            frame.pts = None  # gaps in what a file says of times are none in the sound
            for made in resampler.resample(frame):
                yield bytes(made.planes[0])[: made.samples * SAMPLE_BYTES]
        for made in resampler.resample(None):
            yield bytes(made.planes[0])[: made.samples * SAMPLE_BYTES]


def _quietest(held: array[float], whole: int) -> int:
    """Where a window of at most `whole` samples ends: at the quietest place of its last part, as vLLM splits sounds."""
    first = whole - whole // QUIET_SHARE
    size = max(1, (whole - first) // QUIET_PARTS)
    loudness = {start: sum(each * each for each in held[start : start + size]) for start in range(first, whole, size)}
    start = min(loudness, key=lambda each: loudness[each])
    return min(whole, start + size // 2)


def main() -> None:
    """Decodes one file."""
    confine(MAX_MEMORY, MAX_CPU_S)
    rate, window_s, max_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    for reply in decode_audio(given.read(), rate, window_s, max_s):
        write_message(taken, msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
