"""A token stream's text is what `decode` makes of all its tokens, whatever the vocabulary and the tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer.core.byte_fallback import ByteFallbackVocabulary
from services.detokenizer.core.byte_level import ByteLevelVocabulary
from services.detokenizer.core.text import REPLACEMENT, TextVocabulary
from services.detokenizer.core.vocabularies import WindowedVocabulary, text_vocabulary
from shared.models.byte_alphabet import ALPHABET
from shared.models.tokenizer_files import special_ids
from tests.support.models import tiny_tokenizers
from tests.support.paths import DEMO_MODEL

DEMO = DEMO_MODEL / "tokenizer.json"

Kinds = dict[str, Callable[[], Tokenizer]]
EXACT: Kinds = {
    "byte-level": tiny_tokenizers.byte_level,
    "wordpiece": tiny_tokenizers.wordpiece,
    "metaspace": tiny_tokenizers.metaspace,
}
FALLBACK: Kinds = {
    "llama 2": lambda: tiny_tokenizers.byte_fallback(strip=True),
    "gemma": lambda: tiny_tokenizers.byte_fallback(strip=False),
}
if DEMO.is_file():
    EXACT["demo model"] = cache(lambda: Tokenizer.from_file(str(DEMO)))

ALL: Kinds = EXACT | FALLBACK | {"regex": tiny_tokenizers.regex_byte_fallback}

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=24)
"""Taken modulo a little more than the vocabulary, so that some are unknown."""


def ids_of(tokenizer: Tokenizer, numbers: list[int]) -> list[int]:
    return [number % (tokenizer.get_vocab_size() + 2) for number in numbers]


def vocabulary_of(tokenizer: Tokenizer) -> TextVocabulary:
    return text_vocabulary(tokenizer, special_ids(tokenizer))


def deliveries(
    vocabulary: TextVocabulary, context: list[int], tokens: list[int], skip: bool, begins: bool
) -> list[str]:
    stream = vocabulary.open(context, begins=begins, skip_special_tokens=skip)
    return [*(stream.push(token) for token in tokens), stream.flush()]


def test_each_kind_of_vocabulary_is_known_by_its_decoder() -> None:
    kinds = {
        "byte_level": type(vocabulary_of(tiny_tokenizers.byte_level())),
        "llama": type(vocabulary_of(tiny_tokenizers.byte_fallback(strip=True))),
        "gemma": type(vocabulary_of(tiny_tokenizers.byte_fallback(strip=False))),
        "wordpiece": type(vocabulary_of(tiny_tokenizers.wordpiece())),
        "metaspace": type(vocabulary_of(tiny_tokenizers.metaspace())),
        "regex": type(vocabulary_of(tiny_tokenizers.regex_byte_fallback())),
    }
    assert kinds == {
        "byte_level": ByteLevelVocabulary,
        "llama": ByteFallbackVocabulary,
        "gemma": ByteFallbackVocabulary,
        "wordpiece": WindowedVocabulary,
        "metaspace": WindowedVocabulary,
        "regex": WindowedVocabulary,
    }


@pytest.mark.parametrize("kind", EXACT)
@given(numbers=TOKENS, skip=st.booleans())
def test_the_text_is_what_decode_makes_of_all_tokens(kind: str, numbers: list[int], skip: bool) -> None:
    tokenizer = EXACT[kind]()
    tokens = ids_of(tokenizer, numbers)
    texts = deliveries(vocabulary_of(tokenizer), [], tokens, skip, True)
    assert "".join(texts) == tokenizer.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", EXACT)
@given(before=TOKENS, numbers=TOKENS, skip=st.booleans())
def test_behind_a_context_the_text_is_what_decode_adds(
    kind: str, before: list[int], numbers: list[int], skip: bool
) -> None:
    tokenizer = EXACT[kind]()
    context, tokens = ids_of(tokenizer, before), ids_of(tokenizer, numbers)
    vocabulary = vocabulary_of(tokenizer)
    alone = vocabulary.open([], begins=True, skip_special_tokens=skip)
    delivered = "".join([alone.push(token) for token in context])
    texts = deliveries(vocabulary, context, tokens, skip, True)
    assert delivered + "".join(texts) == tokenizer.decode(context + tokens, skip_special_tokens=skip)


@given(text=st.text(st.sampled_from(tiny_tokenizers.TEXT), max_size=40), cut=st.integers(0, 40), skip=st.booleans())
@pytest.mark.parametrize("kind", ALL)
def test_a_context_cut_off_anywhere_changes_nothing(kind: str, text: str, cut: int, skip: bool) -> None:
    """The detokenizer is sent the last few prompt tokens only; they may begin within a character."""
    tokenizer = ALL[kind]()
    tokens = tokenizer.encode("Hello " + text, add_special_tokens=False).ids
    at = min(cut, len(tokens) - 1) + 1
    context, output = tokens[:at], tokens[at:]
    vocabulary = vocabulary_of(tokenizer)
    whole = deliveries(vocabulary, context, output, skip, True)
    tail = deliveries(vocabulary, context[-8:], output, skip, len(context) <= 8)
    assert tail == whole


RUNS = st.lists(
    st.one_of(
        st.text(st.sampled_from("é世😀𝄞\n"), min_size=1, max_size=3).map(lambda text: list(text.encode())),
        st.lists(st.integers(0, 255), min_size=1, max_size=6),
        st.integers(256, 2**32 - 1).map(lambda number: [number]),
    ),
    max_size=8,
)
"""Runs of byte tokens, valid and not, and other tokens between them."""


def fallback_tokens(tokenizer: Tokenizer, runs: list[list[int]]) -> list[int]:
    first = tokenizer.token_to_id("<0x00>")
    others = [i for i in range(tokenizer.get_vocab_size()) if not first <= i < first + 256]
    return [first + n if n < 256 else others[n % len(others)] for run in runs for n in run]


def plainly(tokenizer: Tokenizer, tokens: list[int], skip: bool) -> tuple[str, bool]:
    """The text by the rule of byte fallback, whole characters kept where a run of bytes breaks behind them; and
    whether one did."""
    hidden = special_ids(tokenizer) if skip else frozenset()
    spelled = "".join(tokenizer.id_to_token(i) for i in tokens if i not in hidden).replace("▁", " ")
    broke = False

    def run(found: re.Match[str]) -> str:
        nonlocal broke
        raw = bytes.fromhex(found[0].replace("<0x", "").replace(">", ""))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            broke = broke or error.start > 0
            return raw[: error.start].decode() + REPLACEMENT * (len(raw) - error.start)

    text = re.sub(r"(?:<0x[0-9A-F]{2}>)+", run, spelled)
    strips = tokenizer is tiny_tokenizers.byte_fallback(strip=True)
    return text.removeprefix(" ") if strips else text, broke


@pytest.mark.parametrize("kind", FALLBACK)
@settings(max_examples=300)
@given(runs=RUNS, skip=st.booleans())
@example(runs=[list("😀".encode()), [0xF0, 0x9F]], skip=True)
@example(runs=[[0xFF, 0x41, 0x42]], skip=True)
@example(runs=[[0x20, 0x80]], skip=False)
def test_text_from_byte_fallback_is_what_decode_makes_of_it(kind: str, runs: list[list[int]], skip: bool) -> None:
    """But for whole characters of a run that breaks behind them, which `decode` takes back and a stream cannot."""
    tokenizer = FALLBACK[kind]()
    tokens = fallback_tokens(tokenizer, runs)
    text = "".join(deliveries(vocabulary_of(tokenizer), [], tokens, skip, True))
    expected, broke = plainly(tokenizer, tokens, skip)
    assert text == expected
    assert broke or text == tokenizer.decode(tokens, skip_special_tokens=skip)


@given(text=st.text(st.sampled_from(tiny_tokenizers.TEXT), max_size=40), skip=st.booleans())
@pytest.mark.parametrize("kind", ALL)
def test_a_character_is_delivered_whole_and_with_its_last_token(kind: str, text: str, skip: bool) -> None:
    tokenizer = ALL[kind]()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    texts = deliveries(vocabulary_of(tokenizer), [], tokens, skip, True)
    assert "".join(texts) == tokenizer.decode(tokens, skip_special_tokens=skip)
    assert texts[-1] == ""
    assert not any(REPLACEMENT in piece for piece in texts) or REPLACEMENT in tokenizer.decode(tokens)


def test_bytes_that_are_no_text_are_shown_as_soon_as_that_is_certain_and_not_before() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    alphabet = {byte: tokenizer.token_to_id(c) for c, byte in _letters().items()}
    stream = vocabulary_of(tokenizer).open([], begins=True, skip_special_tokens=True)
    assert [stream.push(alphabet[b]) for b in b"\xf0\x9f\x98"] == ["", "", ""]
    assert stream.push(alphabet[ord("a")]) == REPLACEMENT + "a"
    assert [stream.push(alphabet[b]) for b in b"\xf0\x9f"] == ["", ""]
    assert stream.flush() == REPLACEMENT


def test_a_special_token_within_a_character_does_not_break_it_where_it_is_hidden() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    alphabet = {byte: tokenizer.token_to_id(c) for c, byte in _letters().items()}
    smile = [alphabet[b] for b in "😀".encode()]
    tokens = [*smile[:2], tokenizer.token_to_id("</s>"), *smile[2:]]
    vocabulary = vocabulary_of(tokenizer)
    assert deliveries(vocabulary, [], tokens, True, True) == ["", "", "", "", "😀", ""]
    assert "".join(deliveries(vocabulary, [], tokens, False, True)) == f"{REPLACEMENT}</s>{REPLACEMENT * 2}"


def _letters() -> dict[str, int]:
    return {chr(letter): byte for letter, byte in ALPHABET.items()}


@pytest.mark.parametrize("kind", ["byte-level", *FALLBACK])
def test_a_token_on_its_own_is_spelled_with_its_exact_bytes(kind: str) -> None:
    tokenizer = (EXACT | FALLBACK)[kind]()
    vocabulary = vocabulary_of(tokenizer)
    for text in ("Hello world 😀", "über"):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        spellings = [vocabulary.spelling(token) for token in tokens]
        assert b"".join(spelling.raw for spelling in spellings).decode().strip() == text
        assert all(spelling.text == spelling.raw.decode(errors="replace") for spelling in spellings)


def test_a_token_that_continues_a_word_is_spelled_as_it_continues_it() -> None:
    tokenizer = tiny_tokenizers.wordpiece()
    vocabulary = vocabulary_of(tokenizer)
    tokens = tokenizer.encode("hello brown").ids
    spelled = "".join(vocabulary.spelling(token).text for token in tokens)
    assert spelled == " hello brown"


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("number", [-1, 2**31, 2**32, 2**63, -(2**63)])
def test_a_number_that_is_no_token_is_no_text(kind: str, number: int) -> None:
    tokenizer = ALL[kind]()
    vocabulary = vocabulary_of(tokenizer)
    word = tokenizer.encode("hello", add_special_tokens=False).ids
    assert deliveries(vocabulary, [number], [*word, number], True, True) == [
        *deliveries(vocabulary, [], word, True, True)[:-1],
        "",
        "",
    ]
    assert vocabulary.spelling(number) == ("", b"")
