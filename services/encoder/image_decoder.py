"""Has images decoded in a process of their own, which is ended where it takes too long, and replaced where it dies."""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.encoder import metrics
from services.encoder.image_process import DecodedImage, DecodingRefusal, DecodingReply, DecodingRequest
from shared.machine.helper_pipes import LENGTH_BYTES
from shared.machine.helper_process import end_helper, read_reply, start_helper
from shared.messages.encoder import EncodeInput, FrameGroup

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""A process may die of something else than the image; it is tried once more."""
MODULE = f"{__name__.rpartition('.')[0]}.image_process"
_decoder: msgspec.msgpack.Decoder[DecodingReply] = msgspec.msgpack.Decoder(DecodingReply)


class ImageRefused(Exception):
    """The image has no rows; the text is for the client."""


class DecodedFrames(Struct, frozen=True):
    """Pixels of frames of a video that become rows together."""

    group: FrameGroup
    pixels: bytes

    @staticmethod
    def of(group: FrameGroup, pixels: bytes) -> DecodedFrames:
        """Raises ImageRefused where these are as many as they should be not."""
        if len(pixels) != group.pixel_bytes:
            raise ImageRefused(f"{len(pixels)} bytes of pixels are not allowed; {group.pixel_bytes} are")
        return DecodedFrames(group, pixels)

    @property
    def measures(self) -> dict[str, int]:
        """For logs."""
        return {"width": self.group.width, "height": self.group.height, "frames": self.group.frames}


class ImageDecoder:
    """Owns one decoding process, started with the first image. One image at a time."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that an image may take."""
        self._timeout = timeout
        self._process: Process | None = None
        self._busy = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process; None where there is none just now."""
        return None if self._process is None else self._process.pid

    async def decode(self, question: EncodeInput) -> DecodedImage | DecodedFrames:
        """The pixels of an image, or of frames, which a gateway has decoded (ADR 118). Raises ImageRefused."""
        if question.frames is not None:
            return DecodedFrames.of(question.frames, question.content)
        image = await self._decoded(DecodingRequest(question.content, question.max_side))
        return replace(image, several=question.several)

    async def _decoded(self, request: DecodingRequest) -> DecodedImage:
        asked = msgspec.msgpack.encode(request)
        async with self._busy:
            for _ in range(ATTEMPTS):
                process = self._process or await self._start()
                try:
                    async with asyncio.timeout(self._timeout):
                        reply = await _ask(process, asked)
                except TimeoutError:
                    await self._end("took too long")
                    raise ImageRefused(f"decoding the image takes more than {self._timeout:g} s") from None
                except (OSError, asyncio.IncompleteReadError):
                    await self._end("died")
                    continue
                except BaseException:
                    await self._end("was left")
                    raise
                if isinstance(reply, DecodingRefusal):
                    raise ImageRefused(reply.message)
                return reply
            raise ImageRefused("the image could not be decoded: the process that did died of it")

    async def close(self) -> None:
        """Ends the process."""
        if (process := self._process) is not None:
            self._process = None
            await end_helper(process)

    async def _start(self) -> Process:
        self._process = await start_helper("-m", MODULE)
        return self._process

    async def _end(self, why: str) -> None:
        metrics.DECODERS.inc()
        log.warning("decoder ended", extra={"reason": why})
        await self.close()


async def _ask(process: Process, request: bytes) -> DecodingReply:
    """Raises OSError or IncompleteReadError where the process dies."""
    assert process.stdin is not None
    process.stdin.write(len(request).to_bytes(LENGTH_BYTES, "little"))
    process.stdin.write(request)
    await process.stdin.drain()
    return _decoder.decode(await read_reply(process))
