"""Files of sounds become windows, in a process that may die."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from services.gateway.api.errors import RequestError
from services.gateway.audio.audio_decoder import AudioDecoder
from services.gateway.audio.audio_process import AudioRefusal, DecodedAll, DecodedWindow, decode_audio
from tests.support.models.sounds import SAMPLE_RATE, encoded, in_sixteen_bits, sweep, wav
from tests.unit.gateway.api.test_audio import AUDIO

LOUD = np.concatenate([sweep(0, 1.955), np.zeros(160, np.float32), sweep(1, 3.2)])


def test_windows_end_where_it_is_quiet() -> None:
    *windows, end = decode_audio(wav(LOUD), SAMPLE_RATE, 2, 100)
    sound = b"".join(each.samples for each in windows if isinstance(each, DecodedWindow))
    assert sound == in_sixteen_bits(LOUD).tobytes(), "nothing is lost between them"
    lengths = [len(each.samples) // 4 / SAMPLE_RATE for each in windows if isinstance(each, DecodedWindow)]
    assert max(lengths) <= 2
    assert lengths[0] == pytest.approx(1.96, abs=0.006), "in the silence"
    assert [each.start for each in windows if isinstance(each, DecodedWindow)] == pytest.approx(
        [sum(lengths[:i]) for i in range(len(lengths))]
    )
    assert end == DecodedAll(len(LOUD) / SAMPLE_RATE)


async def test_a_process_decodes_no_further_than_it_is_read_and_ends_with_its_request() -> None:
    decoder = AudioDecoder(max_seconds=7200, timeout=30)
    windows = decoder.windows(wav(np.zeros(SAMPLE_RATE * 600, np.float32)), AUDIO)
    others = _children()
    first = await anext(windows)
    assert isinstance(first, DecodedWindow)
    (child,) = _children() - others
    await asyncio.sleep(0.5)  # what it decodes ahead fills the pipe, and nobody reads it any more
    await windows.aclose()
    assert child not in _children()


async def test_a_process_that_dies_or_hangs_is_a_400() -> None:
    for number, why in ((signal.SIGKILL, "died of it"), (signal.SIGSTOP, "takes more than 1 s")):
        decoder, others = AudioDecoder(max_seconds=7200, timeout=1 if number == signal.SIGSTOP else 30), _children()
        windows = decoder.windows(wav(LOUD), AUDIO)
        asked = asyncio.ensure_future(anext(windows))
        while not (found := _children() - others):
            await asyncio.sleep(0)
        os.kill(found.pop(), number)
        with pytest.raises(RequestError, match=why) as error:
            await asked
        assert (error.value.status, error.value.param) == (400, "file")


def _children() -> set[int]:
    """Of this process."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(each) for each in file.read().split()}


@pytest.mark.parametrize(
    ("form", "codec", "allowed"), [("matroska", "wavpack", False), ("matroska", "pcm_s16le", True)]
)
def test_a_codec_that_is_not_named_is_refused(form: str, codec: str, allowed: bool) -> None:
    first, *_ = decode_audio(encoded(LOUD, form, codec, 48_000), SAMPLE_RATE, 30, 100)
    assert isinstance(first, DecodedWindow if allowed else AudioRefusal)
    assert allowed or "its codec is not allowed; pcm_u8" in str(first)


def test_no_file_opens_another_one() -> None:
    """Playlists and lists of files, which FFmpeg knows: none is among the formats."""
    for file in (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"<?xml version='1.0'?><MPD><Period><BaseURL>http://127.0.0.1/</BaseURL></Period></MPD>",
    ):
        (reply,) = decode_audio(file, SAMPLE_RATE, 2, 100)
        assert isinstance(reply, AudioRefusal)
