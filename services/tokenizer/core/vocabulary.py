"""The model's tokenizer: text to token ids and back, checked against the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.token_bound import token_bound
from shared.messages.tokenizer import PairPrompt, TruncationSide
from shared.models.tokenizer_files import TokenizerFiles
from shared.packing import TOKEN_BYTES, unpack

PLACEHOLDER = "<|prompt_embeds|>"
"""The token that stands for a part of embeddings while a chat is tokenized: text is split there, and never merged."""
SLICE = 4096
"""Spellings in one array."""


class Truncation(NamedTuple):
    """How many tokens of a prompt are kept, and on which side the others are lost."""

    tokens: int
    side: TruncationSide

    def of(self, ids: list[int]) -> list[int]:
        """Returns those of `ids` that are kept."""
        return ids[-self.tokens :] if self.side == "left" else ids[: self.tokens]


class Vocabulary:
    """The model's tokenizer. Safe to use from several threads: encoding releases the interpreter's lock."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        self.size = files.vocab_size
        self._bound = token_bound(files.tokenizer)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        field: str,
        max_model_len: int | None = None,
        generates: bool = True,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """The ids of `text`; none for no text. Raises PromptRefused where it is no Unicode text, makes a token that the
        model lacks, or certainly does not fit into `max_model_len` tokens, with one more if something `generates`.
        Special tokens are added to what `truncation` leaves, and count."""
        self._check_text(text, field, max_model_len, generates=generates)
        if truncation is not None and add_special_tokens:
            return self.checked(self._truncated(text, truncation), field)
        # The batch call releases the interpreter's lock and computes no offsets; the plain one does neither.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return self.checked(encoding.ids, field) if encoding.ids else []

    def encode_with_places(
        self, text: str, *, add_special_tokens: bool, max_model_len: int | None, part_tokens: Iterable[str] = ()
    ) -> list[int | None]:
        """The ids of a chat's `text`; None for each PLACEHOLDER or token that stands for another part. Raises what
        `encode` raises."""
        self._check_text(text.replace(PLACEHOLDER, ""), "messages", max_model_len, generates=True)
        places = {self._placing.token_to_id(token) for token in (PLACEHOLDER, *part_tokens)}
        (encoding,) = self._placing.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if any(token not in places for token in encoding.ids):
            self.checked([token for token in encoding.ids if token not in places], "messages")
        return [None if token in places else token for token in encoding.ids]

    @cached_property
    def _placing(self) -> Tokenizer:
        """The tokenizer with PLACEHOLDER. Two threads may make it at once; either will do."""
        made = Tokenizer.from_str(self._tokenizer.to_str())
        made.add_special_tokens([AddedToken(PLACEHOLDER, normalized=False)])
        return made

    def _truncated(self, text: str, truncation: Truncation) -> list[int]:
        """As `transformers` truncates: the text's own tokens make room for the special ones."""
        special = self._tokenizer.num_special_tokens_to_add(False)
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        encoding.truncate(max(0, truncation.tokens - special), direction=truncation.side)
        ids: list[int] = self._tokenizer.post_process(encoding, None, True).ids
        return truncation.of(ids)

    def encode_pair(
        self, pair: PairPrompt, *, max_model_len: int | None, truncation: Truncation | None = None
    ) -> list[int]:
        """The ids of two texts with the special tokens of a pair. Raises what `encode` raises."""
        for text in (pair.text, pair.second):
            self._check_text(text, "prompt", max_model_len, generates=False)
        if truncation is None:
            (encoding,) = self._tokenizer.encode_batch_fast([(pair.text, pair.second)], add_special_tokens=True)
            return self.checked(encoding.ids, "prompt")
        one, other = self._tokenizer.encode_batch_fast([pair.text, pair.second], add_special_tokens=False)
        room = truncation.tokens - self._tokenizer.num_special_tokens_to_add(True)
        kept = _kept_of_pair(len(one.ids), len(other.ids), max(0, room))
        for part, count in zip((one, other), kept, strict=True):
            part.truncate(count, direction=truncation.side)
        return self.checked(truncation.of(self._tokenizer.post_process(one, other, True).ids), "prompt")

    def beginning(self, text: str, tokens: int | None) -> str:
        """The beginning of `text` that makes so many tokens at most, without special ones; None: all of it. As vLLM
        cuts a query and its documents. Raises PromptRefused where it is no Unicode text."""
        if tokens is None:
            return text
        self._check_text(text, "prompt", None, generates=False)
        while text:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # the fast one has no offsets
            offsets = encoding.offsets
            if len(offsets) <= tokens:
                break
            # A character may be several tokens; what is cut may be tokenized otherwise, so once more.
            text = text[: min(offsets[tokens - 1][1], offsets[tokens][0], len(text) - 1)]
        return text

    def forget_words(self) -> None:
        """Drops the cache of words that models of pairs and of unigrams have, some 10,000 of them."""
        clear = getattr(self._tokenizer.model, "_clear_cache", None)  # tokenizers 0.21.1 has it; other models have none
        if clear is not None:
            clear()

    def checked(self, ids: list[int], field: str) -> list[int]:
        """`ids`. Raises PromptRefused where there are none, or one is not the model's."""
        if not ids:
            raise PromptRefused(field, f"{field}: at least one token is needed")
        if max(ids) >= self.size:
            wrong = next(i for i in ids if i >= self.size)
            raise PromptRefused(field, f"{field}: token id {wrong} is not in the vocabulary of {self.size}")
        return ids

    def _check_text(self, text: str, field: str, max_model_len: int | None, *, generates: bool) -> None:
        if max_model_len is not None and len(text) >= max_model_len and self._bound is not None:
            tokens = self._bound.at_least(text)
            if tokens + generates > max_model_len:
                raise PromptRefused(field, _too_long(tokens, max_model_len), "context_length_exceeded")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptRefused(
                field, f"{field}: lone surrogate {text[error.start]!a} at character {error.start}"
            ) from None

    def unpacked(self, packed: bytes, field: str) -> list[int]:
        """Token ids that a client sent packed. Raises PromptRefused."""
        if len(packed) % TOKEN_BYTES:
            raise PromptRefused(field, f"{field}: packed token ids are {TOKEN_BYTES} bytes each")
        return self.checked(unpack(packed), field)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`, which must be the model's."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def named(self, tokens: Iterable[str]) -> list[int]:
        """The ids of these tokens, in order; those that the vocabulary lacks are left out."""
        found = (self._tokenizer.token_to_id(token) for token in tokens)
        return sorted(token for token in found if token is not None)

    def strings(self, ids: list[int]) -> tuple[str, ...]:
        """Each token as the vocabulary spells it; empty for padding ids, which it has no spelling for."""
        return tuple(self._tokenizer.id_to_token(i) or "" for i in ids)

    def string_slices(self, ids: list[int]) -> tuple[bytes, ...]:
        """The same as MessagePack arrays, `SLICE` of them in each but the last."""
        slices = (ids[start : start + SLICE] for start in range(0, len(ids), SLICE))
        return tuple(msgspec.msgpack.encode(self.strings(each)) for each in slices)


def _kept_of_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts fit into `room`: the longer one loses its own until both are equally long, then
    both do; as `longest_first` of the library `tokenizers`, whose setting would be that of all requests."""
    shorter = min(first, second, room)
    longer = min(max(first, second), max(shorter, room - shorter))
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)


def _too_long(tokens: int, max_model_len: int) -> str:
    """In the words of the refusal that a coordinator makes for a prompt of known length."""
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your request has at least {tokens} "
        "input tokens. Please reduce the length of the input."
    )
