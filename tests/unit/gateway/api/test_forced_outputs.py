"""Forced calls of every format, written at random under their grammars: what comes out is read as calls that fit."""

from __future__ import annotations

import json
import random
from typing import get_args

import jsonschema
import numpy as np
import pytest
import xgrammar

from services.gateway.api.tool_grammars import forced_calls
from services.gateway.api.tools import ToolDefinition
from services.worker.guided.xgrammar_backend import normalize_structural_tag
from shared.messages.dialects import ToolFormat
from shared.models.structural_tags import tagged
from tests.support.gateway.tool_calls import read

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "e": {"enum": ["x", "y z", 5, None]},
        "b": {"type": "boolean"},
        "s": {"type": "string", "maxLength": 5},
        "o": {
            "type": "object",
            "properties": {"k": {"type": "array", "items": {"type": "integer"}}},
            "required": ["k"],
        },
        "t": {"type": "string"},
    },
    "required": ["a", "e"],
}
TOOLS = (ToolDefinition("f", SCHEMA, True), ToolDefinition("fg", {"type": "object", "properties": {}}, True))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
PIECES = [*(chr(code) for code in range(32, 127)), "\n", "é", "｜", "▁", "<think>", "</tool_call>", "<|call|>", ""]
STOP = len(PIECES) - 1
CLOSING = {PIECES.index(character) for character in '"<}]),'}
"""Taken more often than others, so that outputs end."""
MAX_TOKENS = 1500


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    pieces = [piece.encode() for piece in PIECES]
    info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=[STOP])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def at_random(grammar: xgrammar.CompiledGrammar, chance: random.Random) -> str | None:
    """An output under the grammar; None where it does not end soon."""
    matcher, text = xgrammar.GrammarMatcher(grammar), ""
    mask = np.zeros((1, (len(PIECES) + 31) // 32), dtype=np.int32)
    for _ in range(MAX_TOKENS):
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(PIECES)]).tolist()
        if allowed[-1] == STOP:
            if len(allowed) == 1 or chance.random() < 0.5:
                return text
            allowed.pop()
        closing = [token for token in allowed if token in CLOSING] if chance.random() < 0.6 else []
        token = chance.choice(closing or allowed)
        assert matcher.accept_token(token)
        text += PIECES[token]
    return None


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", get_args(ToolFormat))
def test_what_a_grammar_lets_a_model_write_is_read_as_calls_that_fit(
    compiler: xgrammar.GrammarCompiler, form: ToolFormat, parallel: bool
) -> None:
    tag = json.dumps(tagged(forced_calls(form, TOOLS, parallel=parallel)))
    grammar, chance, ended = compiler.compile_structural_tag(normalize_structural_tag(tag)), random.Random(form), 0
    for _ in range(10):
        if (text := at_random(grammar, chance)) is None:
            continue
        ended += 1
        got = read([text], form, SCHEMAS, reasoning="openai_gptoss" if form == "openai" else None)
        assert got.calls, text
        assert got.broken == 0, text
        assert form == "openai" or not got.content, text
        assert parallel or len(got.calls) == 1, text
        for name, arguments in got.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert ended > 0
