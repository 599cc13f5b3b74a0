"""Parts of a chat stand where its template shows them, each kind in its own order."""

from __future__ import annotations

import pytest

from services.tokenizer.core.chat_parts import ChatParts, in_words
from services.tokenizer.core.chat_template import (
    IMAGE_TOKEN,
    SOUND_TOKEN,
    VIDEO_FRAME,
    VIDEO_INTRO,
    VIDEO_OUTRO,
    VIDEO_ROW,
    VIDEO_TOKEN,
)
from services.tokenizer.core.refusal import PromptRefused
from shared.ids import InstanceId, RowsName
from shared.messages.generation import MediaRows, PromptEmbeds
from shared.messages.tokenizer import ChatPrompt, VideoParts

BOTH = ChatParts({IMAGE_TOKEN: "<image>", SOUND_TOKEN: "<sound>"})
ALONE = ChatParts({IMAGE_TOKEN: "<sound>"})
"""Of a model that hears and does not see."""


def chat(images: tuple[int, ...] = (), sounds: tuple[int, ...] = ()) -> ChatPrompt:
    rows = PromptEmbeds(dtype="float32", size=1, rows=b"")
    return ChatPrompt(messages=b"[]", embeds=(rows,) * len(images + sounds), images=images, sounds=sounds)


def test_images_and_sounds_stand_in_the_order_of_a_chat() -> None:
    text = "<image> and <sound>, <sound> and <image>"
    given = chat(images=(0, 3), sounds=(1, 2))
    assert BOTH.placed(text, given) == (text, [0, 1, 2, 3])
    assert [BOTH.token_of(given, part) for part in range(4)] == ["<image>", "<sound>", "<sound>", "<image>"]
    assert ALONE.placed("<sound><sound>", chat(images=(0, 1))) == ("<sound><sound>", [0, 1])


@pytest.mark.parametrize(
    ("parts", "given", "what"),
    [
        (BOTH, chat(images=(0,)), "each of the 1 images and parts of type prompt_embeds once"),
        (BOTH, chat(images=(0,), sounds=(1,)), "each of the 2 images and sounds and parts of type prompt_embeds once"),
        (ALONE, chat(images=(0,)), "each of the 1 images or sounds and parts of type prompt_embeds once"),
    ],
)
def test_what_a_template_does_not_show_is_named(parts: ChatParts, given: ChatPrompt, what: str) -> None:
    with pytest.raises(PromptRefused) as refused:
        parts.placed("nothing", given)
    assert what in refused.value.message


def test_images_beside_a_chat_have_a_token_each_from_which_on_they_are_seen() -> None:
    kept = MediaRows(RowsName(bytes(16)), 3, InstanceId("encoder-1"))
    first, second = (
        PromptEmbeds(dtype="float32", size=1, rows=bytes(8), runs=((0, 2),), encoded=True),
        PromptEmbeds(dtype="float32", size=1, rows=b"", runs=((0, 3),), media=(kept,), encoded=True),
    )
    given = ChatPrompt(messages=b"[]", embeds=(first, second), images=(0, 1))
    ids, embeds = BOTH.joined_beside([5, None, 6, None], given, [1, 0], 99)
    assert (ids, embeds.runs, embeds.media) == ([5, 99, 6, 99], ((1, 3), (3, 2)), (kept, None))
    assert embeds.encoded
    assert embeds.fits(4)
    with pytest.raises(PromptRefused, match="each of the 2 images"):
        BOTH.joined_beside([5, None], given, [1, 0], 99)


def test_small_numbers_have_words() -> None:
    """As of the package num2words, which the library's processor of SmolVLM has them of."""
    found = [in_words(each) for each in (1, 12, 13, 19, 20, 21, 40, 64, 99)]
    words = "one twelve thirteen nineteen twenty twenty-one forty sixty-four ninety-nine"
    assert found == words.split()


def test_a_video_is_introduced_and_followed_by_what_its_model_reads() -> None:
    tokens = {VIDEO_TOKEN: "<video>", VIDEO_ROW: "<image>", VIDEO_FRAME: "|{clock}:{rows}", VIDEO_OUTRO: "."}
    parts = ChatParts({**tokens, VIDEO_INTRO: "{count} in {lasts}"})
    rows = PromptEmbeds(dtype="float32", size=1, rows=bytes(4))
    video = VideoParts((0, 1), (0.5, 61.9), seconds=3725.9)
    text, order = parts.placed("see <video> here", ChatPrompt(messages=b"[]", embeds=(rows, rows), videos=(video,)))
    assert (text, order) == ("see two in 1:02:05|00:00:<image>|01:01:<image>. here", [0, 1])
