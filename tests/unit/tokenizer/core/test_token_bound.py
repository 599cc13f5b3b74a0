"""The bound on tokens: never above what the tokenizer makes of a text, and near enough to refuse what is too long."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.token_bound import NFC_SHRINKS, token_bound
from services.tokenizer.core.vocabulary import Vocabulary
from shared.models.tokenizer_files import TokenizerFiles
from tests.support.models import tiny_tokenizers


def composed() -> Tokenizer:
    """As Qwen: NFC before bytes, here with an added token that NFC changes."""
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("\u212a\u212a\u212a", normalized=True)])
    return tokenizer


def stripping() -> Tokenizer:
    """With an added token that takes in the white space around it."""
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_fallback(strip=False).to_str())
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return tokenizer


PROVEN = {
    "byte level": tiny_tokenizers.byte_level(),
    "composed": composed(),
    "byte fallback": tiny_tokenizers.byte_fallback(strip=False),
    "prefixed": tiny_tokenizers.byte_fallback(strip=True),
    "stripping": stripping(),
}
PIECES = [*tiny_tokenizers.SPECIAL, "<tool>", "two words", "<mask>", "The quick brown fox", " ", "\n", "\t", "  " * 40]
PIECES += [
    "\u212a",
    "\u212a" * 3,
    "\u1fbe\u0308\u0301",
    "e\u0301",
    "A\u030a\u0301",
    "<\u0338",
    "\u2581",
    "好",
    "😀",
    "7",
    "\x00",
]
BOUNDS = {kind: token_bound(tokenizer) for kind, tokenizer in PROVEN.items()}


@pytest.mark.parametrize("kind", PROVEN)
@given(parts=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=30))
def test_a_text_never_has_fewer_tokens_than_the_bound(kind: str, parts: list[str]) -> None:
    tokenizer, text, bound = PROVEN[kind], "".join(parts), BOUNDS[kind]
    assert bound is not None
    assert bound.at_least(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


class NeverEncodes:
    """A tokenizer of which only the definition is wanted."""

    def to_str(self) -> str:
        return PROVEN["byte level"].to_str()


def test_a_prompt_that_is_certainly_too_long_is_refused_without_tokenizing_it() -> None:
    vocabulary = Vocabulary(TokenizerFiles(Path(), NeverEncodes(), {}, {}, 600))
    with pytest.raises(PromptRefused) as refused:
        vocabulary.encode("word " * 100_000, add_special_tokens=False, field="prompt", max_model_len=2048)
    assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
    assert refused.value.message.startswith("This model's maximum context length is 2048 tokens. However, your request")
    with pytest.raises(AttributeError, match="encode_batch_fast"):  # it may fit
        vocabulary.encode("word " * 500, add_special_tokens=False, field="prompt", max_model_len=2048)


@pytest.mark.parametrize("kind", PROVEN)
def test_a_long_text_is_known_to_have_many(kind: str) -> None:
    bound = BOUNDS[kind]
    assert bound is not None
    assert bound.at_least("The quick brown fox jumps over the lazy dog 123. " * 1000) > 500
    assert bound.at_least("") == 0


def removing() -> Tokenizer:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def lowercased() -> Tokenizer:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


@pytest.mark.parametrize("make", [tiny_tokenizers.wordpiece, tiny_tokenizers.metaspace, removing, lowercased])
def test_there_is_no_bound_where_text_may_vanish(make: object) -> None:
    assert token_bound(make()) is None


def test_nfc_shrinks_no_text_further_than_to_a_quarter() -> None:
    """Each character of composed text has a canonical decomposition; each of its parts was, at the longest, the longest
    character that decomposes to it alone."""
    longest: dict[str, int] = {}
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i <= 0xDFFF]
    changed = [(c, d) for c in characters if (d := unicodedata.normalize("NFD", c)) != c]
    for character, parts in changed:
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
        else:  # what decomposes to several is no longer than they are
            assert len(character.encode()) <= len(parts.encode())

    def before(part: str) -> int:
        return max(longest.get(part, 0), len(part.encode()))

    factors = [sum(map(before, parts)) / len(character.encode()) for character, parts in changed]
    factors += [size / len(part.encode()) for part, size in longest.items()]
    assert 3 < max(factors) <= NFC_SHRINKS
