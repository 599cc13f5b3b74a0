"""Images in a chat's messages: how they may be given, from where they may come, and what is refused at once."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.chat import read_chat
from services.gateway.api.embeds.images import check_url
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.media.source import IMAGE, MAX_VIDEO_BYTES, SOUND, VIDEO
from services.gateway.api.pooling.embeddings import read_embedding
from shared.ids import ModelName
from shared.messages.encoder import MAX_IMAGE_BYTES
from shared.messages.model_card import ModelCard, PoolingCard, SoundModel, VideoModel
from shared.messages.tokenizer import ChatPrompt

CARD = ModelCard(
    name=ModelName("seer"),
    max_model_len=2048,
    vocab_size=2048,
    eos_token_ids=(2,),
    dtype="float32",
    created=1,
    images=64,
)
LIMITS = RequestLimits(max_images=3, max_videos=2, image_hosts=("pictures.example", "localhost:8080"))
URI = "data:image/png;base64,aW1hZ2U="


def image(url: Any = URI, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat(*parts: Any, card: ModelCard = CARD, **fields: Any) -> GenerationRequest:
    body = {"model": card.name, "messages": [{"role": "user", "content": list(parts)}], **fields}
    return read_chat(msgspec.json.encode(body), [card], LIMITS)


def refusal(*parts: Any, card: ModelCard = CARD, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        chat(*parts, card=card, **fields)
    assert error.value.status == 400
    return error.value


def test_images_stand_as_parts_in_the_order_of_the_messages() -> None:
    generation = chat(
        image(), "and", image("https://pictures.example/a.png", detail="low"), {"type": "text", "text": "?"}
    )
    (prompt,) = generation.prompts
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.json.decode(prompt.messages)[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    assert prompt.images == (0, 1)
    assert [(each.number, each.data, each.url, each.max_side) for each in generation.media] == [
        (0, b"image", None, None),
        (1, b"", "https://pictures.example/a.png", 512),
    ]
    assert [chat(image(detail=detail)).media[0].max_side for detail in ("auto", "high")] == [None, None]
    assert generation.media[1].field == "messages[0].content[2].image_url.url"
    assert chat({"type": "text", "text": "?"}).media == ()


@pytest.mark.parametrize(
    "uri",
    [
        *("data:image/PNG;base64,aW1hZ2U=", "DATA:image/png;a=b;BASE64,aW1hZ2U=", "data:image/webp,image"),
        "data:image/jpg;base64,aW1hZ2U=",
    ],
)
def test_data_uris_are_read_as_they_may_be_written(uri: str) -> None:
    assert chat(image(uri)).media[0].data == b"image"


@pytest.mark.parametrize(
    ("part", "field", "why"),
    [
        (image("data:text/html;base64,aW1hZ2U="), "url", "'text/html' is not allowed; of media types image/png,"),
        (image("data:image/png;base64,aW1h*2U="), "url", "a data URI in base64 is"),
        (image("data:image/png;base64,aW1hZ2U"), "url", "a data URI in base64 is"),
        (image("data:image/png;base64,é"), "url", "a data URI in base64 is"),
        (image("data:image/png;base64,"), "url", "the image is empty"),
        (image("data:nothing"), "url", "data:image/png;base64,… is"),
        (image("file:///etc/passwd"), "url", "an http or https URL, or a data URI, is"),
        (image("ftp://pictures.example/a"), "url", "an http or https URL, or a data URI, is"),
        (image("http:///a"), "url", "an http or https URL, or a data URI, is"),
        (image("http://pictures.example:99999/a"), "url", "an http or https URL, or a data URI, is"),
        (image("http://[::1/a"), "url", "an http or https URL, or a data URI, is"),
        (image("http://bücher.example/a"), "url", "an http or https URL, or a data URI, is"),
        (image("http://me:secret@pictures.example/a"), "url", "without a user and a password it is"),
        (image("http://pictures.example:81/a"), "url", "allowed are localhost:8080, pictures.example"),
        (image("http://other.pictures.example/a"), "url", "may not be fetched from 'other.pictures.example:80'"),
        (image("http://pictures.example/" + 2100 * "a"), "url", "addresses of 2048 at most are allowed"),
        (image(7), "", r"{\"url\": \"…\"} is"),
        (image(detail="fine"), "detail", "'fine' is not allowed; 'auto', 'low' and 'high' are"),
        (image(uuid="x"), "uuid", "'uuid' of an image is not supported"),
        ({"type": "image_url", "image_url": URI}, "", r"{\"url\": \"…\"} is"),
        ({"type": "image_url"}, "", "None is not allowed"),
    ],
)
def test_what_is_no_image_or_from_nowhere_allowed_is_refused(part: Any, field: str, why: str) -> None:
    error = refusal({"type": "text", "text": "x"}, part)
    assert why.replace('\\"', '"') in error.message
    assert error.param == "messages[0].content[1].image_url" + (f".{field}" if field else "")


def test_too_much_is_refused() -> None:
    large = base64.b64encode(bytes(MAX_IMAGE_BYTES + 1)).decode()
    assert f"of {MAX_IMAGE_BYTES} at most are" in refusal(image("data:image/png;base64," + large)).message
    assert (
        f"{MAX_IMAGE_BYTES} bytes at most are allowed"
        in refusal(image("data:image/png;base64," + large + "AAAA")).message
    )
    assert "more than 3 images are not allowed in one chat" in refusal(*4 * [image()]).message


def test_other_media_and_models_without_images_are_refused() -> None:
    blind = replace(CARD, images=None)
    error = refusal(image(), card=blind)
    assert error.message == (
        "messages[0].content[0].type: a part of type 'image_url', which is not text, is not supported: "
        "seer takes no images"
    )
    assert (error.param, error.code) == ("messages[0].content[0].type", "unsupported_parameter")
    for kind in ("input_audio", "video", "image", "input_image"):
        assert "is not supported" in refusal({"type": kind}).message


def test_sounds_of_a_model_that_hears_alone_stand_in_the_place_of_images() -> None:
    """As those of 0.3.0 do, so that its tokenizers find them, too."""
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    both = replace(CARD, sounds=SoundModel(64, 16_000, 30))
    for parts, card, expected in (
        ([image(), sound], both, ((0,), (1,))),
        ([sound], both, ((), (0,))),
        ([sound, sound], replace(both, images=None), ((0, 1), ())),
    ):
        (prompt,) = chat(*parts, card=card).prompts
        assert isinstance(prompt, ChatPrompt)
        assert (prompt.images, prompt.sounds) == expected


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:audio/x-wav;base64,UklGRg==", None),
        ("http://pictures.example/a.mp3", None),
        ("data:image/png;base64,UklGRg==", "'image/png' is not allowed; of media types audio/… are"),
        ("http://other.example/a.mp3", "sounds may not be fetched from 'other.example:80'"),
        ("data:audio/wav;base64,", "the sound is empty"),
    ],
)
def test_sounds_may_have_an_address(url: str, why: str | None) -> None:
    part = {"type": "audio_url", "audio_url": {"url": url}}
    card = replace(CARD, images=None, sounds=SoundModel(64, 16_000, 30))
    if why is not None:
        assert why in refusal(part, card=card).message
        return
    (media,) = chat(part, card=card).media
    assert (media.kind, media.url or media.data) == (SOUND, url if url.startswith("http") else b"RIFF")


def test_videos_are_given_as_images_are() -> None:
    seer = replace(CARD, videos=VideoModel())
    given = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aW1hZ2U="}}
    generation = chat(image(), given, card=seer)
    (prompt,) = generation.prompts
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.json.decode(prompt.messages)[0]["content"] == [{"type": "image"}, {"type": "video"}]
    assert (prompt.images, [each.kind for each in generation.media]) == ((0,), [IMAGE, VIDEO])
    assert "seer takes no videos" in refusal(given).message
    assert "more than 2 videos are not allowed in one chat" in refusal(*3 * [given], card=seer).message
    for url, why in (
        ("data:video/quicktime;base64,aW1hZ2U=", "of media types video/mp4, video/webm are"),
        ("data:video/mp4;base64,", "the video is empty"),
        ("https://elsewhere.example/a.mp4", "videos may not be fetched from 'elsewhere.example:443'"),
        ("data:video/mp4;base64," + MAX_VIDEO_BYTES // 3 * 4 * "A" + 8 * "A", f"videos of {MAX_VIDEO_BYTES} bytes at"),
    ):
        error = refusal({"type": "video_url", "video_url": {"url": url}}, card=seer)
        assert why in error.message
        assert error.param == "messages[0].content[0].video_url.url"
    error = refusal({"type": "video_url", "video_url": {"url": URI, "detail": "auto"}}, card=seer)
    assert "'detail' of a video is not supported" in error.message
    with_field = refusal(given, card=seer, echo=True)
    assert "not allowed together with videos" in with_field.message


@pytest.mark.features("images", "pooling", refused=True)
def test_no_vector_is_made_of_a_chat_with_an_image() -> None:
    pooling = PoolingCard(pooling="last", normalize=True, size=64)
    body = {"model": CARD.name, "messages": [{"role": "user", "content": [image()]}]}
    with pytest.raises(RequestError) as error:
        read_embedding(msgspec.json.encode(body), [replace(CARD, pooling=pooling)], LIMITS)
    assert (error.value.status, error.value.param) == (400, "messages[0].content[0].type")
    assert "is not supported" in error.value.message


@pytest.mark.features("images", "prompt logprobs", refused=True)
@pytest.mark.features("images", "beam search", refused=True)
@pytest.mark.features("images", "logits processors", refused=True)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vllm_xargs", {"begin_with": [1]}),
        *(("echo", True), ("use_beam_search", True), ("prompt_logprobs", 1), ("truncate_prompt_tokens", 5)),
        ("repetition_penalty", 1.1),
    ],
)
def test_what_needs_the_tokens_of_a_prompt_is_refused_beside_images(field: str, value: Any) -> None:
    error = refusal(image(), **{field: value})
    assert error.param == field
    assert "images" in error.message


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://Pictures.Example./a?b#c", "pictures.example", 443),
        ("http://pictures.example:80/", "pictures.example", 80),
        ("http://localhost:8080/x", "localhost", 8080),
    ],
)
def test_an_allowed_address_names_the_host_that_is_looked_up(url: str, host: str, port: int) -> None:
    parts = check_url(url, "url", LIMITS.image_hosts)
    assert (parts.hostname, parts.port, parts.fragment) == (host, port, "")
