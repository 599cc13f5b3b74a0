"""Ollama's API without a server: bodies read as chats and completions, and outputs that are cut anywhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.ollama.answer import OllamaMessage
from services.gateway.api.ollama.request import ModelNameOnly, read_ollama_chat, read_ollama_generate
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import ParserOptions
from shared.ids import ModelName
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import ChatPrompt, InfillPrompt, TextPrompt
from tests.support.gateway.tool_calls import Call, written

CARD = ModelCard(
    name=ModelName("demo"), max_model_len=64, vocab_size=100, eos_token_ids=(2,), dtype="float32", created=17
)
THINKS = OutputDialect(tools="hermes", reasoning="qwen3")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HELLO = [{"role": "user", "content": "hi"}]


def chat(dialect: OutputDialect = THINKS, **fields: Any) -> Any:
    body = msgspec.json.encode({"model": "demo", "messages": HELLO} | fields)
    return read_ollama_chat(body, [CARD], RequestLimits(), lambda _: dialect)


def generate(**fields: Any) -> Any:
    body = msgspec.json.encode({"model": "demo", "prompt": "hi"} | fields)
    return read_ollama_generate(body, [CARD], RequestLimits(), lambda _: THINKS)


def messages(generation: GenerationRequest) -> Any:
    [prompt] = generation.prompts
    assert isinstance(prompt, ChatPrompt)
    return msgspec.json.decode(prompt.messages)


def test_calls_and_their_results_get_ids_in_their_order() -> None:
    def call(city: str) -> dict[str, Any]:
        return {"function": {"name": "weather", "arguments": {"city": city}}}

    conversation = [
        *HELLO,
        {"role": "assistant", "thinking": "hm", "tool_calls": [call("Rome"), call("Oslo")]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
        {"role": "tool", "tool_name": "weather", "content": "snow"},
    ]
    said = messages(chat(messages=conversation, tools=[TOOL]))
    asked, first, second = said[1:]
    assert [each["function"]["arguments"] for each in asked["tool_calls"]] == ['{"city": "Rome"}', '{"city": "Oslo"}']
    assert asked["reasoning_content"] == "hm"
    assert [first["tool_call_id"], second["tool_call_id"]] == [each["id"] for each in asked["tool_calls"]]
    assert (first["content"], second["content"]) == ("sunny", "snow")


def test_options_have_the_effect_that_they_have_in_a_chat() -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["END"]}
    options |= {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 64, "num_gpu": 9}
    generation = chat(options=options, think="low")
    sampling, stopping = generation.sampling, generation.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, 0.25)
    assert (generation.seed, stopping.max_tokens, stopping.stop) == (3, 7, ("END",))
    [prompt] = generation.prompts
    assert prompt.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert generation.stream is not None, "streams are the default"
    assert chat(stream=False).stream is None
    assert chat(options={"num_predict": -1}).stopping.max_tokens is None


def test_one_prompt_is_a_chat_unless_it_is_raw() -> None:
    assert messages(generate(system="Be short."))[0] == {"role": "system", "content": "Be short."}
    raw = generate(raw=True, format="json")
    assert raw.prompts == (TextPrompt("hi", add_special_tokens=True),)
    assert (raw.kind, raw.stopping.max_tokens) == ("ollama", None)
    assert raw.output_grammar is not None


def test_a_name_may_have_the_tag_of_the_latest() -> None:
    assert chat(model="demo:latest").served_name == "demo"
    with pytest.raises(RequestError, match="does not exist"):
        chat(model="other:latest")


def test_an_alias_may_have_it_too() -> None:
    known = [replace(CARD, aliases=(ModelName("small"),))]
    body = msgspec.json.encode({"model": "small:latest", "messages": []})
    loaded = read_ollama_chat(body, known, RequestLimits(), lambda _: THINKS)
    assert loaded == ModelNameOnly(ModelName("small"), (CARD.name,))


def test_without_a_prompt_a_model_is_only_to_be_there() -> None:
    assert chat(messages=[]) == ModelNameOnly(ModelName("demo")) == generate(prompt="", keep_alive="5m")
    assert generate(prompt="", suffix="behind").prompts == (InfillPrompt("", "behind"),), "a gap at a text's beginning"
    with pytest.raises(RequestError, match="keep_alive: unloading"):
        chat(messages=[], keep_alive=0)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"options": {"mirostat": 1}}, "options.mirostat", "changes nothing"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n", "only -1"),
        ({"options": {"num_ctx": 65}}, "options.num_ctx", "64 tokens"),
        ({"options": {"num_predict": 0}}, "options.num_predict", "at least 1"),
        ({"options": {"temperature": -1}}, "options.temperature", "at least 0"),
        ({"options": {"speed": 1}}, "options.speed", "not known"),
        ({"format": "xml"}, "format", "JSON schema"),
        ({"think": "much"}, "think", "'high'"),
        ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "messages[0].images[0]", "takes no images"),
        ({"messages": [{"role": "user", "content": "x", "images": "a"}]}, "messages[0].images", "a list of images"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "a string of"),
        ({"colour": 1}, "colour", "not known"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message
    assert caught.value.message.startswith(param)


def test_a_model_that_does_not_reason_cannot_be_told_to() -> None:
    with pytest.raises(RequestError, match="think: demo writes no reasoning"):
        chat(OutputDialect(), think=True)
    assert chat(OutputDialect(), think=False)


def test_pieces_add_up_wherever_the_text_is_cut() -> None:
    calls = [Call("weather", {"city": "Rome"}), Call("weather", {"city": "Oslo"})]
    text = "<think>hm</think>\n\nWell.\n" + written("hermes", calls)
    for at in range(len(text) + 1):
        message = OllamaMessage(ParserOptions(THINKS, {"weather": SCHEMA}))
        pieces = [message.feed(text[:at], None), message.feed(text[at:], "stop")]
        whole = message.body()
        assert whole["content"].strip() == "Well."
        assert whole["thinking"].strip() == "hm"
        assert [call["function"]["arguments"] for call in whole["tool_calls"]] == [call.arguments for call in calls]
        for name, empty in (("content", ""), ("thinking", ""), ("tool_calls", list[Any]())):
            added = empty
            for piece in pieces:
                added = added + piece.get(name, empty)
            assert added == whole[name]
