"""Encodes prompts as token ids, and makes the message that a coordinator receives. No bus, no threads of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import assert_never

import msgspec
from msgspec.structs import replace

from services.tokenizer.core.chat_parts import ChatParts
from services.tokenizer.core.chat_template import ChatTemplate, ChatTemplates
from services.tokenizer.core.infill import Infill
from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.vocabulary import Truncation, Vocabulary
from shared.blocks import DEFAULT_BLOCK_SIZE, hash_chain
from shared.messages.coordinator import Route
from shared.messages.dialects import (
    CHANNEL_MARKS,
    CHANNEL_STOPS,
    CHANNELS_OF_CALLS,
    CHANNELS_OF_REASONING,
    THINKING_MARKS,
    Dialect,
    Thinking,
)
from shared.messages.gateway import RequestRejected
from shared.messages.generation import (
    Generation,
    Grammar,
    PromptEmbeds,
    SamplingOptions,
    StopConditions,
)
from shared.messages.tokenizer import (
    ChatPrompt,
    Decode,
    DecodeReply,
    EmbedsPrompt,
    Encode,
    EncodeReply,
    InfillPrompt,
    PairPrompt,
    Prompt,
    ReadTokenizerInfo,
    TextPrompt,
    Tokenize,
    TokenizerInfo,
    TokenizerRefusal,
    TokenizerReply,
    TokenizerRequest,
    TokenPrompt,
)
from shared.models.structural_tags import as_format, perhaps_behind_thoughts, tagged
from shared.packing import pack

MAX_WORD_TOKENS = 64
"""Most tokens of one bad word; workers keep all bad words in arrays with rows of equal length."""
ALL_THINKING_MARKS = tuple(dict.fromkeys(THINKING_MARKS.values()))
MARK_WINDOW = 16
"""Tokens at a prompt's end that hold the marks which a template writes there."""


class RenderedPrompt(TextPrompt, frozen=True, array_like=True, tag="rendered"):
    """A chat whose own template has been rendered elsewhere."""

    chat: ChatPrompt | None = None


class PromptEncoder:
    """Encodes by a vocabulary and the model's chat templates. Stateless, so any thread may use it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: ChatTemplates,
        special_tokens: dict[str, str],
        block_size: int = DEFAULT_BLOCK_SIZE,
        pair_template: ChatTemplate | None = None,
        info: bytes = b"{}",
        infill_template: str | None = None,
    ) -> None:
        """`block_size`: tokens of each block that prompts are hashed by. `pair_template`: makes a prompt of two texts;
        None: the tokenizer does, as a cross-encoder reads them. `info`: see `TokenizerInfo`. `infill_template`: see
        `Infill`."""
        self._vocabulary, self._info = vocabulary, info
        self._infill = Infill(vocabulary, infill_template)
        self._block_size = block_size
        self._templates = templates
        self._pair_template = pair_template
        self.special_tokens = special_tokens
        self._parts = ChatParts(special_tokens)

    @property
    def dialect(self) -> Dialect:
        """The markup of tool calls and thoughts that the model speaks."""
        return self._templates.dialect

    def forget_words(self) -> None:
        """Drops what is cached of prompts that were encoded, so that it is looked up anew. Any thread may call it."""
        self._vocabulary.forget_words()

    def brings_template(self, prompt: Prompt) -> bool:
        """Whether the prompt is a chat with a template of the client's own, which a process of its own has to render
        first."""
        return (
            isinstance(prompt, ChatPrompt)
            and prompt.template is not None
            and self._templates.choose(prompt.template, tools=prompt.tools is not None) is None
        )

    def _hashes(self, tokens: bytes, message: Tokenize, embeds: PromptEmbeds | None) -> bytes:
        return b"".join(hash_chain(tokens, message.cache_salt, self._block_size, message.lora, embeds))

    def route(self, message: Tokenize, prompt: Prompt) -> Route | RequestRejected:
        """Tokenizes and hashes the request's prompt, or `prompt`, what it was rendered to. Returns a Route, or the
        refusal."""
        try:
            truncation = _truncation(message)
            longest = None if truncation is not None else message.max_model_len
            chat = message.prompt if isinstance(message.prompt, ChatPrompt) and message.prompt.embeds else None
            if truncation is not None and (chat is not None or isinstance(prompt, EmbedsPrompt)):
                raise PromptRefused("truncate_prompt_tokens", "truncate_prompt_tokens: not of prompt_embeds or images")
            embeds = prompt.embeds if isinstance(prompt, EmbedsPrompt) else None
            if isinstance(prompt, TokenPrompt):
                embeds = prompt.encoded
            if chat is not None:
                ids, embeds, _ = self._with_parts(prompt, chat, longest)
            else:
                ids = self._tokens(prompt, longest, generates=message.pooling is None, truncation=truncation)
            if not ids:
                raise PromptRefused("prompt", "prompt: at least one token is needed")
            if message.resume:
                self._vocabulary.unpacked(message.resume, "resume")
            thinking = self._thinking(message, ids)
            sampling, shown = message.sampling, [] if isinstance(prompt, EmbedsPrompt) else ids
            if message.bad_words or sampling.thinking_budget is not None:
                sampling = translate_sampling(message, self._vocabulary, self._templates.dialect, thinking, shown)
        except PromptRefused as refused:
            return rejected(message, refused)
        tokens = pack(ids) + message.resume
        return Route(
            Generation(
                request=message.request,
                attempt=message.attempt,
                gateway=message.gateway,
                model=message.model,
                tokens=tokens,
                prompt_length=len(ids),
                block_hashes=self._hashes(tokens, message, embeds) if message.prefix_caching else b"",
                sampling=sampling,
                stopping=self._stopping(message),
                sent_chars=message.sent_chars,
                skip_special_tokens=message.skip_special_tokens,
                priority=message.priority,
                arrival=message.arrival,
                cache_salt=message.cache_salt,
                avoid=message.avoid,
                grammar=None if message.grammar is None else adapt_grammar(message.grammar, thinking),
                keep_markup=message.keep_markup,
                thinking=thinking,
                prefix_caching=message.prefix_caching,
                suspect_until=message.suspect_until,
                key=message.key,
                weight=message.weight,
                pooling=message.pooling,
                lora=message.lora,
                prompt_embeds=embeds,
                trace=message.trace,
                keep=message.keep,
                kept=message.kept,
                stream_interval=message.stream_interval,
            )
        )

    def _stopping(self, message: Tokenize) -> StopConditions:
        """When the output ends. A chat's stop tokens are the model's own where it writes messages in channels, those of
        a gap's text what models write behind it."""
        stopping = message.stopping
        if isinstance(message.prompt, InfillPrompt) and not stopping.ignore_eos:
            return _with_stops(stopping, self._infill.stop_token_ids)
        chat = isinstance(message.prompt, ChatPrompt) or message.keep_markup
        if self.dialect.tools != CHANNELS_OF_CALLS or not chat or stopping.ignore_eos:
            return stopping
        own = self._vocabulary.named(set(CHANNEL_STOPS) - {self.special_tokens.get("eos_token")})
        return _with_stops(stopping, own)

    def answer(self, request: TokenizerRequest) -> TokenizerReply:
        """Answers requests for tokens of a text, the text of tokens, or what the tokenizer's files say. Returns a
        refusal if the prompt is at fault."""
        try:
            match request:
                case Encode():
                    ids = self._shown_tokens(request)
                    if request.return_strings and request.string_slices:
                        return EncodeReply(pack(ids), string_slices=self._vocabulary.string_slices(ids))
                    return EncodeReply(pack(ids), self._vocabulary.strings(ids) if request.return_strings else None)
                case Decode():
                    ids = self._vocabulary.unpacked(request.tokens, "tokens") if request.tokens else []
                    return DecodeReply(self._vocabulary.decode(ids, skip_special_tokens=request.skip_special_tokens))
                case ReadTokenizerInfo():
                    return TokenizerInfo(self._info)
                case _:
                    assert_never(request)
        except PromptRefused as refused:
            return TokenizerRefusal(refused.message, refused.field)

    def _shown_tokens(self, request: Encode) -> list[int]:
        """The tokens of a prompt as clients are shown them: the token of an image or a video is repeated for each of
        its rows."""
        prompt = request.prompt
        chat = prompt.chat if isinstance(prompt, RenderedPrompt) else prompt
        if not isinstance(chat, ChatPrompt) or not (chat.images or chat.videos or chat.sounds):
            return self._tokens(prompt, truncation=_truncation(request))
        ids, embeds, order = self._with_parts(prompt, chat, None)
        if embeds.encoded:
            return ids
        for (first, count), part in zip(embeds.runs, order, strict=True):
            ids[first : first + count] = self._vocabulary.named([self._parts.token_of(chat, part)]) * count
        for first, written in embeds.texts:
            ids[first : first + len(written)] = written
        return ids

    def _tokens(
        self,
        prompt: Prompt,
        max_model_len: int | None = None,
        *,
        generates: bool = True,
        truncation: Truncation | None = None,
    ) -> list[int]:
        ids = self._all_tokens(prompt, max_model_len, generates, truncation)
        return ids if truncation is None else truncation.of(ids)

    def _all_tokens(
        self, prompt: Prompt, max_model_len: int | None, generates: bool, truncation: Truncation | None
    ) -> list[int]:
        encode = partial(
            self._vocabulary.encode, max_model_len=max_model_len, generates=generates, truncation=truncation
        )
        match prompt:
            case RenderedPrompt():
                return encode(prompt.text, add_special_tokens=prompt.add_special_tokens, field="messages")
            case TextPrompt():
                text = self._vocabulary.beginning(prompt.text, prompt.text_tokens)
                return encode(text, add_special_tokens=prompt.add_special_tokens, field="prompt")
            case InfillPrompt():
                return encode(self._infill.text(prompt), add_special_tokens=prompt.add_special_tokens, field="prompt")
            case TokenPrompt():
                return self._vocabulary.unpacked(prompt.tokens, "prompt")
            case EmbedsPrompt():
                return [0] * prompt.embeds.count
            case PairPrompt():
                one = self._vocabulary.beginning(prompt.text, prompt.text_tokens)
                prompt = PairPrompt(one, self._vocabulary.beginning(prompt.second, prompt.second_tokens))
                if self._pair_template is None:
                    return self._vocabulary.encode_pair(prompt, max_model_len=max_model_len, truncation=truncation)
                text = self._pair_template.render(pair_messages(prompt), self.special_tokens)
                return encode(text, add_special_tokens=False, field="prompt")
            case ChatPrompt():
                text = self._chat_text(prompt)
                return encode(text, add_special_tokens=prompt.add_special_tokens, field="messages")
            case _:
                assert_never(prompt)

    def _chat_text(self, prompt: ChatPrompt) -> str:
        tools, videos = prompt.tools is not None, bool(prompt.videos)
        template = self._templates.choose(prompt.template, tools=tools, videos=videos)
        if template is None:
            raise PromptRefused("chat_template", "chat_template: not rendered")
        return template.render(prompt, self.special_tokens)

    def _with_parts(
        self, prompt: Prompt, chat: ChatPrompt, max_model_len: int | None
    ) -> tuple[list[int], PromptEmbeds, list[int]]:
        """The ids of a chat, 0 where it has rows of its own, these, and which part each run is of. Raises PromptRefused
        where the template does not show each part once. `prompt`: the chat itself, or what it was rendered to."""
        if not isinstance(prompt, (ChatPrompt, RenderedPrompt)):
            raise TypeError(f"a {type(prompt).__name__} has no parts")
        rendered = prompt.text if isinstance(prompt, RenderedPrompt) else self._chat_text(prompt)
        text, order = self._parts.placed(rendered, chat)
        found = self._vocabulary.encode_with_places(
            text,
            add_special_tokens=prompt.add_special_tokens,
            max_model_len=max_model_len,
            part_tokens=self._parts.tokens(chat),
        )
        if chat.embeds[0].encoded:
            (image,) = self._vocabulary.named(self._parts.tokens(chat))
            return *self._parts.joined_beside(found, chat, order, image), order
        return *self._parts.joined(found, chat, order), order

    def _thinking(self, message: Tokenize, ids: list[int]) -> Thinking | None:
        """Whether a chat's prompt ends within thoughts or behind them; None where it does not show. Of prompts of token
        ids those are chats whose output is parsed."""
        prompt = message.prompt
        if not isinstance(prompt, ChatPrompt) and not message.keep_markup:
            return None
        if isinstance(prompt, ChatPrompt) and (
            prompt.continue_final_message or prompt.template_kwargs.get("continue_final_message")
        ):
            return thinking_of_continued(prompt)
        return thinking_state(self._vocabulary.decode(ids[-MARK_WINDOW:], skip_special_tokens=False))


def _with_stops(stopping: StopConditions, own: Iterable[int]) -> StopConditions:
    return replace(stopping, stop_token_ids=tuple(dict.fromkeys((*stopping.stop_token_ids, *own))))


def _truncation(message: Tokenize | Encode) -> Truncation | None:
    keep = message.truncate_prompt_tokens
    return None if keep is None else Truncation(keep, message.truncation_side)


def pair_messages(pair: PairPrompt) -> ChatPrompt:
    """The pair as a template for scores sees it, in the roles that vLLM gives the texts."""
    texts = {"query": pair.text, "document": pair.second}
    return ChatPrompt(messages=msgspec.json.encode([{"role": role, "content": text} for role, text in texts.items()]))


def rejected(message: Tokenize, refused: PromptRefused) -> RequestRejected:
    """What the client of `message` gets where its prompt is refused."""
    return RequestRejected(
        request=message.request,
        attempt=message.attempt,
        kind="invalid_request",
        message=refused.message,
        field=refused.field,
        code=refused.code,
    )


def translate_sampling(
    message: Tokenize, vocabulary: Vocabulary, dialect: Dialect, thinking: Thinking | None, prompt: list[int]
) -> SamplingOptions:
    """The request's sampling options, with what clients give as text turned to the token ids that a worker knows.

    `thinking`, or else the end of `prompt`, shows whether the output begins within thoughts. Raises PromptRefused.
    """
    sampling = message.sampling
    if message.bad_words:
        words = tuple(tokens for word in message.bad_words for tokens in _bad_word_tokens(word, vocabulary))
        sampling = replace(sampling, bad_words=words)
    if sampling.thinking_budget is not None:
        if thinking is None:
            thinking = thinking_state(vocabulary.decode(prompt[-MARK_WINDOW:], skip_special_tokens=False))
        sampling = _bounded_thinking(message, sampling, vocabulary, dialect, thinking)
    return sampling


def _bad_word_tokens(word: str, vocabulary: Vocabulary) -> Iterator[tuple[int, ...]]:
    """The word at the beginning of a text, and in the middle of one, unless that is a mere space before the same
    tokens. vLLM leaves the latter out where it has another number of tokens: there `the` may be banned, and ` the` not.
    """
    plain = _encode_word(word.lstrip(), vocabulary, "bad_words")
    yield plain
    spaced = _encode_word(" " + word.lstrip(), vocabulary, "bad_words")
    if spaced[-len(plain) :] != plain:
        yield spaced


def _encode_word(text: str, vocabulary: Vocabulary, field: str) -> tuple[int, ...]:
    ids = tuple(vocabulary.encode(text, add_special_tokens=False, field=field))
    if len(ids) > MAX_WORD_TOKENS:
        raise PromptRefused(field, f"{field}: {text[:80]!r} makes {len(ids)} tokens; at most {MAX_WORD_TOKENS}")
    return ids


def _bounded_thinking(
    message: Tokenize, sampling: SamplingOptions, vocabulary: Vocabulary, dialect: Dialect, thinking: Thinking | None
) -> SamplingOptions:
    """Adds the tokens that open and close the reasoning; removes the budget if the prompt has already closed it. Raises
    PromptRefused if the model has no reasoning marks."""
    marks = CHANNEL_MARKS if dialect.reasoning == CHANNELS_OF_REASONING else None
    if marks is None and dialect.reasoning is not None:
        marks = THINKING_MARKS[dialect.reasoning]
    end = message.thinking_end or (marks.end if marks is not None else "")
    if not end:
        raise PromptRefused(
            "thinking_token_budget", "thinking_token_budget: this model's chat template knows no thoughts"
        )
    if thinking == "closed":
        return replace(sampling, thinking_budget=None)
    # Nothing shows whether it will think: only what the output itself begins is bounded.
    begins = marks is not None and thinking is None and dialect.reasoning != "deepseek_r1"
    start = _encode_word(marks.start, vocabulary, "thinking_token_budget") if begins and marks is not None else ()
    return replace(sampling, thinking_end=_encode_word(end, vocabulary, "thinking_token_budget"), thinking_start=start)


def thinking_state(end: str) -> Thinking | None:
    """Whether a prompt with this end is within thoughts or behind them, by the marks that its template wrote; None
    where there is no mark."""
    end = end.rstrip()
    for marks in ALL_THINKING_MARKS:
        if end.endswith(marks.start):
            return "open"
        if end.endswith(marks.end):
            return "closed"
    return None


def thinking_of_continued(prompt: ChatPrompt) -> Thinking:
    """Like `thinking_state`, for a chat whose last message is to be continued: "closed" unless the message breaks off
    inside the model's reasoning."""
    final = msgspec.json.decode(prompt.messages)[-1].get("content")
    text = final if isinstance(final, str) else ""
    within = any(text.rfind(marks.start) > text.rfind(marks.end) for marks in ALL_THINKING_MARKS)
    return "open" if within else "closed"


def adapt_grammar(grammar: Grammar, thinking: Thinking | None) -> Grammar:
    """The grammar that binds the output of a prompt in that state. Where nothing shows whether the model will think, it
    may do either."""
    if thinking == "open":
        return grammar
    marks = next((marks for marks in ALL_THINKING_MARKS if marks.end == grammar.after), None)
    if marks is None:
        return grammar
    if thinking == "closed":
        return replace(grammar, after="")
    inner = as_format(grammar)
    if inner is None:
        return grammar
    text = json.dumps(tagged(perhaps_behind_thoughts(inner, *marks)), ensure_ascii=False)
    return Grammar("structural_tag", text)
