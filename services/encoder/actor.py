"""The encoder's shell: images come as files and leave as rows; decoding and the tower are beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.encoder import metrics
from services.encoder.core.row_cache import ImageHash, RowCache, image_hash
from services.encoder.image_decoder import ImageDecoder, ImageRefused
from services.encoder.tower import ImageTower, TowerUnusable
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus
from shared.ids import InstanceId, ModelName
from shared.messages.encoder import EncodeImage, EncoderReply, EncoderReport, ImageRefusal, ImageRows

log = logging.getLogger(__name__)

MAX_PENDING = 64
"""Images that are being encoded or wait for it; further ones are refused."""


class EncoderActor(Actor):
    """Owns the cache of rows, and what is being encoded: an image that is asked for twice is encoded once."""

    service = "encoder"
    tick_every = 1.0

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        model: ModelName,
        load: Callable[[], ImageTower],
        cache_bytes: int,
        decode_s: float,
    ) -> None:
        """`load`: makes the tower, on a thread. `decode_s`: seconds that decoding an image may take."""
        super().__init__(bus, instance)
        self._model, self._load = model, load
        self._cache = RowCache(cache_bytes)
        self._decoder = ImageDecoder(decode_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._tower: ImageTower | None = None
        self._pending: dict[ImageHash, asyncio.Task[EncoderReply]] = {}
        self._hits = self._encoded = 0
        self._failure: BaseException | None = None

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Images to be answered with their rows."""
        return [TopicSubscription(topics.image_requests(self._model), intake=True, request=True)]

    async def set_up(self) -> None:
        """Loads the tower. Raises TowerUnusable."""
        self._tower = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def handle(self, message: Any) -> None:
        """Raises what encoding an image raised that is a bug."""
        if self._failure is not None:
            raise self._failure
        if not isinstance(message, Tick):
            raise TypeError(f"an encoder takes no {type(message).__name__}")

    async def respond(self, request: EncodeImage) -> EncoderReply | asyncio.Future[EncoderReply]:
        """The rows of an image, or a future of them."""
        image = image_hash(request.image, request.salt)
        if (rows := self._cache.find(image)) is not None:
            self._count_hit()
            return ImageRows(rows)
        if (task := self._pending.get(image)) is not None:
            self._count_hit()
            return asyncio.shield(task)
        if len(self._pending) >= MAX_PENDING:
            return ImageRefusal(f"{MAX_PENDING} images wait to be encoded, which is the limit", "overloaded")
        task = self._pending[image] = asyncio.create_task(self._encode(image, request.image))
        metrics.PENDING.set(len(self._pending))
        task.add_done_callback(lambda done: self._finished(image, done))
        return asyncio.shield(task)

    async def _encode(self, image: ImageHash, file: bytes) -> EncoderReply:
        began = time.monotonic()
        assert self._tower is not None, "set up"
        try:
            pixels = await self._decoder.decode(file)
            rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._tower.encode, pixels)
        except (ImageRefused, TowerUnusable) as error:
            metrics.IMAGES.labels("refused").inc()
            log.info("refused", extra={"image": image.hex(), "why": str(error)})
            return ImageRefusal(str(error))
        self._cache.keep(image, rows)
        self._encoded += 1
        metrics.IMAGES.labels("encoded").inc()
        metrics.CACHE_BYTES.set(self._cache.bytes_used)
        metrics.SECONDS.observe(time.monotonic() - began)
        log.info(
            "encoded",
            extra={
                "image": image.hex(),
                "width": pixels.width,
                "height": pixels.height,
                "tokens": rows.count,
                "ms": round((time.monotonic() - began) * 1e3, 1),
            },
        )
        return ImageRows(rows)

    def _count_hit(self) -> None:
        self._hits += 1
        metrics.IMAGES.labels("cached").inc()

    def _finished(self, image: ImageHash, task: asyncio.Task[EncoderReply]) -> None:
        """A bug is raised at the next tick, where it ends the process as any other."""
        del self._pending[image]
        metrics.PENDING.set(len(self._pending))
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    def is_idle(self) -> bool:
        """Whether no image is being encoded."""
        return not self._pending

    def load(self) -> int:
        """Images that are being encoded."""
        return len(self._pending)

    def encoder_report(self) -> EncoderReport:
        """What its heartbeats say."""
        return EncoderReport(model=self._model, hits=self._hits, encoded=self._encoded)

    async def tear_down(self) -> None:
        """Ends the decoding process; the thread ends with what it computes."""
        await self._decoder.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
