"""OpenAI's Responses API without a server: bodies read as chats, and items of an output that is cut anywhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.response import ChoiceState, ResponseHeader
from services.gateway.api.responses.events import ResponseEvents
from services.gateway.api.responses.output_items import OutputItems
from services.gateway.api.responses.request import ResponseRequest, read_responses
from services.gateway.api.responses.tools import call_targets
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import ParserOptions
from shared.ids import Attempt, ModelName, RequestId
from shared.messages.gateway import Delta, LogprobText, PositionLogprobs
from shared.messages.generation import FinishReason
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import ChatPrompt
from tests.support.gateway.cut_outputs import assert_events_add_up
from tests.support.gateway.tool_calls import Call, written

CARD = ModelCard(name=ModelName("m"), created=17, max_model_len=64, vocab_size=100, eos_token_ids=(2,), dtype="float32")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER | {"name": "find"}]}
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Runs it."}
THINKS = OutputDialect(tools="hermes", reasoning="qwen3", controls=("enable_thinking",))
OFFLINE: dict[str, Any] = {"type": "web_search", "external_web_access": False}
LOGPROBS = ["message.output_text.logprobs"]


def read(dialect: OutputDialect = THINKS, **fields: Any) -> ResponseRequest:
    default = {"model": "m", "input": "hi"}
    body = {name: value for name, value in (default | fields).items() if value is not ...}
    asked = read_responses(msgspec.json.encode(body), [CARD], RequestLimits(), lambda _: dialect)
    assert isinstance(asked, ResponseRequest)
    return asked


def prompt(generation: GenerationRequest) -> ChatPrompt:
    [prompt] = generation.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def messages(**fields: Any) -> Any:
    return msgspec.json.decode(prompt(read(**fields).generation).messages)


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "weather", "arguments": '{"city": "Rome"}'}


def adding(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


def test_items_add_tools_and_replace_those_of_a_name() -> None:
    hi, new = {"role": "user", "content": "hi"}, WEATHER | {"description": "New."}
    asked = read(tools=[WEATHER, OFFLINE], input=[adding(CRM), hi, adding(new, OFFLINE)])
    assert asked.echoed["tools"] == [CRM, new]
    shown = msgspec.json.decode(prompt(asked.generation).tools or b"")
    assert [(each["function"]["name"], each["function"]["description"]) for each in shown] == [
        ("crm__find", "Tells it."),
        ("weather", "New."),
    ]
    assert msgspec.json.decode(prompt(asked.generation).messages) == [hi]
    [stored, *_] = msgspec.json.decode(asked.items)
    body = msgspec.json.encode({"input": "and now?"})
    later = read_responses(body, [CARD], RequestLimits(), lambda _: THINKS, asked.items)
    assert isinstance(later, ResponseRequest)
    assert later.echoed["tools"] == [CRM, new]
    assert (stored["id"][:3], msgspec.json.decode(later.items)[0]) == ("at_", stored)
    assert prompt(read(tools=[OFFLINE]).generation).tools is None, "what is left of Codex's search is nothing"


def test_stored_items_are_read_for_the_prompt_and_kept_as_they_were() -> None:
    part = {"type": "output_text", "text": "one", "logprobs": [{"token": "one"}]}
    said = {"type": "message", "role": "assistant", "content": [part], "phase": "final_answer"}
    for odd in ({}, {"type": "reasoning", "content": {}, "summary": False}, call(1) | {"output": {"a": 1}}):
        history = msgspec.json.encode([said, *([odd] if odd else [])])
        later = read_responses(b'{"input": "two"}', [CARD], RequestLimits(), lambda _: THINKS, history)
        assert isinstance(later, ResponseRequest)
        assert msgspec.json.decode(later.items)[:-1] == msgspec.json.decode(history)
        first, *_, last = msgspec.json.decode(prompt(later.generation).messages)
        assert (first["content"], last["content"]) == ("one", "two")


def test_what_codex_says_of_itself_changes_nothing() -> None:
    said = read(client_metadata={"session_id": "x"}, reasoning={"summary": "auto"})
    assert (prompt(said.generation), said.echoed) == (prompt(read().generation), read().echoed)


def test_the_items_of_a_turn_become_one_message_of_a_chat() -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    items = [
        {"role": "user", "content": "Rome?"},
        {"id": "rs_1", **thought},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
        {"id": "fc_1", **call(1)},
        call(2),
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "dry"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and?"}]},
    ]
    assert messages(input=items, instructions="Be short.") == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "dry"},
        {"role": "user", "content": "and?"},
    ]


def test_turns_of_the_model_stay_apart() -> None:
    said = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert [each["content"] for each in messages(input=[*said, {"role": "user", "content": "?"}])] == [
        "one",
        "two",
        "?",
    ]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    again = messages(input=[{"role": "assistant", "content": "one"}, summary, call(1)])
    assert [(each["content"], each.get("reasoning_content")) for each in again] == [("one", None), (None, "hm")]
    assert "tool_calls" in again[1]
    empty = [{"type": "reasoning", "summary": [], "encrypted_content": None, "status": "completed"}, *said[:1]]
    assert messages(input=empty) == [{"role": "assistant", "content": "one"}]


def test_an_unfinished_text_is_continued() -> None:
    item = {"type": "message", "role": "assistant", "status": "incomplete", "content": "Once upon"}
    asked = prompt(read(input=[{"role": "user", "content": "Go."}, item]).generation)
    assert (asked.continue_final_message, asked.add_generation_prompt) == (True, False)
    finished = prompt(read(input=[{"role": "user", "content": "Go."}, item | {"status": "completed"}]).generation)
    assert (finished.continue_final_message, finished.add_generation_prompt) == (False, True)


def test_fields_have_the_effect_that_they_have_in_a_chat() -> None:
    asked = read(
        max_output_tokens=8, temperature=0.5, top_p=0.9, top_k=5, seed=3, stop="END", truncation="auto",
        top_logprobs=2, include=LOGPROBS, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"},
        metadata={"a": "b"}, reasoning={"effort": "none"}, prompt_cache_key="k",
    )  # fmt: skip
    generation = asked.generation
    sampling, stopping = generation.sampling, generation.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (0.5, 0.9, 5, 2)
    assert (generation.seed, stopping.max_tokens, stopping.stop) == (3, 8, ("END",))
    assert generation.truncate_prompt_tokens == 56
    assert generation.output_grammar is not None
    assert generation.parser_options is not None
    assert set(generation.parser_options.schemas) == {"weather"}
    assert prompt(generation).template_kwargs == {"enable_thinking": False}
    assert msgspec.json.decode(prompt(generation).tools or b"")[0]["function"]["description"] == "Tells it."
    echoed = asked.echoed
    assert (echoed["temperature"], echoed["max_output_tokens"], echoed["top_logprobs"]) == (0.5, 8, 2)
    assert (echoed["metadata"], echoed["tools"], echoed["reasoning"]["effort"]) == ({"a": "b"}, [WEATHER], "none")
    assert echoed["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


def test_options_of_the_prompt_cache_are_repeated_and_checked() -> None:
    assert read().echoed["prompt_cache_options"] is None
    given = {"mode": "explicit", "comparison_response_id": "resp_1", "prewarm": True}
    repeated = {"mode": "explicit", "ttl": "30m", "comparison_response_id": "resp_1"}
    assert read(prompt_cache_options=given).echoed["prompt_cache_options"] == repeated
    with pytest.raises(RequestError, match=r"prompt_cache_options.ttl: '1h' is not allowed"):
        read(prompt_cache_options={"ttl": "1h"})


def test_an_effort_is_what_the_operator_has_it_mean() -> None:
    dialect = OutputDialect(controls=("reasoning_effort", "enable_thinking"))

    def told(effort: str) -> Any:
        body = {"model": "m", "input": "hi", "reasoning": {"effort": effort}}
        limits = RequestLimits(efforts={"xhigh": "max", "minimal": "none"})
        asked = read_responses(msgspec.json.encode(body), [CARD], limits, lambda _: dialect)
        assert isinstance(asked, ResponseRequest)
        assert asked.echoed["reasoning"]["effort"] == effort
        return prompt(asked.generation).template_kwargs

    assert told("xhigh") == {"reasoning_effort": "max"}
    assert told("minimal") == {"enable_thinking": False}
    assert told("high") == {"reasoning_effort": "high"}


def test_tools_are_chosen_among_the_allowed_ones() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    generation = read(tools=[WEATHER, WEATHER | {"name": "other"}], tool_choice=choice).generation
    assert generation.parser_options is not None
    assert set(generation.parser_options.schemas) == {"weather"}


def test_tools_of_namespaces_and_custom_ones_are_functions_of_the_chat() -> None:
    """As vLLM and Codex join and fill them."""
    digits = SHELL | {"name": "digits", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}
    tools = [WEATHER, CRM | {"tools": [*CRM["tools"], SHELL]}, SHELL, digits]
    asked = read(tools=tools)
    assert asked.echoed["tools"] == tools
    shown = msgspec.json.decode(prompt(asked.generation).tools)
    assert [each["function"]["name"] for each in shown] == ["weather", "crm__find", "crm__shell", "shell", "digits"]
    text = {"type": "string"}
    assert [each["function"]["parameters"]["properties"].get("input") for each in shown] == [
        *(None, None, text, text),
        text | {"pattern": "^(?:[0-9]+)$"},
    ]
    for chosen, named in (
        ({"type": "function", "name": "find"}, "crm__find"),
        ({"type": "function", "name": "crm__find"}, "crm__find"),
        ({"type": "custom", "name": "shell", "namespace": "crm"}, "crm__shell"),
        ({"type": "custom", "name": "shell"}, "shell"),
    ):
        for choice in (chosen, {"type": "allowed_tools", "mode": "auto", "tools": [chosen]}):
            options = read(tools=tools, tool_choice=choice).generation.parser_options
            assert options is not None
            assert set(options.schemas) == {named}


def test_calls_and_instructions_that_clients_send_back() -> None:
    """As Codex does: calls of its tools, and what its developers say within the conversation."""
    shell = {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": 'echo "ä"\n'}
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        call(1) | {"name": "find", "namespace": "crm"},
        shell,
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ä"},
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
    ]
    system, _, called, *results = messages(instructions="Help.", input=turns)
    assert system == {"role": "system", "content": "Help.\n\nBe brief.\n\nBe kind."}
    functions = [each["function"] for each in called["tool_calls"]]
    assert [each["name"] for each in functions] == ["crm__find", "shell"]
    assert msgspec.json.decode(functions[1]["arguments"]) == {"input": 'echo "ä"\n'}
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in results] == [
        ("tool", "c1", "3"),
        ("tool", "c2", "ä"),
    ]
    numbered = msgspec.json.decode(read(input=[shell]).items)
    assert numbered[0]["id"].startswith("ctc_")


def test_formats_are_grammars() -> None:
    assert read(text={"format": {"type": "text"}}).generation.output_grammar is None
    schema = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    for given in (schema, {"type": "json_object"}):
        grammar = read(OutputDialect(), text={"format": given}).generation.output_grammar
        assert grammar is not None
        assert grammar.grammar.kind == "json"


def test_effort_is_what_the_chat_template_takes() -> None:
    knows = OutputDialect(controls=("reasoning_effort",))
    assert prompt(read(knows, reasoning={"effort": "high"}).generation).template_kwargs == {"reasoning_effort": "high"}
    assert prompt(read(OutputDialect(), reasoning={"effort": "none"}).generation).template_kwargs == {}
    for effort, thinks in (("none", False), ("low", True)):
        asked = read(THINKS, reasoning={"effort": effort}).generation
        assert prompt(asked).template_kwargs == {"enable_thinking": thinks}
    for dialect, said in ((OutputDialect(), "'none' is"), (OutputDialect(reasoning="qwen3"), "leave it out")):
        with pytest.raises(RequestError, match=said) as caught:
            read(dialect, reasoning={"effort": "high"})
        assert caught.value.param == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ...}, "input", "required"),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id", "the id of a stored item is"),
        ({"input": [{"type": "item_reference", "id": "x"}] * 1025}, "input", "1025 item references"),
        ({"input": [{"role": "user", "content": "x", "id": {}}]}, "input[0].id", "a text is"),
        ({"input": [{"type": "mcp_call", "id": "x"}]}, "input[0].type", "mcp_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "input_file"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "input_text"),
        ({"input": [{"role": "user", "content": "x", "status": "done"}]}, "input[0].status", "incomplete"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "in the clear"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]", "call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "mcp"),
        ({"tools": [{"type": "web_search"} | OFFLINE, {"type": "x"}]}, "tools[1].type", "'x'"),
        ({"tools": [OFFLINE | {"external_web_access": True}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "custom"}], "tool_choice": {"type": "custom", "name": "x"}}, "tools[0].name", "required"),
        ({"input": [adding({"type": "mcp"})]}, "input[0].tools[0].type", "mcp"),
        ({"input": [adding(WEATHER) | {"role": "user"}]}, "input[0].role", "'developer' is"),
        ({"input": [adding(WEATHER) | {"tools": "x"}]}, "input[0].tools", "a list of tools is"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name", "a-z"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
        ({"tools": [WEATHER | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type", "'object'"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "allowed_tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "json_schema", "schema": 1}}}, "text.format.schema", "object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "minimal"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"top_logprobs": 99, "include": LOGPROBS}, "top_logprobs", "20"),
        ({"include": ["file_search_call.results"]}, "include[0]", "logprobs"),
        ({"tools": [CRM | {"tools": []}]}, "tools[0].tools", "at least one"),
        ({"tools": [CRM | {"tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type", "web_search"),
        ({"tools": [SHELL | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.syntax", "Lark"),
        ({"tools": [SHELL | {"format": {"type": "grammar"}}]}, "tools[0].format", "regex"),
        ({"tools": [SHELL], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice", "'shell'"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]}, "input[0]", "input"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
        ({"truncation": "middle"}, "truncation", "disabled"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream is true"),
        ({"service_tier": "flex"}, "service_tier", "default"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"conversation": {"name": "x"}}, "conversation", "id"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation", "together"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "template"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"n": 2}, "n", "not known"),
        ({"temperature": -1}, "temperature", "at least 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert said in caught.value.message
    assert caught.value.message.startswith(param.split(".")[0].split("[")[0])


TOOLS, FIND = [WEATHER, SHELL, CRM], Call("crm__find", {"city": "a"})
SAID = 'say "hi\\n" \U0001f600'
ROME, OSLO = Call("weather", {"city": "Rome"}), Call("weather", {"city": "Oslo"})
OUTPUTS = {
    "text": "  Hello, you.\n",
    "thoughts": "<think>Let me\nsee.</think>\n\nHello.",
    "calls": "<think>hm</think>\n\n" + written("hermes", [ROME, OSLO]),
    "text and calls": "Well.\n" + written("hermes", [ROME]) + "\nThat is it.",
    "custom calls": written("hermes", [Call("shell", {"input": SAID}), Call("shell", {"input": ""}), FIND]),
    "no input": written("hermes", [Call("shell", {"text": "ls"})]),
    "no call": "Look: <tool_call>\nnothing\n</tool_call> done",
    "nothing": "",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_events_of_a_stream_add_up_to_the_items_wherever_the_text_is_cut(name: str) -> None:
    assert_events_add_up(OUTPUTS[name], _items, _added_up, _without_ids)


def test_items_are_what_the_output_says() -> None:
    items = _items()
    items.feed(OUTPUTS["text and calls"], "stop")
    first, call, last = items.body()
    assert [part["text"] for part in first["content"]] == ["Well."]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')
    assert call["call_id"].startswith("call_")
    assert last["content"][0]["text"].strip() == "That is it."
    assert len({first["id"], call["id"], last["id"]}) == 3
    custom = _items()
    custom.feed(OUTPUTS["custom calls"], "stop")
    said, silent, find = custom.body()
    assert (said["type"], said["name"], said["input"]) == ("custom_tool_call", "shell", SAID)
    assert said["id"].startswith("ctc_")
    assert silent["input"] == ""
    assert (find["type"], find["name"], find["namespace"]) == ("function_call", "find", "crm")
    other = _items()
    other.feed(OUTPUTS["no input"], "stop")
    assert msgspec.json.decode(other.body()[0]["input"]) == {"text": "ls"}, "what the model wrote is not lost"
    thinking = _items()
    thinking.feed(OUTPUTS["thoughts"], "stop")
    assert [item["type"] for item in thinking.body()] == ["reasoning", "message"]
    assert thinking.body()[0]["content"] == [{"type": "reasoning_text", "text": "Let me\nsee."}]


@pytest.mark.parametrize("name", OUTPUTS)
def test_another_gateway_goes_on_with_the_events_wherever_the_first_one_ended(name: str) -> None:
    """The first sends a character a step, the second three."""
    text, header = OUTPUTS[name], ResponseHeader("responses", "resp_1", 17, "m")
    expected = _items()
    expected.name = "resp_1"
    expected.feed(text, "stop")
    for at in range(len(text) + 1):
        first, choice = ResponseEvents(header, {"tools": TOOLS}), ChoiceState(0, 0, message=_items())
        sent = [event for character in text[:at] for event in first.output(choice, _delta(character))]
        second, choice = ResponseEvents(header, {"tools": TOOLS}, sent), ChoiceState(0, 0, message=_items())
        for i in range(0, len(text), 3):
            sent += second.output(choice, _delta(text[i : i + 3]))
        sent += second.output(choice, _delta("", "stop"))
        choice.finish = "stop"
        sent += second.end(second.finished(choice))
        assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
        assert [event["type"] for event in sent[:2]] == ["response.created", "response.in_progress"]
        assert sent[-1]["response"]["output"] == expected.body()
        assert _added_up(sent[2:-1]) == expected.body()


def test_white_space_alone_is_a_text() -> None:
    items = OutputItems(None)
    assert [item["content"][0]["text"] for item in _added_up([*items.feed(" ", None), *items.feed("\n", "stop")])] == [
        " \n"
    ]


def test_what_the_limit_cuts_off_is_incomplete() -> None:
    for output in ("Hel", "<think>h", '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'):
        items = _items()
        events = items.feed(output, "length")
        assert [item["status"] for item in items.body()] == ["incomplete"]
        assert events[-1]["item"] == items.body()[-1]
    aborted = _items()
    aborted.feed("Hel", "abort")
    assert [item["status"] for item in aborted.body()] == ["incomplete"]
    items = _items()
    items.feed(written("hermes", [ROME]), "length")
    assert [item["status"] for item in items.body()] == ["completed"]


def test_a_call_that_was_none_is_left_out_of_the_answer() -> None:
    items = _items()
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": 1 2}}\n</tool_call>'
    events = [event for character in call for event in items.feed(character, None)]
    events += items.feed("", "stop")
    assert [item["type"] for item in items.body()] == ["message"]
    assert items.body()[0]["content"][0]["text"] == call
    begun = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in begun] in (
        [("function_call", "incomplete"), ("message", "completed")],
        [("message", "completed")],
    )


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_reasoning_tokens_and_logprobs_are_those_of_each_part(step: int) -> None:
    """Each token is three characters, and a step brings `step` of them."""
    text = "<think>abcdefghi</think>\n\nHello, all of you in there."
    tokens = [text[i : i + 3] for i in range(0, len(text), 3)]
    items = _items()
    for i in range(0, len(tokens), step):
        part = tokens[i : i + step]
        items.parser.record_tokens(len(part))
        items.record(tuple(_position(each) for each in part))
        items.feed("".join(part), None)
    items.feed("", "stop")
    assert abs(items.parser.reasoning_tokens - 5) <= 1 + step // 3
    [logprobs] = [item["content"][0]["logprobs"] for item in _shown(items.body()) if item["type"] == "message"]
    said = "".join(each["token"] for each in logprobs)
    assert said.endswith("lo, all of you in there.")
    assert "</" not in said
    assert len(said) <= len("Hello, all of you in there.") + 2


def test_plain_text_has_the_logprobs_of_all_tokens() -> None:
    items = OutputItems(None)
    events = []
    for piece in ("", " a", "b", ""):
        items.parser.record_tokens(1)
        items.record((_position(piece),))
        events += items.feed(piece, None)
    events += items.feed("", "stop")
    [item] = _shown(_added_up(events))
    assert [each["token"] for each in item["content"][0]["logprobs"]] == ["", " a", "b"]
    assert items.parser.reasoning_tokens == 0


def _shown(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As clients see them."""
    shown: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(items))
    return shown


def _delta(text: str, finish: FinishReason | None = None) -> Delta:
    return Delta(RequestId("r"), Attempt(1), 0, (), text, finish)


def _position(token: str) -> PositionLogprobs:
    return PositionLogprobs(LogprobText(token, token.encode(), -1.0, 5), ())


def _items() -> OutputItems:
    items = OutputItems(ParserOptions(THINKS, dict.fromkeys(("weather", "shell", "crm__find"), SCHEMA)))
    items.targets = call_targets(TOOLS)
    return items


def _without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def _added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the deltas come to, which each `done` confirms: items are open one at a time, and numbered."""
    items: list[dict[str, Any]] = []
    text = ""
    is_open = False
    for event in events:
        assert event["output_index"] == len(items) - (event["type"] != "response.output_item.added")
        match event:
            case {"type": "response.output_item.added", "item": item}:
                assert not is_open
                assert item["status"] == "in_progress"
                items.append(item)
                is_open, text = True, ""
            case {"type": "response.content_part.added", "part": {"text": ""}}:
                assert is_open
            case {"type": kind, "delta": delta} if kind.endswith(".delta"):
                assert is_open
                text += delta
            case {"type": "response.function_call_arguments.done", "arguments": arguments}:
                assert arguments == text
            case {"type": "response.custom_tool_call_input.done", "input": given}:
                assert given == text
            case {"type": kind, "text": whole} if kind.endswith("_text.done"):
                assert whole == text
            case {"type": "response.content_part.done", "part": part}:
                assert part["text"] == text
            case {"type": "response.output_item.done", "item": item}:
                assert item["id"] == items[-1]["id"]
                assert item.get("arguments", item.get("input", text)) == text
                items[-1] = item
                is_open = False
            case _:
                raise AssertionError(event)
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
    assert not is_open
    return items
