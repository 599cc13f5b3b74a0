"""A sequence's place in its grammar: beginnings, ends, dead ends, drafts, and vocabularies of every kind."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.worker.guided.compiler import GrammarCompiler
from services.worker.guided.guided_sequences import GuidedSequences
from services.worker.guided.library import MAX_STUCK, CompileResult, GrammarLibrary
from services.worker.guided.matcher import GrammarMatcher, MatcherBroken, allows
from services.worker.guided.schema.keywords import GrammarRefused
from services.worker.sampling.masks import mask_words
from shared.ids import SequenceId
from shared.messages.generation import Grammar, SamplingOptions
from shared.messages.worker import NewSequence
from shared.packing import pack
from tests.support.models.tiny_tokenizers import (
    byte_fallback,
    byte_level,
    metaspace,
    regex_byte_fallback,
    wordpiece,
    write_model,
)
from tests.support.worker.guided_documents import RandomWriter

OBJECT = Grammar("json", '{"properties":{"name":{"enum":["ä","b"]},"other":{"type":"integer"}},"required":["name"]}')
COMPACT = Grammar(OBJECT.kind, OBJECT.text, compact=True)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> RandomWriter:
    return RandomWriter(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def byte(writer: RandomWriter) -> dict[bytes, int]:
    """Token by its bytes."""
    pieces = writer.library.compiler.spelling().pieces
    return {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}


def matcher_of(writer: RandomWriter, grammar: Grammar, *more_stops: int) -> GrammarMatcher:
    return writer.library.matcher(grammar, (writer.eos, *more_stops))


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
    pieces = writer.library.compiler.spelling().pieces
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
    pieces = writer.library.compiler.spelling().pieces
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
    library = GrammarLibrary(GrammarCompiler(tmp_path, size, (eos,)))
    matcher = library.matcher(Grammar("choice", '["the lazy dog", "he"]'), (eos,))
    random, out, bits = Random(1), b"", np.empty((1, mask_words(size)), dtype=np.int32)
    while matcher.stage == "binding":
        matcher.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert max(allowed) < size - 40, "ids that are no token cannot be drawn"
        token = random.choice(allowed)
        matcher.accept(token, allowed=True)
        out += library.compiler.spelling().of(token) if token != eos else b""
    assert out in (b"the lazy dog", b"he")


def test_a_vocabulary_that_spells_no_bytes_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, wordpiece())
    library = GrammarLibrary(GrammarCompiler(tmp_path, 200, (1,)))
    with pytest.raises(GrammarRefused, match="does not spell bytes"):
        library.compiled(OBJECT)


def told(library: GrammarLibrary, *grammars: Grammar) -> list[CompileResult]:
    outcomes: list[CompileResult] = []
    all_told = threading.Event()

    def tell(outcome: CompileResult) -> None:
        outcomes.append(outcome)
        if len(outcomes) == len(grammars):
            all_told.set()

    for grammar in grammars:
        library.request(grammar, tell)
    assert all_told.wait(60)
    return outcomes


def test_whoever_asks_hears_whether_a_grammar_compiles(writer: RandomWriter) -> None:
    good, bad = Grammar("regex", "[0-9]{3}"), Grammar("regex", "a(b")
    behind = Grammar("regex", "[0-9]{3}", after="</think>")
    outcomes = {outcome.grammar: outcome.error for outcome in told(writer.library, good, bad, behind)}
    assert outcomes == {
        good: None,
        bad: "Regex parsing error at position 4: The parenthesis is not closed.",
        behind: None,
    }
    assert told(writer.library, good) == [CompileResult(good, None)]


def test_what_was_forgotten_is_compiled_again(writer: RandomWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.guided.library.MAX_KEPT", 2)
    first = writer.library.compiled(Grammar("regex", "first"))
    for number in range(3):
        writer.library.compiled(Grammar("regex", f"other{number}"))
    assert writer.library.compiled(Grammar("regex", "first")) is not first


def test_no_more_is_compiled_while_too_much_waits(writer: RandomWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.guided.library.MAX_WAITING", 0)
    (outcome,) = told(writer.library, Grammar("regex", "never seen"))
    assert outcome.error is not None
    assert "try again later" in outcome.error


class SlowCompiler(GrammarCompiler):
    """Compiles what is `slow` only when it is told to."""

    def __init__(self) -> None:
        super().__init__(Path(), 64, ())
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)

    def compile(self, grammar: Grammar) -> Any:
        if grammar.text.startswith("slow"):
            self.begun.release()
            assert self.go_on.wait(60)
        raise GrammarRefused(f"tried {grammar.text}")


def test_grammars_that_take_very_long_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.guided.library.STUCK_TIMEOUT", 0.0)
    compiler = SlowCompiler()
    library = GrammarLibrary(compiler)
    late: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    for number in range(MAX_STUCK):
        library.request(Grammar("regex", f"slow{number}"), late.put)
        assert compiler.begun.acquire(timeout=60)
        if number < MAX_STUCK - 1:
            quick = Grammar("regex", f"quick{number}")
            assert told(library, quick) == [CompileResult(quick, f"tried quick{number}")]
    (refused,) = told(library, Grammar("regex", "one too many"))
    assert "try later" in (refused.error or "")
    compiler.go_on.set()
    assert sorted(late.get(timeout=60).grammar.text for _ in range(MAX_STUCK)) == [f"slow{n}" for n in range(MAX_STUCK)]
    quick = Grammar("regex", "quick again")
    while (outcome := told(library, quick)[0]).error != "tried quick again":
        assert "try later" in (outcome.error or "")


def test_broken_texts_of_every_kind_are_refused(writer: RandomWriter) -> None:
    for grammar in (
        Grammar("json", "{"),
        Grammar("choice", "{"),
        Grammar("choice", "[1]"),
        Grammar("structural_tag", "{"),
        Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "other"}}'),
        Grammar("grammar", "root ::="),
        Grammar("grammar", 'other ::= "a"'),
        Grammar("grammar", "root ::= é"),
        Grammar("json", json.dumps({"items": {"type": "foo"}})),
    ):
        with pytest.raises(GrammarRefused) as refused:
            writer.library.compiled(grammar)
        assert str(refused.value)
        assert "/project/cpp" not in str(refused.value), "no client cares for the library's sources"


def test_slots_without_a_grammar_have_no_mask(writer: RandomWriter) -> None:
    guided = GuidedSequences(writer.library, writer.vocab_size)

    def new(number: int, grammar: Grammar | None) -> NewSequence:
        return NewSequence(
            sequence=SequenceId(number),
            tokens=pack([1]),
            prompt_length=1,
            computed=0,
            blocks=b"",
            sampling=SamplingOptions(seed=0),
            stop_token_ids=(writer.eos,),
            grammar=grammar,
        )

    nobody, alone = np.zeros(2, dtype=np.int32), np.zeros((2, 0), dtype=np.int32)
    guided.add(0, new(0, None))
    assert guided.mask(np.array([0, 1]), nobody, alone) is None
    guided.add(1, new(1, OBJECT))
    mask = guided.mask(np.array([0, 1]), nobody, alone)
    assert mask is not None
    assert mask.rows.tolist() == [1]
    guided.release(1)
    assert guided.mask(np.array([0, 1]), nobody, alone) is None
