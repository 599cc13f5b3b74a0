"""Any prompt to token ids, and a request to the message that a coordinator hears. No bus, no threads of its own."""

from __future__ import annotations

from typing import assert_never

from services.tokenizer.chat_rendering import chosen_template, render_chat
from services.tokenizer.refusal import PromptRefused
from services.tokenizer.sampling_words import translated
from services.tokenizer.template_files import ChatTemplates
from services.tokenizer.thinking import LOOKED_AT, adapted, thinking_at, thinking_of_continued
from services.tokenizer.vocabulary import Vocabulary
from shared.blocks import hash_chain
from shared.dialects import Dialect, Thinking
from shared.messages.coordinator import Route
from shared.messages.gateway import Rejected
from shared.messages.generation import Generation
from shared.messages.tokenizer import (
    ChatPrompt,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Prompt,
    Refused,
    TextPrompt,
    Tokenize,
    TokenizerAnswer,
    TokenizerQuestion,
    TokenPrompt,
)
from shared.tokens import pack


class RenderedPrompt(TextPrompt, frozen=True, array_like=True, tag="rendered"):
    """A chat whose own template has been rendered elsewhere."""


class Encoding:
    """Answers from a vocabulary and the model's chat templates. Stateless, so any thread may use it."""

    def __init__(self, vocabulary: Vocabulary, templates: ChatTemplates, special_tokens: dict[str, str]) -> None:
        self._vocabulary = vocabulary
        self._templates = templates
        self.special_tokens = special_tokens

    @property
    def dialect(self) -> Dialect:
        return self._templates.dialect

    def brings_template(self, prompt: Prompt) -> bool:
        """Whether the prompt is a chat with a template of the client's own, to be rendered elsewhere first."""
        return (
            isinstance(prompt, ChatPrompt)
            and prompt.template is not None
            and chosen_template(prompt, self._templates) is None
        )

    def route(self, message: Tokenize, prompt: Prompt) -> Route | Rejected:
        """The request with `prompt` (its own, or that rendered) tokenized and hashed; or why there is none."""
        try:
            ids = self._tokens(prompt)
            if not ids:
                raise PromptRefused("prompt", "prompt: at least one token is needed")
            if message.truncate_prompt_tokens is not None:
                ids = ids[-message.truncate_prompt_tokens :]
            resumed = self._resumed(message)
            thinking = self._thinking(message.prompt, ids)
            sampling = translated(message, self._vocabulary, self.dialect, thinking, ids)
        except PromptRefused as refused:
            return rejected(message, refused)
        tokens = pack(ids) + resumed
        return Route(
            Generation(
                request=message.request,
                attempt=message.attempt,
                gateway=message.gateway,
                model=message.model,
                tokens=tokens,
                prompt_length=len(ids),
                block_hashes=b"".join(hash_chain(tokens, message.cache_salt)),
                sampling=sampling,
                stopping=message.stopping,
                sent_chars=message.sent_chars,
                skip_special_tokens=message.skip_special_tokens,
                priority=message.priority,
                arrival=message.arrival,
                cache_salt=message.cache_salt,
                avoid=message.avoid,
                trace=message.trace,
                grammar=adapted(message.grammar, thinking),
                keep_markup=message.keep_markup,
                thinking=thinking,
            )
        )

    def answer(self, question: TokenizerQuestion) -> TokenizerAnswer:
        try:
            match question:
                case Encode():
                    ids = self._tokens(question.prompt)
                    strings = self._vocabulary.strings(ids) if question.return_strings else None
                    return Encoded(pack(ids), strings)
                case Decode():
                    ids = self._vocabulary.unpacked(question.tokens, "tokens") if question.tokens else []
                    return Decoded(self._vocabulary.decode(ids, skip_special_tokens=question.skip_special_tokens))
                case _:
                    assert_never(question)
        except PromptRefused as refused:
            return Refused(refused.message, refused.field)

    def _tokens(self, prompt: Prompt) -> list[int]:
        match prompt:
            case RenderedPrompt():
                return self._vocabulary.encode(prompt.text, add_special_tokens=False, field="messages")
            case TextPrompt():
                return self._vocabulary.encode(
                    prompt.text, add_special_tokens=prompt.add_special_tokens, field="prompt"
                )
            case TokenPrompt():
                return self._vocabulary.unpacked(prompt.tokens, "prompt")
            case ChatPrompt():
                template = chosen_template(prompt, self._templates)
                if template is None:
                    raise PromptRefused("chat_template", "chat_template: not rendered")
                text = render_chat(prompt, template, self.special_tokens)
                return self._vocabulary.encode(text, add_special_tokens=False, field="messages")
            case _:
                assert_never(prompt)

    def _thinking(self, prompt: Prompt, ids: list[int]) -> Thinking | None:
        """Whether a chat's prompt ends in or behind thoughts."""
        if not isinstance(prompt, ChatPrompt):
            return None
        if prompt.continue_final_message or prompt.template_kwargs.get("continue_final_message"):
            return thinking_of_continued(prompt)
        return thinking_at(self._vocabulary.decode(ids[-LOOKED_AT:], skip_special_tokens=False))

    def _resumed(self, message: Tokenize) -> bytes:
        if message.resume:
            self._vocabulary.unpacked(message.resume, "resume")
        return message.resume


def rejected(message: Tokenize, refused: PromptRefused) -> Rejected:
    return Rejected(
        request=message.request,
        attempt=message.attempt,
        kind="invalid_request",
        message=refused.message,
        field=refused.field,
    )
