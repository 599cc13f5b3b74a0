"""Rows of images in a chat beside rows that its client made."""

from __future__ import annotations

import pickle

import pytest
from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.media.source import VIDEO, MediaSource
from services.gateway.images.image_rows import ImageRowsClient, _with_rows
from services.gateway.videos.video_rows import MediaEmbeds
from shared.bus.memory_bus import MemoryBus
from shared.ids import InstanceId, ModelName, RowsName
from shared.messages.encoder import EncodeInput
from shared.messages.generation import (
    MAX_MEDIA_BYTES,
    EmbeddingDtype,
    MediaRows,
    PromptEmbeds,
    SamplingOptions,
    StopConditions,
)
from shared.messages.model_card import VideoModel
from shared.messages.tokenizer import ChatPrompt, VideoParts
from tests.unit.gateway.api.test_images import CARD

FIELD = "messages[0].content[0].image_url.url"


def rows(dtype: EmbeddingDtype, size: int, count: int = 1) -> PromptEmbeds:
    return PromptEmbeds(dtype=dtype, size=size, rows=bytes(size * count * (4 if dtype == "float32" else 2)))


@pytest.mark.parametrize(
    ("clients", "why"),
    [
        (rows("float16", 8), "images have rows of float32; parts of type prompt_embeds with others are not"),
        (rows("float32", 4), "images of this model have rows of 8; parts of type prompt_embeds do not"),
    ],
)
def test_rows_that_do_not_go_with_an_images_are_refused(clients: PromptEmbeds, why: str) -> None:
    prompt = ChatPrompt(messages=b"[]", embeds=(rows("float32", 1), clients), images=(0,))
    with pytest.raises(RequestError, match=why) as error:
        _with_rows(prompt, (MediaSource(field=FIELD, number=0, data=b""),), [MediaEmbeds([rows("float32", 8)])])
    assert (error.value.status, error.value.param) == (400, FIELD)


def test_more_rows_than_a_chat_may_have_are_refused() -> None:
    kept = MediaRows(RowsName(bytes(16)), MAX_MEDIA_BYTES // 64 + 1, InstanceId("encoder-1"))
    image = PromptEmbeds(dtype="float32", size=8, rows=b"", runs=((0, kept.count),), media=(kept,))
    prompt = ChatPrompt(messages=b"[]", embeds=(rows("float32", 8),) * 2, images=(0, 1))
    sources = tuple(MediaSource(field=FIELD, number=number, data=b"") for number in (0, 1))
    with pytest.raises(
        RequestError, match=f"134217792 bytes of images' and videos' rows are not allowed in one chat; {2**27} are"
    ):
        _with_rows(prompt, sources, [MediaEmbeds([image]), MediaEmbeds([image])])


def test_an_images_rows_stand_in_its_place() -> None:
    prompt = ChatPrompt(messages=b"[]", embeds=(rows("float32", 1), rows("float32", 8)), images=(0,))
    filled = _with_rows(prompt, (MediaSource(field=FIELD, number=0, data=b""),), [MediaEmbeds([rows("float32", 8, 3)])])
    assert [each.count for each in filled.embeds] == [3, 1]


def test_a_videos_further_rows_stand_behind_all_others() -> None:
    """So that the numbers of other parts, which messages name, stay what they are."""
    prompt = ChatPrompt(messages=b"[]", embeds=(rows("float32", 1), rows("float32", 8)), images=())
    source = MediaSource(field=FIELD, number=0, kind=VIDEO)
    filled = _with_rows(prompt, (source,), [MediaEmbeds([rows("float32", 8, n) for n in (3, 4, 5)], (0.5, 1.5, 2.5))])
    assert [each.count for each in filled.embeds] == [3, 1, 4, 5]
    assert filled.videos == (VideoParts((0, 2, 3), (0.5, 1.5, 2.5)),)


def of_chat(media: tuple[MediaSource, ...], videos: VideoModel | None = None) -> GenerationRequest:
    prompt = ChatPrompt(messages=b"[]", embeds=len(media) * (rows("float32", 1),), images=tuple(range(len(media))))
    return GenerationRequest(
        kind="chat",
        model=replace(CARD, videos=videos),
        prompts=(prompt,),
        n=1,
        seed=None,
        sampling=SamplingOptions(seed=0),
        stopping=StopConditions(),
        stream=None,
        media=media,
    )


class Encoding(ImageRowsClient):
    """Keeps what an encoder would be asked."""

    def __init__(self) -> None:
        super().__init__(MemoryBus())
        self.asked: list[EncodeInput] = []

    async def encoded(self, field: str, question: EncodeInput, model: ModelName) -> PromptEmbeds:
        self.asked.append(question)
        return rows("float32", 8)


async def test_an_encoder_is_told_whether_an_image_is_alone_in_its_chat() -> None:
    images = [MediaSource(field=FIELD, number=number, data=b"file") for number in (0, 1)]
    for media in (images[:1], images):
        client = Encoding()
        await client.filled(of_chat(tuple(media)))
        assert [each.several for each in client.asked] == len(media) * [len(media) > 1]


async def test_what_another_process_has_read_is_what_it_is() -> None:
    """As large bodies are: an image stays an image, a video a video."""
    read = [MediaSource(field=FIELD, number=0, data=b"file"), MediaSource(field=FIELD, number=0, data=b"x", kind=VIDEO)]
    client = Encoding()
    for source in pickle.loads(pickle.dumps(read)):
        generation = of_chat((source,), VideoModel())
        if source.kind == VIDEO:
            with pytest.raises(RequestError, match="the file is no video"):
                await client.filled(generation)
        else:
            await client.filled(generation)
    assert [each.content for each in client.asked] == [b"file"]
