"""From a grammar to what a matcher runs on, with xgrammar. Slow and without bounds: belongs in a process of its own.

xgrammar is imported here, and late: it brings a part of transformers, two seconds that most engines need not spend.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from services.worker.guided.matcher import TokenPieces
from services.worker.guided.schema.keywords import GrammarRefused, refuse
from services.worker.guided.schema.normal_form import normal_form
from services.worker.guided.vocabulary import TokenBytes, never_second, token_bytes
from services.worker.sampling.masks import mask_bits
from shared.messages.generation import Grammar

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 16
"""Characters of white space in a row: enough to indent, an end to a model that would go on for ever."""

_THREADS = 1
"""xgrammar's own for one grammar: compiling must not take the cores from computing."""

_SOURCE = re.compile(r"^\s*\[[\d:]+\] \S+?:\d+: ")
_CHECK = re.compile(r"^Check failed: \(.*?\)(?: is false)?: ")


class GrammarCompiler:
    """Owns the vocabulary as xgrammar sees it, read when it is first needed. Any thread may use it."""

    def __init__(self, folder: Path | str, vocab_size: int, stops: tuple[int, ...]) -> None:
        """`stops` end a sequence; ids of `vocab_size` and above never do."""
        self._folder = Path(folder)
        self.vocab_size = vocab_size
        self.stops = tuple(token for token in stops if token < vocab_size)
        self._loading = Lock()
        self._tokens: TokenBytes | None = None
        self._spelling: TokenPieces | None = None
        self._backends: dict[bool, xgrammar.GrammarCompiler] = {}

    def load(self) -> None:
        """Reads the vocabulary, as `compile` would when it is first called. Raises GrammarRefused."""
        self.spelling()
        for with_special in (False, True):
            self._backend(with_special=with_special)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """What matchers of `grammar` run on. Takes milliseconds to seconds. Raises GrammarRefused."""
        try:
            return self._compile(grammar)
        except RuntimeError as error:  # the library's only kind, for whatever it cannot take
            raise GrammarRefused(_without_source(str(error))) from None
        except UnicodeDecodeError as error:  # its message, which cites a character by its first byte
            raise GrammarRefused(_without_source(error.object.decode(errors="replace"))) from None

    def spelling(self) -> TokenPieces:
        """The bytes of each token, special ones as they are written. Raises GrammarRefused."""
        if self._spelling is None:  # made twice, it would be the same; and no lock is held while the rest is loaded
            self._spelling = _spelling(self._token_bytes(), self.vocab_size)
        return self._spelling

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        self.spelling()
        backend = self._backend(with_special=grammar.kind == "structural_tag")
        match grammar.kind:
            case "json":
                return _json(backend, grammar)
            case "regex":
                return backend.compile_regex(grammar.text)
            case "choice":
                return backend.compile_grammar(_choice(grammar.text))
            case "grammar":
                return backend.compile_grammar(grammar.text)
            case "structural_tag":
                return backend.compile_structural_tag(normalize_structural_tag(grammar.text))

    def _backend(self, *, with_special: bool) -> xgrammar.GrammarCompiler:
        tokens = self._token_bytes()
        with self._loading:
            if with_special not in self._backends:
                self._backends[with_special] = self._load(tokens.spelled if with_special else tokens.ordinary)
            return self._backends[with_special]

    def _token_bytes(self) -> TokenBytes:
        with self._loading:
            if self._tokens is None:
                self._tokens = token_bytes(self._folder, self.vocab_size)
            return self._tokens

    def _load(self, pieces: list[bytes]) -> xgrammar.GrammarCompiler:
        try:
            import xgrammar
        except ImportError:
            raise GrammarRefused("guided decoding is not installed on this engine (the package xgrammar)") from None
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=self.vocab_size, stop_token_ids=list(self.stops) or None
        )
        return xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_enabled=False)


def _spelling(tokens: TokenBytes, vocab_size: int) -> TokenPieces:
    barred = {lead: ~mask_bits(second, vocab_size) for lead, second in never_second(tokens.spelled).items()}

    def encode(text: str) -> list[int]:
        return list(tokens.tokenizer.encode(text, add_special_tokens=False).ids)

    return TokenPieces(tokens.spelled, barred, encode)


def _json(backend: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    try:
        schema: Any = json.loads(grammar.text)
    except ValueError as error:
        raise GrammarRefused(f"not valid JSON ({error})") from None
    text = json.dumps(normal_form(schema), ensure_ascii=False)
    if grammar.compact:
        return backend.compile_json_schema(text, any_whitespace=False)
    return backend.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)


def _choice(text: str) -> str:
    """One of the strings, as EBNF. JSON's escapes are EBNF's, but for surrogates: characters stay themselves."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in _strings(text))


def _strings(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise GrammarRefused(f"not valid JSON ({error})") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarRefused("a choice is a list of strings, at least one")
    return choices


def _without_source(text: str) -> str:
    """The library's message without its time and source line."""
    return _CHECK.sub("", _SOURCE.sub("", text)).strip()[:500]


# The JSON schemas within a structural tag, brought into the shapes that the compiler enforces.


MAX_LEVELS = 128


def normalize_structural_tag(text: str) -> str:
    """The tag with each of its schemas in normal form. Raises GrammarRefused."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"not valid JSON ({error})") from None
    return json.dumps(_with_normal_forms(tag, "$"), ensure_ascii=False)


def _with_normal_forms(part: Any, path: str) -> Any:
    if path.count(".") > MAX_LEVELS:
        raise refuse(path, "nested too deeply")
    if isinstance(part, list):
        return [_with_normal_forms(item, f"{path}.{number}") for number, item in enumerate(part)]
    if not isinstance(part, dict):
        return part
    return {
        name: _schema(value, f"{path}.{name}")
        if _holds_schema(part, name)
        else _with_normal_forms(value, f"{path}.{name}")
        for name, value in part.items()
    }


def _holds_schema(part: dict[str, Any], name: str) -> bool:
    """In a format of JSON, and (older) in a structure."""
    return (name == "json_schema" and part.get("type") == "json_schema") or (name == "schema" and "begin" in part)


def _schema(schema: Any, path: str) -> Any:
    try:
        return normal_form(json.loads(schema) if isinstance(schema, str) else schema)
    except ValueError as error:
        raise refuse(path, f"not valid JSON ({error})") from None
    except GrammarRefused as refused:
        raise GrammarRefused(f"{path}: {refused}") from None
