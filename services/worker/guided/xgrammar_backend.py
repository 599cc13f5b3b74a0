"""Grammars compiled and followed by xgrammar, see `automaton.GrammarBackend`.

xgrammar is imported here, and late, as most engines need it never; and without what it imports for others.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from services.worker.guided.automaton import Bits
from services.worker.guided.schema.keywords import GrammarRefused, refuse
from services.worker.guided.schema.normal_form import normal_form
from services.worker.guided.vocabulary import TokenBytes, choices_of, parsed_json
from shared.messages.generation import Grammar

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 16
"""Characters of white space in a row: enough to indent, an end to a model that would go on for ever."""

_THREADS = 1
"""xgrammar's own for one grammar: compiling must not take the cores from computing."""

_NAMED_ONLY = ("torch", "transformers")
"""Libraries that xgrammar imports, and of which we need nothing."""

_SOURCE = re.compile(r"^\s*\[[\d:]+\] \S+?:\d+: ")
_CHECK = re.compile(r"^Check failed: \(.*?\)(?: is false)?: ")


class _StubType:
    """Stands for what nobody uses, from whatever it is made."""

    def __init__(self, *_: object, **__: object) -> None: ...


class _StubModule(ModuleType):
    """Stands for a library of which xgrammar only names things."""

    def __getattr__(self, name: str) -> type[_StubType]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubType


def _load_xgrammar() -> None:
    """Imports it, in a process that has neither PyTorch nor `transformers` without these, which take most of the time
    and memory, and which only functions need that are not called here. No other thread may import them meanwhile.
    Raises ImportError."""
    if not any(name in sys.modules for name in (*_NAMED_ONLY, "xgrammar")):
        try:
            _load_alone()
        except Exception:  # whatever a release says that does more with them as it is imported
            for name in [each for each in sys.modules if each.partition(".")[0] == "xgrammar"]:
                del sys.modules[name]
    import_module("xgrammar")


def _load_alone() -> None:
    try:
        sys.modules["torch"] = None  # type: ignore[assignment] # tvm_ffi goes without
        import_module("tvm_ffi")
        sys.modules |= {name: _StubModule(name) for name in _NAMED_ONLY}
        import_module("xgrammar")
    finally:
        for name in _NAMED_ONLY:
            sys.modules.pop(name, None)


class XGrammarBackend:
    """Owns the vocabulary as xgrammar sees it. Any thread may use it."""

    def __init__(self, tokens: TokenBytes, vocab_size: int, stops: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._stops = stops
        self._loading = Lock()
        self._compilers: dict[bool, xgrammar.GrammarCompiler] = {}
        """By whether special tokens are text."""

    def load(self) -> None:
        """Reads the vocabulary. Raises GrammarRefused."""
        for with_special in (False, True):
            self._compiler(with_special=with_special)

    def compile(self, grammar: Grammar) -> XGrammarCompiled:
        """See `GrammarBackend.compile`."""
        try:
            return XGrammarCompiled(self._compile(grammar))
        except RuntimeError as error:  # the library's only kind, for whatever it cannot take
            raise GrammarRefused(_without_source(str(error))) from None
        except UnicodeDecodeError as error:  # its message, which cites a character by its first byte
            raise GrammarRefused(_without_source(error.object.decode(errors="replace"))) from None

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        compiler = self._compiler(with_special=grammar.kind == "structural_tag")
        match grammar.kind:
            case "json":
                return _json(compiler, grammar)
            case "regex":
                return compiler.compile_regex(grammar.text)
            case "choice":
                return compiler.compile_grammar(_choice(grammar.text))
            case "grammar":
                return compiler.compile_grammar(grammar.text)
            case "structural_tag":
                return compiler.compile_structural_tag(normalize_structural_tag(grammar.text))

    def _compiler(self, *, with_special: bool) -> xgrammar.GrammarCompiler:
        with self._loading:
            if with_special not in self._compilers:
                pieces = self._tokens.spelled if with_special else self._tokens.ordinary
                self._compilers[with_special] = self._load(pieces)
            return self._compilers[with_special]

    def _load(self, pieces: list[bytes]) -> xgrammar.GrammarCompiler:
        try:
            _load_xgrammar()
            import xgrammar
        except ImportError:
            raise GrammarRefused("guided decoding is not installed on this engine (the package xgrammar)") from None
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=list(self._stops) or None
        )
        return xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_enabled=False)


class XGrammarCompiled:
    """Owns a grammar that xgrammar has compiled, see `automaton.CompiledGrammar`."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    @property
    def memory_size_bytes(self) -> int:
        """Of the compiled grammar."""
        return self._compiled.memory_size_bytes

    def automaton(self, stops: tuple[int, ...]) -> XGrammarAutomaton:
        """See `CompiledGrammar.automaton`."""
        import xgrammar

        return XGrammarAutomaton(xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=list(stops) or None))


class XGrammarAutomaton:
    """Owns one sequence's matcher, see `automaton.Automaton`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher
        self.accept_token = matcher.accept_token
        self.rollback = matcher.rollback
        self.is_terminated = matcher.is_terminated

    def fill(self, bits: Bits) -> None:
        """See `Automaton.fill`."""
        self._matcher.fill_next_token_bitmask(bits[np.newaxis], 0)

    def accept_bytes(self, text: bytes) -> int:
        """See `Automaton.accept_bytes`. The library takes it as one step."""
        return int(self._matcher.accept_string(text))

    def forced_text(self) -> str:
        """See `Automaton.forced_text`."""
        try:
            return self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:
            return ""


def _json(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    text = json.dumps(normal_form(parsed_json(grammar.text)), ensure_ascii=False)
    if grammar.compact:
        return compiler.compile_json_schema(text, any_whitespace=False)
    return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)


def _choice(text: str) -> str:
    """One of the strings, as EBNF. JSON's escapes are EBNF's, but for surrogates: characters stay themselves."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices_of(text))


def _without_source(text: str) -> str:
    """The library's message without its time and source line."""
    return _CHECK.sub("", _SOURCE.sub("", text)).strip()[:500]


# The JSON schemas within a structural tag, brought into the shapes that the compiler enforces.


MAX_LEVELS = 128


def normalize_structural_tag(text: str) -> str:
    """The tag with each of its schemas in normal form, and white space bounded in what they describe. Raises
    GrammarRefused."""
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
    made = {
        name: _schema(value, f"{path}.{name}")
        if _holds_schema(part, name)
        else _with_normal_forms(value, f"{path}.{name}")
        for name, value in part.items()
    }
    if part.get("type") == "json_schema" and part.get("max_whitespace_cnt") is None:
        made["max_whitespace_cnt"] = MAX_WHITESPACE
    return made


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
