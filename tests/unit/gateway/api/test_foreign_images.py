"""Images as Anthropic, Ollama and `/v1/responses` have them: one chat, and errors in the client's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.anthropic.request import read_count_tokens, read_messages
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.ollama.request import read_ollama_chat, read_ollama_generate
from services.gateway.api.responses.request import ResponseRequest, read_responses
from services.gateway.parsing.output_dialect import OutputDialect
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import ChatPrompt
from tests.unit.gateway.api.test_images import CARD, LIMITS, URI

DATA = "aW1hZ2U="
ADDRESS = "https://pictures.example/a.png"


def dialect_of(_: Any) -> OutputDialect:
    return OutputDialect()


def messages(*blocks: Any, card: ModelCard = CARD) -> GenerationRequest:
    body = {"model": card.name, "max_tokens": 9, "messages": [{"role": "user", "content": list(blocks)}]}
    return read_messages(msgspec.json.encode({**body, "system": "s"}), [card], LIMITS, dialect_of)


def responses(*parts: Any, card: ModelCard = CARD) -> GenerationRequest:
    body = {"model": card.name, "input": [{"role": "user", "content": list(parts)}], "instructions": "s"}
    asked = read_responses(msgspec.json.encode(body), [card], LIMITS, dialect_of)
    assert isinstance(asked, ResponseRequest)
    return asked.generation


def ollama(text: str, *images: Any, card: ModelCard = CARD) -> GenerationRequest:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": text, "images": list(images)}]
    found = read_ollama_chat(msgspec.json.encode({"model": card.name, "messages": said}), [card], LIMITS, dialect_of)
    assert isinstance(found, GenerationRequest)
    return found


def based(data: str = DATA, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def addressed(url: str = ADDRESS) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def sent(url: Any = URI, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def content(generation: GenerationRequest) -> Any:
    (prompt,) = generation.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.images == tuple(range(len(generation.media)))
    return msgspec.json.decode(prompt.messages)[-1]["content"]


def test_they_become_parts_of_the_same_chat() -> None:
    text, image = {"type": "text", "text": "?"}, {"type": "image"}
    anthropic = messages(based(), {"type": "text", "text": "?"}, addressed())
    assert content(anthropic) == [image, text, image]
    response = responses(sent(), {"type": "input_text", "text": "?"}, sent(ADDRESS, detail="low"))
    assert content(response) == [image, text, image]
    assert [each.max_side for each in response.media] == [None, 512]
    assert content(ollama("?", DATA, DATA)) == [image, image, text]
    body = {"model": CARD.name, "prompt": "?", "images": [DATA]}
    generated = read_ollama_generate(msgspec.json.encode(body), [CARD], LIMITS, dialect_of)
    assert isinstance(generated, GenerationRequest)
    assert content(generated) == [image, text]
    for generation, fields in (
        (anthropic, ["messages[0].content[0].source.data", "messages[0].content[2].source.url"]),
        (response, ["input[0].content[0].image_url", "input[0].content[2].image_url"]),
    ):
        assert [each.field for each in generation.media] == fields
        assert [(each.data, each.url) for each in generation.media] == [(b"image", None), (b"", ADDRESS)]
    assert [(each.field, each.data) for each in generated.media] == [("images[0]", b"image")]


BLIND = replace(CARD, images=None)


@pytest.mark.parametrize(
    ("ask", "field", "why"),
    [
        (lambda: messages(based("*")), "messages[0].content[0].source.data", "base64 of an image's file is"),
        (lambda: messages(based(kind="image/bmp")), "messages[0].content[0].source.media_type", "image/webp"),
        (lambda: messages(addressed("http://other/a")), "messages[0].content[0].source.url", "may not be fetched"),
        (lambda: messages({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.type", "file"),
        (lambda: messages(*4 * [based()]), "messages[0].content[3].source.data", "more than 3 images"),
        (lambda: messages(based(), card=BLIND), "messages[0].content[0].source.data", "seer takes no images"),
        (lambda: responses(sent(None)), "input[0].content[0].image_url", "a data URI, or an address"),
        (lambda: responses(sent(file_id="f")), "input[0].content[0].file_id", "a file of the server's"),
        (lambda: responses(sent(detail="fine")), "input[0].content[0].detail", "'auto', 'low' and 'high' are"),
        (lambda: responses(sent("data:text/html,x")), "input[0].content[0].image_url", "media types"),
        (lambda: responses(sent(), card=BLIND), "input[0].content[0].image_url", "seer takes no images"),
        (lambda: ollama("?", "é"), "messages[1].images[0]", "base64 of an image's file is"),
        (lambda: ollama("?", 7), "messages[1].images", "a list of images' files in base64 is"),
        (lambda: ollama("?", DATA, card=BLIND), "messages[1].images[0]", "seer takes no images"),
    ],
)
def test_what_is_wrong_is_named_as_the_client_knows_it(
    ask: Callable[[], GenerationRequest], field: str, why: str
) -> None:
    with pytest.raises(RequestError) as refused:
        ask()
    assert (refused.value.status, refused.value.param) == (400, field)
    assert why in refused.value.message


def test_images_in_results_of_tools_stand_before_what_the_user_says() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, based()]}
    generation = messages(result, {"type": "text", "text": "?"}, addressed())
    (prompt,) = generation.prompts
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.json.decode(prompt.messages)[1:] == [
        {"role": "tool", "tool_call_id": "t", "content": "seen"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}, {"type": "image"}]},
    ]
    assert [each.field for each in generation.media] == [
        "messages[0].content[0].content[1].source.data",
        "messages[0].content[2].source.url",
    ]


def test_the_prompt_that_is_counted_has_its_images() -> None:
    body = {"model": CARD.name, "messages": [{"role": "user", "content": [based()]}]}
    assert read_count_tokens(msgspec.json.encode(body), [CARD], LIMITS).media == messages(based()).media
