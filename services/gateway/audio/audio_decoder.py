"""Has sounds decoded, each by a process of its own, which is ended where it takes too long, and with its request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator

import msgspec

from services.gateway.api.errors import RequestError, invalid
from services.gateway.audio.audio_process import (
    LENGTH_BYTES,
    AudioRefusal,
    AudioReply,
    DecodedAll,
    DecodedWindow,
)
from services.gateway.metrics import AUDIO_FILES
from shared.machine.helper_process import end_helper, start_helper
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
            process = await start_helper(
                *("-m", MODULE, str(audio.sample_rate), str(audio.window_s), str(self._max_seconds))
            )
            outcome = "left"
            try:
                feeding = asyncio.create_task(_feed(process, file))
                while True:
                    reply = await self._next(process)
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
                feeding.cancel()
                await end_helper(process)

    async def _next(self, process: Process) -> AudioReply:
        """Raises RequestError where none comes."""
        try:
            async with asyncio.timeout(self._timeout):
                return await _read(process)
        except TimeoutError:
            raise invalid("file", f"decoding a window of the sound takes more than {self._timeout:g} s") from None
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError):
            raise invalid("file", "the sound could not be decoded: the process that did died of it") from None


async def _feed(process: Process, file: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # whoever reads says so
        process.stdin.write(file)
        await process.stdin.drain()
        process.stdin.close()


async def _read(process: Process) -> AudioReply:
    """Raises OSError or IncompleteReadError where the process dies."""
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
    return _decoder.decode(await process.stdout.readexactly(length))
