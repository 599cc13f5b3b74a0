"""Whatever a client says of tools: it is refused by its field, or can be served."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.chat import AssistantMessage, read_chat
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.dialects import ReasoningFormat, ToolFormat
from shared.messages.model_card import ModelCard

CARD = ModelCard(
    name=ModelName("demo"), max_model_len=2048, vocab_size=2048, eos_token_ids=(2,), dtype="float32", created=1
)
WORDS = st.sampled_from(["f", "g", "a", "type", "object", "string", "function", "name", "", "é"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), WORDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=5,
)
PROPERTIES = st.dictionaries(WORDS, st.fixed_dictionaries({}, optional={"type": JSON, "enum": JSON, "anyOf": JSON}))
SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("object") | JSON,
        "properties": PROPERTIES | JSON,
        "required": st.lists(WORDS, max_size=2) | JSON,
        "$defs": JSON,
        "anyOf": JSON,
    },
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "h"]) | JSON},
    optional={"parameters": SCHEMAS | JSON, "strict": st.booleans() | JSON, "description": JSON},
)
SOUND = st.fixed_dictionaries({"name": st.sampled_from(["f", "g", "h"]), "parameters": SCHEMAS})
TOOLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("function"), "function": SOUND}),
        st.fixed_dictionaries({"type": st.just("function") | JSON}, optional={"function": FUNCTIONS | JSON}),
    ),
    max_size=2,
)
CHOICES = st.one_of(
    st.sampled_from(["auto", "none", "required"]),
    st.just({"type": "function", "function": {"name": "f"}}),
    JSON,
)
DIALECTS = st.tuples(
    st.sampled_from([None, *get_args(ToolFormat)]),
    st.sampled_from([None, *get_args(ReasoningFormat)]),
).map(lambda formats: OutputDialect(*formats))
OUTPUT = "<think>x</think>[f(a=1)]<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@settings(max_examples=120, deadline=None)
@given(tools=TOOLS | JSON, choice=CHOICES, parallel=st.none() | st.booleans(), dialect=DIALECTS, guided=st.booleans())
def test_tools_are_refused_by_their_field_or_served(
    tools: Any, choice: Any, parallel: bool | None, dialect: OutputDialect, guided: bool
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice}
    body |= {"parallel_tool_calls": parallel}
    if guided:
        body["response_format"] = {"type": "json_object"}
    job = _job(body, dialect)
    if isinstance(job, RequestError):
        assert (job.status, job.param is None) == (400, False)
        return
    if job.output_grammar is not None and job.output_grammar.grammar.kind == "structural_tag":
        assert json.loads(job.output_grammar.grammar.text)["type"] == "structural_tag"
    if job.parser_options is not None:
        speech = AssistantMessage(job.parser_options)
        speech.feed(OUTPUT, "stop")
        assert speech.body()["role"] == "assistant"


def _job(body: dict[str, Any], dialect: OutputDialect) -> GenerationRequest | RequestError:
    try:
        return read_chat(msgspec.json.encode(body), [CARD], RequestLimits(), lambda _: dialect)
    except RequestError as error:
        return error
