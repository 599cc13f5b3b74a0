"""Random output under a grammar, without a model; and the schemas that tests draw documents of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jsonschema
import numpy as np
from numpy.typing import NDArray

from services.worker.guided.compiler import GrammarCompiler
from services.worker.guided.limits import GrammarBackendName
from services.worker.guided.matcher import GrammarMatcher, make_matcher
from services.worker.sampling.token_bits import mask_words
from shared.messages.generation import Grammar
from tests.support.models.tiny_tokenizers import byte_level, write_model
from tests.support.paths import DATA

Indices = NDArray[np.intp]
EOS = "</s>"


class Case(NamedTuple):
    """A schema, and documents of which the suite says whether they are valid."""

    name: str
    schema: Any
    documents: list[tuple[Any, bool]]
    validator: type[jsonschema.protocols.Validator]

    def valid(self, document: Any) -> bool:
        return self.validator(self.schema).is_valid(document)

    def grammar(self, *, compact: bool = True) -> Grammar:
        return Grammar("json", json.dumps(self.schema), compact=compact)


def cases() -> list[Case]:
    """The official suite's and our own."""
    official = [
        *_read("json_schema_suite/draft2020-12.jsonl", jsonschema.Draft202012Validator),
        *_read("json_schema_suite/draft7.jsonl", jsonschema.Draft7Validator),
    ]
    return [*official, *_read("practical_schemas.jsonl", jsonschema.Draft202012Validator)]


def practical() -> list[Case]:
    return list(_read("practical_schemas.jsonl", jsonschema.Draft202012Validator))


def _read(name: str, validator: type[jsonschema.protocols.Validator]) -> Iterator[Case]:
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chosen = jsonschema.Draft7Validator if row.get("draft") == 7 else validator
        yield Case(row["description"], row["schema"], [tuple(test) for test in row.get("tests", [])], chosen)


class RandomWriter:
    """Draws tokens of a small byte-level vocabulary, any that the grammar allows, with a leaning to come to an end."""

    def __init__(self, folder: Path, backend: GrammarBackendName = "xgrammar") -> None:
        tokenizer = byte_level()
        write_model(folder, tokenizer)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        eos = tokenizer.token_to_id(EOS)
        assert eos is not None
        self.eos = eos
        self.folder = folder
        self.compiler = GrammarCompiler(folder, self.vocab_size, (self.eos,), backend)
        self.tokenizer = tokenizer
        self._pieces = self.compiler.spelling().pieces
        self._closing = np.array([piece[:1] in (b'"', b"]", b"}", b",") for piece in self._pieces])

    def matcher(self, grammar: Grammar, stops: tuple[int, ...]) -> GrammarMatcher:
        """A new matcher, in this process."""
        return make_matcher(self.compiler.compile(grammar), stops, grammar.after, self.compiler.spelling())

    def allowed(self, matcher: GrammarMatcher) -> Indices:
        """The tokens that may follow."""
        bits = np.zeros((1, mask_words(self.vocab_size)), dtype=np.int32)
        matcher.fill(bits)
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.vocab_size])

    def write(self, grammar: Grammar, random: Random, most: int = 150) -> tuple[list[int], bytes | None]:
        """(tokens, their text, None where it was cut)."""
        matcher = self.matcher(grammar, (self.eos,))
        tokens: list[int] = []
        while len(tokens) < most:
            allowed = self.allowed(matcher)
            token = self._drawn(allowed, random, eager=len(tokens) > most // 5)
            if token == self.eos:
                return tokens, b"".join(self._pieces[token] for token in tokens)
            matcher.accept(token, allowed=True)
            tokens.append(token)
        return tokens, None

    def _drawn(self, allowed: Indices, random: Random, *, eager: bool) -> int:
        if self.eos in allowed and random.random() < 0.5:
            return self.eos
        closing = allowed[self._closing[allowed]]
        if eager and len(closing) and random.random() < 0.7:
            return int(random.choice(closing.tolist()))
        return int(random.choice(allowed.tolist()))
