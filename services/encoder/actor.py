"""The encoder's shell: images come as files and leave as rows; decoding and the tower are beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from services.encoder import metrics
from services.encoder.audio_tower import AudioTower, SampleReader
from services.encoder.core.image_queue import ImageQueue
from services.encoder.core.row_table import ImageHash, image_hash
from services.encoder.image_decoder import ImageDecoder, ImageRefused
from services.encoder.prompt_tower import PromptTower, TokenReader
from services.encoder.rows_keeper import RowsKeeper, RowsUnkept
from services.encoder.sound_tower import MediaReader, SoundTower
from services.encoder.tower import ImageTower, TowerUnusable
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus
from shared.ids import InstanceId, ModelName
from shared.messages.encoder import (
    EncodeInput,
    EncoderRefusal,
    EncoderReply,
    EncoderReport,
    EncoderRows,
    ForgetRows,
    ReadRows,
    RenewRows,
    RowsPiece,
    TokenTimes,
    WrittenTokens,
)
from shared.models.library_builds import first_line

log = logging.getLogger(__name__)

Tower = ImageTower | AudioTower | SoundTower | PromptTower
Reader = ImageDecoder | SampleReader | MediaReader | TokenReader
Computed = TypeVar("Computed")

MAX_PENDING = 64
"""Images that are being encoded or wait for it; further ones are refused."""
MAX_OF_A_CLIENT = 32
"""Of them, those that wait of one client."""
PATIENCE = 15.0
"""Seconds after which an image is left out that no gateway has asked for again, as they do every 5 s."""
AT_ONCE = 2


class _PendingImage(NamedTuple):
    question: EncodeInput
    reply: asyncio.Future[EncoderReply]


class EncoderActor(Actor):
    """Owns the rows of images, and what is being encoded: an image that is asked for twice is encoded once."""

    service = "encoder"
    tick_every = 1.0

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        model: ModelName,
        load: Callable[[], Tower],
        rows: RowsKeeper,
        decoder: Reader,
    ) -> None:
        """`load`: makes the tower, on a thread. `decoder`: makes what the tower takes of what is sent."""
        super().__init__(bus, instance)
        self._model, self._load = model, load
        self._rows = rows
        self._decoder = decoder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._tower: Any = None
        self._pending: dict[ImageHash, _PendingImage] = {}
        """Those that wait, and those that are being encoded."""
        self._queue = ImageQueue(PATIENCE)
        self._arrived = asyncio.Event()
        self._hits = self._encoded = 0

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Images to be answered with where their rows are; who needs rows, and who reads them by the bus."""
        return [
            TopicSubscription(topics.image_requests(self._model), intake=True, request=True),
            TopicSubscription(topics.rows_leases(self._model)),
            TopicSubscription(topics.kept_rows(self.instance), request=True),
        ]

    async def set_up(self) -> None:
        """Loads the tower. Raises TowerUnusable."""
        self._tower = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def handle(self, message: Any) -> None:
        """Takes the time, what open requests need, and that the rest is to be forgotten."""
        match message:
            case Tick():
                self._rows.tick()
                for image in self._queue.expire(time.monotonic()):
                    self._answer(image, EncoderRefusal("nobody asked for it any more", "overloaded"))
            case RenewRows(names):
                self._rows.renew(names)
            case ForgetRows():
                self._rows.forget()
            case _:
                raise TypeError(f"an encoder takes no {type(message).__name__}")

    async def respond(self, request: EncodeInput | ReadRows) -> EncoderReply | RowsPiece | asyncio.Future[EncoderReply]:
        """Where the rows of an image are, or a future of that; a piece of rows."""
        if isinstance(request, ReadRows):
            return self._rows.piece(request)
        if not (isinstance(self._tower, ImageTower) and self._tower.heeds_others(sound=request.sound)):
            request = replace(request, several=False)
        image, now = image_hash(request), time.monotonic()
        if request.written is None and (rows := self._rows.find(image)) is not None:
            self._count_hit()
            return EncoderRows(rows)
        if (pending := self._pending.get(image)) is not None:
            self._count_hit()
            self._queue.renew(image, now)
            return asyncio.shield(pending.reply)
        if len(self._pending) >= MAX_PENDING or self._queue.count(request.turn) >= MAX_OF_A_CLIENT:
            limit = f"{MAX_PENDING} inputs wait to be encoded, or {MAX_OF_A_CLIENT} of this client, which is the limit"
            return EncoderRefusal(limit, "overloaded")
        pending = self._pending[image] = _PendingImage(request, asyncio.get_running_loop().create_future())
        self._queue.add(image, request.turn, now)
        self._arrived.set()
        metrics.PENDING.set(len(self._pending))
        return asyncio.shield(pending.reply)

    async def background(self) -> None:
        """Encodes what waits, until it is cancelled: a file is decoded while the tower computes another. Raises what
        decoding or keeping rows raises that is a bug."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._encode_in_turn())

    async def _encode_in_turn(self) -> None:
        while True:
            if (image := self._queue.take()) is None:
                self._arrived.clear()
                await self._arrived.wait()
            else:
                self._answer(image, await self._encode(image, self._pending[image].question))

    def _answer(self, image: ImageHash, reply: EncoderReply) -> None:
        self._pending.pop(image).reply.set_result(reply)
        metrics.PENDING.set(len(self._pending))

    async def _encode(self, image: ImageHash, question: EncodeInput) -> EncoderReply:
        began = time.monotonic()
        assert self._tower is not None, "set up"
        try:
            pixels = await self._decoder.decode(question)
            if question.written is not None:
                return await self._align(pixels, question.written)
            rows = await self._computed(self._tower.encode, pixels)
            kept = await self._rows.keep(image, rows)
        except (ImageRefused, TowerUnusable, RowsUnkept) as error:
            metrics.IMAGES.labels("refused").inc()
            log.info("refused", extra={"image": image.hex(), "why": str(error)})
            later = isinstance(error, RowsUnkept) and error.ever
            return EncoderRefusal(str(error), "overloaded" if later else "invalid_request")
        self._encoded += 1
        metrics.IMAGES.labels("encoded").inc()
        metrics.SECONDS.observe(time.monotonic() - began)
        log.info(
            "encoded",
            extra={
                "image": image.hex(),
                **pixels.measures,
                "tokens": rows.count,
                "ms": round((time.monotonic() - began) * 1e3, 1),
            },
        )
        return EncoderRows(kept)

    async def _align(self, window: Any, written: WrittenTokens) -> TokenTimes:
        """Raises TowerUnusable."""
        if not isinstance(self._tower, AudioTower):
            raise TowerUnusable("times of tokens are those of models that write down what is said")
        return TokenTimes(await self._computed(self._tower.times, window, written))

    async def _computed(self, compute: Callable[..., Computed], *given: Any) -> Computed:
        """What the tower makes of an input, on its thread. Raises TowerUnusable for whatever the library raises over
        it: what strangers send ends no process, and would be sent again to the next one."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, compute, *given)
        except TowerUnusable:
            raise
        except Exception as error:
            log.exception("the tower failed")
            raise TowerUnusable(f"the model's tower does not take it: {first_line(error)}") from None

    def _count_hit(self) -> None:
        self._hits += 1
        metrics.IMAGES.labels("cached").inc()

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
        self._rows.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
