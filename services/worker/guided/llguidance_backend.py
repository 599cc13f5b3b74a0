"""Grammars compiled and followed by llguidance, see `automaton.GrammarBackend`. The library is imported late.

It reads JSON schemas itself, and refuses keywords that it does not enforce.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from services.worker.guided.automaton import AutomatonFailed, Bits
from services.worker.guided.schema.keywords import GrammarRefused, refuse
from services.worker.guided.vocabulary import TokenBytes, choices_of, parsed_json
from services.worker.sampling.token_bits import mask_bits, mask_words
from shared.messages.generation import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_STRICT: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
_FLEXIBLE: JsonCompileOptions = {
    **_STRICT,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}",
}
_COMPACT: JsonCompileOptions = {**_STRICT, "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""What a schema may not say otherwise. The same white space as xgrammar's."""

_DEAD_END = "NoExtensionBias"
"""What the library says where nothing may follow and the grammar may not end either."""
_SILENT = 0
"""The library's log level."""
_MAX_ERROR = 500


class LLGuidanceBackend:
    """Owns the vocabulary as llguidance sees it."""

    def __init__(self, tokens: TokenBytes, vocab_size: int, stops: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._stops = stops
        self._tokenizer: LLTokenizer | None = None
        self._by_bytes: dict[bytes, int] = {}

    def load(self) -> None:
        """Reads the vocabulary. Raises GrammarRefused."""
        self._loaded()

    def compile(self, grammar: Grammar) -> LLGuidanceCompiled:
        """See `GrammarBackend.compile`."""
        tokenizer = self._loaded()
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, self._source(grammar), log_level=_SILENT)
        except UnicodeEncodeError:
            raise GrammarRefused("half of a surrogate pair is no character") from None
        except (ValueError, RecursionError) as error:
            raise GrammarRefused(_first_line(str(error))) from None
        if matcher.is_error():
            raise GrammarRefused(_first_line(matcher.get_error()))
        return LLGuidanceCompiled(matcher, self._by_bytes, self._vocab_size)

    def _source(self, grammar: Grammar) -> str:
        import llguidance

        match grammar.kind:
            case "json":
                return _json(grammar)
            case "regex":
                # As in ECMAScript, and in xgrammar: \d and \w are ASCII.
                return llguidance.grammar_from("lark", f"start: /{llguidance.regex_to_lark(grammar.text, 'dw')}/")
            case "choice":
                choices = (json.dumps(choice, ensure_ascii=False) for choice in choices_of(grammar.text))
                return llguidance.grammar_from("lark", f"start: {' | '.join(choices)}")
            case "grammar":
                return llguidance.grammar_from("grammar", grammar.text)
            case "structural_tag":
                raise GrammarRefused("structural tags need --grammar-backend xgrammar or auto")

    def _loaded(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                from llguidance import LLTokenizer, TokenizerWrapper
            except ImportError:
                raise GrammarRefused("the package llguidance is not installed on this engine") from None
            # A stop token of its own, behind all others: which tokens end a sequence is each sequence's.
            pieces = [*self._tokens.ordinary, b""]
            vocabulary = _Vocabulary(pieces, self._vocab_size, self._tokens)
            self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), len(pieces), self._vocab_size)
            self._by_bytes = {piece: token for token, piece in enumerate(self._tokens.ordinary) if piece}
        return self._tokenizer


class _Vocabulary:
    """As `llguidance.TokenizerWrapper` reads it."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, pieces: list[bytes], stop: int, tokens: TokenBytes) -> None:
        self.tokens = pieces
        self.eos_token_id = stop
        self._tokenizer = tokens.tokenizer

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class LLGuidanceCompiled:
    """Owns a matcher at its start, of which each sequence has a copy, see `automaton.CompiledGrammar`."""

    def __init__(self, matcher: LLMatcher, by_bytes: dict[bytes, int], vocab_size: int) -> None:
        self._matcher = matcher
        self._by_bytes = by_bytes
        self._vocab_size = vocab_size

    @property
    def memory_size_bytes(self) -> int:
        """The library does not say; the limit of the process holds."""
        return 0

    def automaton(self, stops: tuple[int, ...]) -> LLGuidanceAutomaton:
        """See `CompiledGrammar.automaton`."""
        return LLGuidanceAutomaton(self._matcher.deep_copy(), stops, self._by_bytes, self._vocab_size)


class LLGuidanceAutomaton:
    """Owns one sequence's matcher, see `automaton.Automaton`. The matcher knows no stop tokens."""

    def __init__(self, matcher: LLMatcher, stops: tuple[int, ...], by_bytes: dict[bytes, int], vocab_size: int) -> None:
        self._matcher = matcher
        self._stops = frozenset(stops)
        self._stop_bits = mask_bits(stops, vocab_size)
        self._by_bytes = by_bytes
        self._words = np.empty(mask_words(vocab_size + 1), dtype=np.int32)
        """One token more than the vocabulary has, for the library's stop token."""
        self._text_bits = ~mask_bits((*stops, vocab_size), vocab_size + 1)
        self._terminated = False

    def fill(self, bits: Bits) -> None:
        """See `Automaton.fill`."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if _first_line(self._matcher.get_error()) == _DEAD_END:
            bits[:] = 0
            return
        self._check()
        np.bitwise_and(self._words[: len(bits)], self._text_bits[: len(bits)], out=bits)
        if self._matcher.is_accepting():
            bits |= self._stop_bits

    def accept_token(self, token: int) -> bool:
        """See `Automaton.accept_token`."""
        if self._terminated:
            return False
        if token in self._stops:
            self._terminated = self._matcher.is_accepting()
            return self._terminated
        return self._consume([token]) == 1

    def accept_bytes(self, text: bytes) -> int:
        """See `Automaton.accept_bytes`. In the longest tokens that there are, as the library takes nothing else."""
        tokens = self._longest_tokens(text)
        taken = self._consume(tokens)
        if taken < len(tokens):
            self.rollback(taken)
            return 0
        return taken

    def rollback(self, steps: int) -> None:
        """See `Automaton.rollback`."""
        steps -= self._terminated and steps > 0
        self._terminated = False
        if steps:
            self._matcher.rollback(steps)
            self._check()

    def is_terminated(self) -> bool:
        """See `Automaton.is_terminated`."""
        return self._terminated

    def forced_text(self) -> str:
        """See `Automaton.forced_text`."""
        forced = self._matcher.compute_ff_bytes()
        self._check()
        try:
            return forced.decode()
        except UnicodeDecodeError:
            return ""

    def _consume(self, tokens: list[int]) -> int:
        taken = self._matcher.try_consume_tokens(tokens)
        self._check()
        return taken

    def _longest_tokens(self, text: bytes) -> list[int]:
        """None at all where a byte has no token."""
        tokens: list[int] = []
        start = 0
        while start < len(text):
            end = next((end for end in range(len(text), start, -1) if text[start:end] in self._by_bytes), start)
            if end == start:
                return []
            tokens.append(self._by_bytes[text[start:end]])
            start = end
        return tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise AutomatonFailed(f"llguidance cannot follow it any further: {_first_line(self._matcher.get_error())}")


def _json(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    schema = parsed_json(grammar.text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refuse("$", "nothing satisfies it" if schema is False else "a schema is an object or a boolean")
    _check_ids(schema)
    text = json.dumps({name: value for name, value in schema.items() if name != "x-guidance"})
    return LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT if grammar.compact else _FLEXIBLE)


def _check_ids(schema: dict[str, Any]) -> None:
    """Refuses schemas within this one that have a base of their own, from which the library reads other references."""
    below: list[tuple[str, Any]] = [(f"$.{name}", value) for name, value in schema.items()]
    while below:
        path, part = below.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$id"), str):
                raise refuse(f"{path}.$id", "a schema within a schema is not supported; use $defs and #/$defs/…")
            below += [(f"{path}.{name}", value) for name, value in part.items()]
        elif isinstance(part, list):
            below += [(f"{path}[{place}]", value) for place, value in enumerate(part)]


def _first_line(error: str) -> str:
    """What the library says is wrong, without its picture of the place, or of its own stack."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")] or lines
    return (said[0] if said else "it does not say why")[:_MAX_ERROR]
