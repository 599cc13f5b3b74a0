"""Has a model that takes sounds in chats write down a window: by the chat that it was taught to answer so."""

from __future__ import annotations

import unicodedata
from typing import Any

import msgspec
from msgspec.structs import replace

from services.gateway.api.response import ChoiceState, ResponseWriter
from services.gateway.audio.audio_process import DecodedWindow
from services.gateway.audio.transcriber import Pieces, Transcriber, WindowTranscript
from shared.messages.gateway import Delta
from shared.messages.generation import PromptEmbeds
from shared.messages.model_card import SoundModel, TranscriptionChat
from shared.messages.tokenizer import ChatPrompt


class ChatTranscriber(Transcriber):
    """Transcribes one request by such a model. Used once."""

    def __init__(self, sounds: SoundModel, chat: TranscriptionChat, *given: Any) -> None:
        """`given`: see Transcriber."""
        super().__init__(*given)
        self._sounds, self._chat = replace(sounds, window_s=chat.window_s), chat

    @property
    def _windows(self) -> SoundModel:
        return self._sounds

    async def _hear(self, decoded: DecodedWindow, pieces: Pieces) -> WindowTranscript:
        rows, language = await self._rows(decoded), self._request.language
        says = self._chat.mark if language is None else ""
        writer = _ShownPieces(pieces, SpokenText(says, behind=decoded.start > 0))
        response = await self._answered(replace(self._generation, prompts=(self.prompt(rows),)), writer)
        writer.finish()
        choice = response.choices[0]
        return WindowTranscript("".join(writer.shown), (), language or "", choice.prompt_tokens, choice.tokens)

    def prompt(self, rows: PromptEmbeds) -> ChatPrompt:
        """As the model's own processor asks."""
        chat, said = self._chat, self._request.prompt
        messages = list[dict[str, Any]]()
        if said and chat.prompt == "system":
            messages.append({"role": "system", "content": [_text(said)]})
        before, behind = ((said if each else "") if said and chat.prompt == "user" else each for each in chat.around)
        content: Any = [_text(before)] * bool(before) + [{"type": "audio"}] + [_text(behind)] * bool(behind)
        if chat.shown is not None:
            content = f"{before}{chat.shown}{behind}"
        messages.append({"role": "user", "content": content})
        if chat.answer is not None:
            name = dict(chat.languages).get(self._request.language or "")
            begun = chat.unsaid if name is None else chat.answer.format(language=name)
            messages.append({"role": "assistant", "content": [_text(begun)]})
        return ChatPrompt(
            messages=msgspec.json.encode(messages),
            add_generation_prompt=chat.answer is None,
            continue_final_message=chat.answer is not None,
            embeds=(rows,),
            images=(0,),
        )


class SpokenText:
    """Owns what is held of a window's text: what stands before a mark, as far as it may come, is none of it; and
    windows are joined by a space, where the writing has any."""

    def __init__(self, mark: str, *, behind: bool) -> None:
        """`mark`: empty where none is to come. `behind`: whether it is not the first window."""
        self._mark, self._behind = mark, behind
        self._held, self._begun = "", False

    def feed(self, text: str) -> str:
        """What may be shown once `text` has come."""
        if self._mark:
            self._held += text
            _, found, text = self._held.partition(self._mark)
            if not found:
                return ""
            self._mark = self._held = ""
        if not self._begun:
            text = text.lstrip()
            if self._behind and text and not _without_spaces(text[0]):
                text = f" {text}"
            self._begun = bool(text)
        return text

    def end(self) -> str:
        """What is to be shown where no mark came."""
        self._mark = ""
        return self.feed(self._held)


class _ShownPieces(ResponseWriter):
    """Hands on new text, beside what its base class collects."""

    def __init__(self, pieces: Pieces, text: SpokenText) -> None:
        self._pieces, self._text = pieces, text
        self.shown: list[str] = []

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `ResponseWriter.write`."""
        self._show(self._text.feed(delta.text))
        return super().write(choice, delta, now)

    def finish(self) -> None:
        """Nothing more comes."""
        self._show(self._text.end())

    def _show(self, text: str) -> None:
        if text:
            self.shown.append(text)
            self._pieces.put_nowait(text)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _without_spaces(letter: str) -> bool:
    """Whether it is of a writing that puts none between words: Chinese, Japanese, Thai, Lao, Burmese, Khmer."""
    names = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "MYANMAR", "KHMER", "IDEOGRAPHIC", "FULLWIDTH")
    return unicodedata.name(letter, "").startswith(names)
