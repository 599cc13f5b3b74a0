"""Has sounds decoded, each by a process of its own, which is ended where it takes too long, and with its request."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from services.gateway.api.errors import RequestError, invalid
from services.gateway.audio.audio_process import (
    AudioRefusal,
    AudioReply,
    DecodedAll,
    DecodedWindow,
)
from services.gateway.decoding.replies import next_reply
from services.gateway.metrics import AUDIO_FILES
from shared.machine.helper_process import helper_replies
from shared.messages.model_card import AudioModel, SoundModel

log = logging.getLogger(__name__)

MODULE = f"{__name__.rpartition('.')[0]}.audio_process"
MAX_PROCESSES = 8
"""Sounds that one gateway decodes at the same time; further ones wait."""
_decoder: msgspec.msgpack.Decoder[AudioReply] = msgspec.msgpack.Decoder(AudioReply)


class AudioDecoder:
    """Owns how many processes there are."""

    def __init__(self, max_seconds: float, timeout: float) -> None:
        """`max_seconds`: of a sound. `timeout`: seconds that a window may take."""
        self._max_seconds, self._timeout = max_seconds, timeout
        self._slots = asyncio.Semaphore(MAX_PROCESSES)

    @staticmethod
    def check_installed() -> None:
        """Raises RequestError 501 where the library is missing."""
        if importlib.util.find_spec("av") is None:
            raise RequestError(501, "no sounds are decoded here: pip install 'baton-serve[audio]'")

    async def whole(self, file: bytes, sounds: SoundModel, field: str) -> bytes:
        """The samples of a sound that is no longer than a window. Raises RequestError 400 for the client's `field`."""
        self.check_installed()
        async with aclosing(self.windows(file, sounds, field)) as windows:
            first = await anext(windows)
            assert isinstance(first, DecodedWindow), "a sound without one is refused"
            if isinstance(await anext(windows), DecodedWindow):
                raise invalid(
                    field, f"a sound of more than {sounds.window_s} s is not allowed: the model hears no more"
                )
        return first.samples

    async def windows(
        self, file: bytes, audio: AudioModel | SoundModel, field: str = "file"
    ) -> AsyncGenerator[DecodedWindow | DecodedAll]:
        """The windows of a file, as far as they are asked for, and its end. Raises RequestError 400 for the client's
        `field`."""
        async with self._slots:
            outcome = "left"
            replies = helper_replies(
                *("-m", MODULE, str(audio.sample_rate), str(audio.window_s), str(self._max_seconds)),
                given=file,
                timeout=self._timeout,
            )
            try:
                while True:
                    reply = await next_reply(
                        *(replies, _decoder, field), noun="sound", part="a window", timeout=self._timeout
                    )
                    if isinstance(reply, AudioRefusal):
                        raise invalid(field, reply.message)
                    outcome = "decoded" if isinstance(reply, DecodedAll) else "left"
                    yield reply
                    if isinstance(reply, DecodedAll):
                        return
            except RequestError as error:
                outcome = "refused"
                log.info("refused", extra={"why": error.message})
                raise
            finally:
                AUDIO_FILES.labels(outcome).inc()
                await replies.aclose()
