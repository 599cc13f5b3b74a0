"""A sequence's place in its grammar: beginnings, ends, dead ends, drafts, and vocabularies of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.worker.guided.compiler import GrammarCompiler
from services.worker.guided.matcher import GrammarMatcher, MatcherBroken, allows, make_matcher
from services.worker.guided.schema.keywords import GrammarRefused
from services.worker.sampling.token_bits import mask_words
from shared.messages.generation import Grammar
from shared.models.structural_tags import as_format, perhaps_behind_thoughts, tagged
from tests.support.models.tiny_tokenizers import (
    byte_fallback,
    byte_level,
    metaspace,
    regex_byte_fallback,
    wordpiece,
    write_model,
)
from tests.support.worker.guided_documents import RandomWriter

OBJECT = Grammar(
    "json", '{"type":"object","properties":{"name":{"enum":["ä","b"]},"other":{"type":"integer"}},"required":["name"]}'
)
COMPACT = Grammar(OBJECT.kind, OBJECT.text, compact=True)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def writer(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> RandomWriter:
    return RandomWriter(tmp_path_factory.mktemp("bytes"), request.param)


@pytest.fixture(scope="module")
def byte(writer: RandomWriter) -> dict[bytes, int]:
    """Token by its bytes."""
    pieces = writer.compiler.spelling().pieces
    return {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}


def matcher_of(writer: RandomWriter, grammar: Grammar, *more_stops: int) -> GrammarMatcher:
    return writer.matcher(grammar, (writer.eos, *more_stops))


def take(matcher: GrammarMatcher, byte: dict[bytes, int], text: str) -> None:
    for one in text.encode():
        matcher.accept(byte[bytes([one])], allowed=True)


def test_a_sequence_may_end_where_the_grammar_does_and_nowhere_else(
    writer: RandomWriter, byte: dict[bytes, int]
) -> None:
    matcher = matcher_of(writer, Grammar("regex", "ab?"))
    assert writer.eos not in writer.allowed(matcher)
    take(matcher, byte, "a")
    assert set(writer.allowed(matcher)) == {writer.eos, byte[b"b"]}
    take(matcher, byte, "b")
    assert list(writer.allowed(matcher)) == [writer.eos]
    matcher.accept(writer.eos, allowed=True)
    assert matcher.stage == "ended"
    assert not matcher.binds, "what a worker draws before it hears of the end is nobody's"
    matcher.accept(5, allowed=False)


def test_stop_tokens_that_clients_choose_are_ends_too(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, Grammar("regex", "a+"), byte[b";"])
    assert byte[b";"] not in writer.allowed(matcher)
    take(matcher, byte, "a")
    assert {writer.eos, byte[b";"]} <= set(writer.allowed(matcher))


def test_a_dead_end_is_an_end(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, Grammar("grammar", 'root ::= "a" never\nnever ::= never "x"'))
    take(matcher, byte, "a")
    assert list(writer.allowed(matcher)) == [writer.eos]
    matcher.accept(writer.eos, allowed=True)
    assert matcher.stage == "ended"


def test_a_token_that_was_allowed_and_is_not_accepted_is_a_bug(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, Grammar("regex", "a+"))
    with pytest.raises(MatcherBroken):
        matcher.accept(byte[b"x"], allowed=True)


def test_a_stage_that_the_table_does_not_let_follow_is_a_bug_and_told_with_its_history(
    writer: RandomWriter, byte: dict[bytes, int]
) -> None:
    matcher = matcher_of(writer, Grammar("regex", "ab?"))
    take(matcher, byte, "a")
    matcher.accept(writer.eos, allowed=True)
    with pytest.raises(MatcherBroken, match="cannot be binding behind binding, ended"):
        matcher._enter("binding")


def test_a_token_that_something_else_has_forced_ends_the_sequence(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, Grammar("regex", "a+"))
    matcher.accept(byte[b"x"], allowed=False)
    assert list(writer.allowed(matcher)) == [writer.eos]


def test_a_grammar_binds_behind_its_mark_however_that_is_cut_into_tokens(
    writer: RandomWriter, byte: dict[bytes, int]
) -> None:
    matcher = matcher_of(writer, Grammar("regex", "yes", after="</think>"))
    take(matcher, byte, "no </thin </thin")
    assert not matcher.binds
    take(matcher, byte, "k>")
    assert matcher.binds
    take(matcher, byte, "yes")
    assert list(writer.allowed(matcher)) == [writer.eos]


def test_what_follows_the_mark_in_its_own_token_is_the_grammars_where_it_fits(
    writer: RandomWriter, byte: dict[bytes, int]
) -> None:
    merged = next(piece for piece in byte if len(piece) == 2 and piece.isalpha())
    mark, rest = list(merged.decode())
    for expression, following in ((f"{rest}x", "x"), ("yes", "y")):
        matcher = matcher_of(writer, Grammar("regex", expression, after=mark))
        matcher.accept(byte[merged], allowed=False)
        assert byte[following.encode()] in writer.allowed(matcher)


def test_a_special_token_may_be_the_mark(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, Grammar("regex", "yes", after="<|im_end|>"))
    special = writer.tokenizer.token_to_id("<|im_end|>")
    assert special is not None
    matcher.accept(special, allowed=False)
    assert matcher.binds
    assert special not in writer.allowed(matcher)


def test_special_tokens_are_no_text(writer: RandomWriter) -> None:
    """They are hidden from the client, so a string that held one would be another."""
    matcher = matcher_of(writer, Grammar("regex", ".*"))
    hidden = {writer.tokenizer.token_to_id(token) for token in ("<s>", "<unk>", "<|im_start|>", "[INST]")}
    assert not hidden & set(writer.allowed(matcher))


def test_no_token_leads_out_of_utf8(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, Grammar("regex", "[^a]{2}"))
    assert not {byte.get(bytes([value])) for value in (0xC0, 0xC1, 0xF5, 0xFF)} & set(writer.allowed(matcher))
    matcher.accept(byte[b"\xed"], allowed=True)
    pieces = writer.compiler.spelling().pieces
    assert {pieces[token][0] for token in writer.allowed(matcher)} == set(range(0x80, 0xA0))


def test_rows_behind_drafts_are_those_of_the_grammar_there(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    """Also where the mark lies among the drafts; and nothing is left of a look ahead."""
    for after in ("", "!"):
        grammar = Grammar("regex", "abc", after=after)
        matcher, text = matcher_of(writer, grammar), f"{after}abc"
        drafts = [byte[bytes([one])] for one in text.encode()]
        bits = np.empty((len(drafts) + 1, mask_words(writer.vocab_size)), dtype=np.int32)
        for _ in range(2):
            matcher.fill(bits, drafts)
            live = matcher_of(writer, grammar)
            for place, draft in enumerate(drafts):
                row = np.empty((1, bits.shape[1]), dtype=np.int32)
                live.fill(row)
                assert (row[0] == bits[place]).all()
                live.accept(draft, allowed=True)
            assert allows(bits[-1], writer.eos)
            assert not allows(bits[-1], byte[b"c"])


def test_a_draft_that_cannot_be_drawn_ends_the_look_ahead(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, Grammar("regex", "abc"))
    bits = np.empty((4, mask_words(writer.vocab_size)), dtype=np.int32)
    matcher.fill(bits, [byte[b"a"], byte[b"x"], byte[b"c"]])
    assert not allows(bits[1], byte[b"x"])
    take(matcher, byte, "abc")


def test_forced_tokens_spell_what_alone_can_follow(writer: RandomWriter, byte: dict[bytes, int]) -> None:
    matcher = matcher_of(writer, COMPACT)
    pieces = writer.compiler.spelling().pieces
    forced = b"".join(pieces[token] for token in matcher.jump_forward(32))
    assert b'{"name": "'.startswith(forced)
    assert len(forced) > 4
    assert len(matcher.jump_forward(2)) == 2
    take(matcher, byte, '{"name": "')
    assert matcher.jump_forward(8) == []
    matcher.accept(byte["ä".encode()[:1]], allowed=True)
    assert matcher.jump_forward(8) == [], "half a character cannot be spelled"


def test_replay_leads_to_the_same_place_as_drawing_did(writer: RandomWriter) -> None:
    random = Random(5)
    for _ in range(20):
        tokens, _ = writer.write(OBJECT, random, most=40)
        live = matcher_of(writer, OBJECT)
        for place in range(len(tokens)):
            replayed = matcher_of(writer, OBJECT)
            replayed.replay(tokens[:place])
            assert list(writer.allowed(replayed)) == list(writer.allowed(live))
            live.accept(tokens[place], allowed=True)


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(), byte_fallback(strip=False), byte_fallback(strip=True), regex_byte_fallback(), metaspace()],
    ids=["bytes", "fallback", "stripping fallback", "fallback by expression", "pieces"],
)
def test_vocabularies_of_every_kind_can_be_guided(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_model(tmp_path, tokenizer)
    size = tokenizer.get_vocab_size(with_added_tokens=True) + 40
    eos = tokenizer.token_to_id("</s>")
    assert eos is not None
    compiler = GrammarCompiler(tmp_path, size, (eos,))
    compiled = compiler.compile(Grammar("choice", '["the lazy dog", "he"]'))
    matcher = make_matcher(compiled, (eos,), "", compiler.spelling())
    random, out, bits = Random(1), b"", np.empty((1, mask_words(size)), dtype=np.int32)
    while matcher.stage == "binding":
        matcher.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert max(allowed) < size - 40, "ids that are no token cannot be drawn"
        token = random.choice(allowed)
        matcher.accept(token, allowed=True)
        out += compiler.spelling().of(token) if token != eos else b""
    assert out in (b"the lazy dog", b"he")


def test_a_vocabulary_that_spells_no_bytes_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, wordpiece())
    with pytest.raises(GrammarRefused, match="does not spell bytes"):
        GrammarCompiler(tmp_path, 200, (1,)).compile(OBJECT)


def test_broken_texts_of_every_kind_are_refused(writer: RandomWriter) -> None:
    for grammar in (
        Grammar("json", "{"),
        Grammar("choice", "{"),
        Grammar("choice", "[1]"),
        Grammar("structural_tag", "{"),
        Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "other"}}'),
        Grammar("grammar", "root ::= ("),
        Grammar("grammar", 'other ::= "a"'),
        Grammar("grammar", "root ::= é"),
        Grammar("json", json.dumps({"items": {"type": "foo"}})),
    ):
        with pytest.raises(GrammarRefused) as refused:
            writer.compiler.compile(grammar)
        assert str(refused.value)
        assert "/project/cpp" not in str(refused.value), "no client cares for the library's sources"


def test_white_space_in_json_ends_also_where_the_model_may_think_first(tmp_path: Path) -> None:
    """Found beside vLLM: who may think gets a structural tag, in which a model wrote 3,577 spaces in a row."""
    writer, inner = RandomWriter(tmp_path), as_format(OBJECT)
    assert inner is not None
    tag = json.dumps(tagged(perhaps_behind_thoughts(inner, "<think>", "</think>")))
    for grammar in (OBJECT, Grammar("structural_tag", tag)):
        automaton = writer.compiler.compile(grammar).automaton((writer.eos,))
        assert automaton.accept_bytes(b"{" + b" " * 16)
        assert not automaton.accept_bytes(b" ")
