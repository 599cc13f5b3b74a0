"""Has sounds decoded, each by a process of its own, which is ended where it takes too long, and with its request."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncGenerator

import msgspec

from services.gateway.api.errors import RequestError, invalid
from services.gateway.audio.audio_process import (
    AudioRefusal,
    AudioReply,
    DecodedAll,
    DecodedWindow,
)
from services.gateway.metrics import AUDIO_FILES
from shared.machine.helper_process import HelperDied, HelperSlow, helper_replies
from shared.messages.model_card import AudioModel

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

    async def windows(self, file: bytes, audio: AudioModel) -> AsyncGenerator[DecodedWindow | DecodedAll]:
        """The windows of a file, as far as they are asked for, and its end. Raises RequestError 400 for the field
        `file`."""
        async with self._slots:
            outcome = "left"
            replies = helper_replies(
                *("-m", MODULE, str(audio.sample_rate), str(audio.window_s), str(self._max_seconds)),
                given=file,
                timeout=self._timeout,
            )
            try:
                while True:
                    reply = await self._next(replies)
                    if isinstance(reply, AudioRefusal):
                        raise invalid("file", reply.message)
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

    async def _next(self, replies: AsyncGenerator[bytes]) -> AudioReply:
        """Raises RequestError where none comes."""
        try:
            return _decoder.decode(await anext(replies))
        except HelperSlow:
            raise invalid("file", f"decoding a window of the sound takes more than {self._timeout:g} s") from None
        except (HelperDied, msgspec.MsgspecError):
            raise invalid("file", "the sound could not be decoded: the process that did died of it") from None
