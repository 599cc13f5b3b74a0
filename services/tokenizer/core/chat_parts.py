"""Where a rendered chat has parts that are no text, and the prompt that it is with their rows. No bus, no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

from msgspec.structs import replace

from services.tokenizer.core.chat_template import (
    IMAGE_BOUND,
    IMAGE_END,
    IMAGE_FOLLOWED,
    IMAGE_MARK,
    IMAGE_NUMBERED,
    IMAGE_ROW,
    IMAGE_TOKEN,
    SOUND_TOKEN,
    VIDEO_END,
    VIDEO_FRAME,
    VIDEO_INTRO,
    VIDEO_OUTRO,
    VIDEO_ROW,
    VIDEO_START,
    VIDEO_TOKEN,
)
from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.vocabulary import PLACEHOLDER
from shared.messages.generation import FrameOffset, ImageGrid, MediaRows, PromptEmbeds
from shared.messages.tokenizer import ChatPrompt, VideoParts, embeds_placeholder

_UP_TO_19 = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """In English, of 0 to 99, which are more than a video has frames."""
    if number < len(_UP_TO_19):
        return _UP_TO_19[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_UP_TO_19[ones]}" if ones else "")


_NUMBERED = re.escape(embeds_placeholder(0)).replace("0", r"(?P<number>\d{1,9})")


class ChatParts:
    """Knows what stands for parts in the prompts of one model. Stateless."""

    def __init__(self, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: see `IMAGE_TOKENS`, `VIDEO_TOKENS` and `SOUND_TOKEN`."""
        self._image, self._image_end = special_tokens.get(IMAGE_TOKEN, ""), special_tokens.get(IMAGE_END, "")
        self._mark, self._image_row = special_tokens.get(IMAGE_MARK), special_tokens.get(IMAGE_ROW, self._image)
        self._numbered = special_tokens.get(IMAGE_NUMBERED, "{rows}")
        self._bound, self._followed = special_tokens.get(IMAGE_BOUND, ""), special_tokens.get(IMAGE_FOLLOWED, "")
        self._sound = special_tokens.get(SOUND_TOKEN, "")
        self._shown = "images" if SOUND_TOKEN in special_tokens else "images or sounds"
        self._video = special_tokens.get(VIDEO_TOKEN, "")
        self._row, self._frame = special_tokens.get(VIDEO_ROW, self._video), special_tokens.get(VIDEO_FRAME)
        self._intro, self._outro = special_tokens.get(VIDEO_INTRO, ""), special_tokens.get(VIDEO_OUTRO, "")
        self._around = special_tokens.get(VIDEO_START, ""), special_tokens.get(VIDEO_END, "")

    def tokens(self, chat: ChatPrompt) -> list[str]:
        """Those that stand for rows of a chat's images, videos and sounds."""
        kinds = ((self._image_row, chat.images), (self._row, chat.videos), (self._sound, chat.sounds))
        return [token for token, parts in kinds if parts]

    def token_of(self, chat: ChatPrompt, part: int) -> str:
        """That of one part, an image, frames of a video or a sound."""
        if part in chat.sounds:
            return self._sound
        return self._row if any(part in video.parts for video in chat.videos) else self._image_row

    def placed(self, text: str, chat: ChatPrompt) -> tuple[str, list[int]]:
        """A rendered chat with a token for each run of rows, and which part each is of: images, videos and sounds in
        their own order, as a template does not tell one from the other. Raises PromptRefused where it does not show
        each once."""
        images, videos, sounds = enumerate(chat.images), iter(chat.videos), iter(chat.sounds)
        order: list[int] = []

        def stands_for(found: re.Match[str]) -> str:
            if found["number"] is not None:
                order.append(int(found["number"]))
                return PLACEHOLDER
            if found.lastgroup == "image":
                number, part = next(images, (0, -1))
                order.append(part)
                # what templates write may be no token, as Qianfan-OCR's <image>
                row = self._numbered.format(number=number, rows=self._image_row)
                if self._mark is not None:
                    return f"\n\n{self._mark}{row}{self._image_end}\n\n"
                followed = self._followed if part >= 0 and _ends_with_a_row(chat.embeds[part]) else ""
                return f"{self._bound}{row}{self._bound}{followed}"
            if found.lastgroup == "sound":
                order.append(next(sounds, -1))
                return found[0]
            video = next(videos, VideoParts((-1,), (0.0,)))
            order.extend(video.parts)
            return (self._introduction(video) + "".join(self._frames(video))).lstrip(" \n") + self._outro

        placed = self._pattern(chat).sub(stands_for, text)
        if sorted(order) != list(range(len(chat.embeds))):
            raise self._not_shown(chat)
        if chat.images and self._bound:
            placed = placed.replace(2 * self._bound, self._bound)
            placed = re.sub(rf"{re.escape(self._bound)}(?=[^\s<])", f"{self._bound} ", placed)
        return placed, order

    def _pattern(self, chat: ChatPrompt) -> re.Pattern[str]:
        marks = [_NUMBERED]
        if chat.images:
            before = self._numbered.partition("{rows}")[0]
            own = "" if "{" in before else f"(?:{re.escape(before)})?"  # some templates write it themselves
            marks.append(f"(?P<image>{own}{re.escape(self._mark or self._image)})")
        if chat.sounds:
            marks.append(f"(?P<sound>{re.escape(self._sound)})")
        if chat.videos:
            start, end = (f"(?:{re.escape(each)})?" if each else "" for each in self._around)
            marks.append(f"(?P<video>{start}{re.escape(self._video)}{end})")
        return re.compile("|".join(marks))

    def _introduction(self, video: VideoParts) -> str:
        if not self._intro:
            return ""
        return self._intro.format(count=in_words(len(video.times)), lasts=timedelta(seconds=int(video.seconds)))

    def _frames(self, video: VideoParts) -> Iterator[str]:
        start, end = self._around
        for number, time in enumerate(video.times, 1):
            rows = start + self._row + end
            if self._frame is None:
                yield rows
            else:
                second = int(time)
                clock = f"{second // 60:02d}:{second % 60:02d}"
                yield self._frame.format(rows=rows, number=number, time=time, second=second, clock=clock)

    def joined(self, found: list[int | None], chat: ChatPrompt, order: list[int]) -> tuple[list[int], PromptEmbeds]:
        """The ids of a placed chat, 0 where it has rows, and these. `found`: None for each token that stands for rows,
        in place of which comes all that a processor writes for an image. Raises PromptRefused where other text has such
        a token."""
        if found.count(None) != len(order):
            raise self._not_shown(chat)
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        grids: list[ImageGrid | None] = []
        offsets: list[FrameOffset | None] = []
        mutual: list[bool] = []
        media: list[MediaRows | None] = []
        texts: list[tuple[int, tuple[int, ...]]] = []
        shown = iter(order)
        for token in found:
            if token is not None:
                ids.append(token)
                continue
            part = chat.embeds[next(shown)]
            begin = len(ids)
            ((first, count),) = part.runs or ((0, part.count),)
            ids += [0] * (first + count)
            for at, written in part.texts:
                ids[begin + at : begin + at + len(written)] = written
                texts.append((begin + at, written))
            runs.append((begin + first, count))
            grids += part.grids or (None,)
            offsets += part.offsets or (None,)
            mutual += part.mutual or (False,)
            media += part.media or (None,)
        said = {
            "grids": tuple(grids) if any(grids) else (),
            "offsets": tuple(offsets) if any(each is not None for each in offsets) else (),
            "mutual": tuple(mutual) if any(mutual) else (),
            "media": tuple(media) if any(media) else (),
            "texts": tuple(texts),
        }
        rows = b"".join(chat.embeds[number].rows for number in order)
        return ids, replace(chat.embeds[0], rows=rows, runs=tuple(runs), **said)

    def joined_beside(
        self, found: list[int | None], chat: ChatPrompt, order: list[int], image: int
    ) -> tuple[list[int], PromptEmbeds]:
        """The same of a chat whose rows stand beside it: each image has one token, `image`, from which on its rows are
        seen. Raises PromptRefused."""
        if found.count(None) != len(order):
            raise self._not_shown(chat)
        ids = [image if token is None else token for token in found]
        parts = [chat.embeds[number] for number in order]
        places = (place for place, token in enumerate(found) if token is None)
        media = tuple(kept for part in parts for kept in part.media or (None,))
        return ids, replace(
            parts[0],
            rows=b"".join(part.rows for part in parts),
            runs=tuple((place, part.count) for place, part in zip(places, parts, strict=True)),
            media=media if any(media) else (),
        )

    def _not_shown(self, chat: ChatPrompt) -> PromptRefused:
        named = ((self._shown, chat.images), ("videos", chat.videos), ("sounds", chat.sounds))
        kinds = [name for name, given in named if given]
        shown = [self._image] if chat.images else []
        stands = " or ".join(dict.fromkeys([*shown, *self.tokens(chat), PLACEHOLDER]))
        parts = len(chat.embeds) - sum(len(video.parts) - 1 for video in chat.videos)
        return PromptRefused(
            "messages",
            f"messages: the chat template has to show each of the {parts} "
            f"{' and '.join([*kinds, 'parts of type prompt_embeds'])} once, and other text must not have what stands "
            f"for them, such as {stands}",
        )


def _ends_with_a_row(part: PromptEmbeds) -> bool:
    """Whether no text stands behind the rows of an image."""
    begin, count = part.runs[0] if part.runs else (0, part.count)
    return all(at < begin + count for at, _ in part.texts)
