"""The bytes that each token of a vocabulary stands for, as a grammar sees them. No torch, no xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from services.worker.guided.schema.keywords import GrammarRefused
from shared.models.byte_alphabet import spelled_bytes
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer, special_ids

_NO_UTF8 = re.compile(rb"[\xC0\xC1\xF5-\xFF]|\xE0[\x80-\x9F]|\xED[\xA0-\xBF]|\xF0[\x80-\x8F]|\xF4[\x90-\xBF]")
NO_SECOND = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
"""Bytes, from and to, that may not come second behind a character's first byte: such "characters" are overlong,
surrogates or beyond the last one (RFC 3629). xgrammar takes them for characters."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes(NamedTuple):
    """By token id, up to the model's vocabulary size; b"" for ids that are no token, or no part of any UTF-8."""

    ordinary: list[bytes]
    """Special tokens too are b"": they are hidden from the client, so no grammar means them."""
    spelled: list[bytes]
    """Special tokens as they are written: what `Grammar.after` and structural tags name."""
    tokenizer: Tokenizer


def token_bytes(folder: Path, vocab_size: int) -> TokenBytes:
    """The bytes of the tokens of the model in `folder`.

    Raises GrammarRefused where its kind of vocabulary does not spell bytes."""
    try:
        tokenizer = load_tokenizer(folder).tokenizer
    except TokenizerUnusable as error:
        raise GrammarRefused(f"guided decoding needs the model's tokenizer: {error}") from None
    spell = _spelling(tokenizer)
    hidden = special_ids(tokenizer)
    added = {i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()}
    spelled = [b""] * vocab_size
    for letters, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token < vocab_size:
            spelled[token] = added[token] if token in hidden else spell(letters)
    spelled = [b"" if _NO_UTF8.search(piece) else piece for piece in spelled]
    ordinary = [b"" if token in hidden else piece for token, piece in enumerate(spelled)]
    return TokenBytes(ordinary, spelled, tokenizer)


def never_second(pieces: list[bytes]) -> dict[int, list[int]]:
    """First byte of a character → the tokens that may not follow it, as they begin with a byte of `NO_SECOND`."""
    first = [piece[0] if piece else 0 for piece in pieces]
    return {
        lead: [token for token, byte in enumerate(first) if low <= byte <= high]
        for lead, (low, high) in NO_SECOND.items()
    }


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How tokens become bytes, by what the tokenizer's decoder does."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return spelled_bytes
    if kinds == ["Metaspace"]:
        return _pieces(steps[0]["replacement"])
    if kinds[:1] == ["Replace"] and steps[0]["content"] == " " and "WordPiece" not in kinds:
        pattern = steps[0]["pattern"]
        return _pieces(pattern.get("String") or pattern.get("Regex"))
    raise GrammarRefused("guided decoding is not possible with this model: its vocabulary does not spell bytes")


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _pieces(space: str) -> Callable[[str], bytes]:
    """Sentencepiece's: `space` for a space, and single bytes as `<0x0A>`."""

    def spell(letters: str) -> bytes:
        byte = _BYTE.fullmatch(letters)
        return bytes([int(byte[1], 16)]) if byte else letters.replace(space, " ").encode()

    return spell


# What clients send as JSON, for each back end alike.


def parsed_json(text: str) -> Any:
    """Raises GrammarRefused."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"not valid JSON ({error})") from None


def choices_of(text: str) -> list[str]:
    """The strings of a choice. Raises GrammarRefused."""
    choices = parsed_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarRefused("a choice is a list of strings, at least one")
    return choices
