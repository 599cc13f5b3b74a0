"""Has videos decoded, each by a process of its own, which is ended where it takes too long, and with its request."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncGenerator

import msgspec

from services.gateway.api.errors import RequestError, invalid
from services.gateway.decoding.replies import next_reply
from services.gateway.metrics import VIDEO_FILES
from services.gateway.videos.video_process import DecodedGroup, VideoRefusal, VideoReply, VideoShape
from shared.machine.helper_process import helper_replies
from shared.messages.model_card import VideoModel

log = logging.getLogger(__name__)

MODULE = f"{__name__.rpartition('.')[0]}.video_process"
MAX_PROCESSES = 4
"""Videos that one gateway decodes at the same time; further ones wait."""
_decoder: msgspec.msgpack.Decoder[VideoReply] = msgspec.msgpack.Decoder(VideoReply)


class VideoDecoder:
    """Owns how many processes there are."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that reading the file may take, and then each two frames."""
        self._timeout = timeout
        self._slots = asyncio.Semaphore(MAX_PROCESSES)

    async def groups(self, file: bytes, field: str, how: VideoModel) -> AsyncGenerator[VideoShape | DecodedGroup]:
        """What the video is, and its frames as they become rows, as far as they are asked for. Raises RequestError 400
        for the client's `field`, 501 where the library is missing."""
        if importlib.util.find_spec("av") is None:
            raise RequestError(501, "no videos are decoded here: pip install 'baton-serve[video]'", param=field)
        async with self._slots:
            outcome, left = "left", 1
            replies = helper_replies("-m", MODULE, msgspec.json.encode(how).decode(), given=file, timeout=self._timeout)
            try:
                while left:
                    reply = await next_reply(
                        *(replies, _decoder, field), noun="video", part="two frames", timeout=self._timeout
                    )
                    if isinstance(reply, VideoRefusal):
                        raise invalid(field, reply.message)
                    if isinstance(reply, VideoShape):
                        left = how.groups(len(reply.times))
                    else:
                        left -= 1
                    outcome = "left" if left else "decoded"
                    yield reply
            except RequestError as error:
                outcome = "refused"
                log.info("refused", extra={"why": error.message})
                raise
            finally:
                VIDEO_FILES.labels(outcome).inc()
                await replies.aclose()
