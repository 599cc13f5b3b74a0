"""Which kind of vocabulary a tokenizer has, told by its decoder."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from services.detokenizer.core.byte_fallback import ByteFallbackVocabulary
from services.detokenizer.core.byte_level import ByteLevelVocabulary
from services.detokenizer.core.text import TextVocabulary
from services.detokenizer.core.windowed import WindowedVocabulary


def text_vocabulary(tokenizer: Tokenizer, special: frozenset[int]) -> TextVocabulary:
    """The vocabulary of a tokenizer, by the kind of its decoder; the general kind for those not known here."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelVocabulary(tokenizer, special)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_plain_replace(steps[0]):
        if len(steps) == 3:
            return ByteFallbackVocabulary(tokenizer, special, steps[0]["pattern"]["String"], strip=0)
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return ByteFallbackVocabulary(tokenizer, special, steps[0]["pattern"]["String"], strip=steps[3]["start"])
    return WindowedVocabulary(tokenizer, special)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_plain_replace(step: dict[str, Any]) -> bool:
    return "String" in step["pattern"] and step["content"] == " "
