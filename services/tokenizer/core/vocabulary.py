"""Text to token ids and back, checked against the vocabulary."""

from __future__ import annotations

from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.token_bound import token_bound
from shared.models.tokenizer_files import TokenizerFiles
from shared.packing import TOKEN_BYTES, unpack


class Vocabulary:
    """The model's tokenizer. Safe to use from several threads: encoding releases the interpreter's lock."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        self.size = files.vocab_size
        self._bound = token_bound(files.tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool, field: str, max_model_len: int | None = None) -> list[int]:
        """The ids of `text`; none for no text. Raises PromptRefused where it is no Unicode text, makes a token that the
        model lacks, or certainly does not fit into `max_model_len` tokens."""
        if max_model_len is not None and len(text) >= max_model_len and self._bound is not None:
            tokens = self._bound.at_least(text)
            if tokens >= max_model_len:
                raise PromptRefused(field, _too_long(tokens, max_model_len), "context_length_exceeded")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptRefused(
                field, f"{field}: lone surrogate {text[error.start]!a} at character {error.start}"
            ) from None
        # The batch call releases the interpreter's lock and computes no offsets; the plain one does neither.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return self.checked(encoding.ids, field) if encoding.ids else []

    def checked(self, ids: list[int], field: str) -> list[int]:
        """`ids`. Raises PromptRefused where there are none, or one is not the model's."""
        if not ids:
            raise PromptRefused(field, f"{field}: at least one token is needed")
        if max(ids) >= self.size:
            wrong = next(i for i in ids if i >= self.size)
            raise PromptRefused(field, f"{field}: token id {wrong} is not in the vocabulary of {self.size}")
        return ids

    def unpacked(self, packed: bytes, field: str) -> list[int]:
        """Token ids that a client sent packed. Raises PromptRefused."""
        if len(packed) % TOKEN_BYTES:
            raise PromptRefused(field, f"{field}: packed token ids are {TOKEN_BYTES} bytes each")
        return self.checked(unpack(packed), field)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`, which must be the model's."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def strings(self, ids: list[int]) -> tuple[str, ...]:
        """Each token as the vocabulary spells it; empty for padding ids, which it has no spelling for."""
        return tuple(self._tokenizer.id_to_token(i) or "" for i in ids)


def _too_long(tokens: int, max_model_len: int) -> str:
    """In the words of the refusal that a coordinator makes for a prompt of known length."""
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your request has at least {tokens} "
        "input tokens. Please reduce the length of the input."
    )
