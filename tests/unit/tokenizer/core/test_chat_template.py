"""Chats become the text that transformers' `apply_chat_template` makes of them, and what it refuses is refused.

The templates in tests/chat_templates are written for these tests in the manner of the families that they are named
after: same prompt formats, same constructs of the template language.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from services.tokenizer.core.chat_template import ChatTemplate, ChatTemplates
from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.template_files import read_templates
from shared.messages.tokenizer import ChatPrompt
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer
from tests.support.models import tiny_tokenizers
from tests.support.paths import CHAT_TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAMILIES = ("chatml", "llama3", "mistral", "gemma", "gemma3", "qwen3", "grounded")


@cache
def template(family: str) -> ChatTemplate:
    return ChatTemplate((CHAT_TEMPLATES / f"{family}.jinja").read_text())


@cache
def theirs(family: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), **SPECIAL)
    tokenizer.chat_template = (CHAT_TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


def rendered(family: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tools = options.pop("tools", None)
    prompt = ChatPrompt(
        messages=json.dumps(messages).encode(),
        tools=None if tools is None else json.dumps(tools).encode(),
        add_generation_prompt=options.pop("add_generation_prompt", False),
        continue_final_message=options.pop("continue_final_message", False),
        template_kwargs=options,
    )
    return template(family).render(prompt, SPECIAL)


SYSTEM = {"role": "system", "content": "  Be brief.\n"}
HELLO = {"role": "user", "content": "Hello, <b>world</b> & 'all' \"of\" it! 你好 😀 "}
REPLY = {"role": "assistant", "content": "\nHi.  "}
AGAIN = {"role": "user", "content": "What is the weather in Paris?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Paris é", "days": 2, "x": 1.0, "y": None}},
        }
    ],
}
SEARCH = {
    "role": "assistant",
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "brave_search", "arguments": {"q": "x"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "22 °C"}
THINKING = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is warm."}
REASONED = {"role": "assistant", "content": "It is warm.", "reasoning": "Hm, 22."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The <weather> of a city's day",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Zeit für é", "parameters": {}}},
]
DOCUMENTS = [{"title": "One", "text": "Erster"}, {"title": "Two", "text": "", "hidden": True}]

CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [HELLO],
    "with a system message": [SYSTEM, HELLO],
    "several turns": [HELLO, REPLY, AGAIN],
    "several turns after a system message": [SYSTEM, HELLO, REPLY, AGAIN],
    "a tool's result": [AGAIN, CALL, RESULT],
    "after a tool's result": [SYSTEM, AGAIN, CALL, RESULT, REPLY],
    "a built-in tool": [AGAIN, SEARCH],
    "thinking": [HELLO, THINKING, AGAIN, THINKING],
    "reasoning in its own field": [AGAIN, REASONED],
    "an unknown role": [{"role": "critic", "content": "Hm."}],
    "roles out of turn": [HELLO, AGAIN],
    "the assistant first": [REPLY, HELLO],
    "extra fields": [{**HELLO, "name": "ann", "cache": {"a": 1}}],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompting": {"add_generation_prompt": True},
    "continuing": {"continue_final_message": True},
    "with tools": {"tools": TOOLS, "add_generation_prompt": True},
    "no tools": {"tools": []},
    "without thinking": {"enable_thinking": False, "add_generation_prompt": True},
    "with variables": {
        "tools": TOOLS,
        "date_string": "1 Jan 2030",
        "tools_in_user_message": False,
        "builtin_tools": ["brave_search", "code_interpreter"],
        "bos_token": "<other>",
        "shout": True,
    },
    "with documents": {"documents": DOCUMENTS, "add_generation_prompt": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_becomes_the_text_that_transformers_makes_of_it(family: str, option: str) -> None:
    for chat in CHATS.values():
        try:
            expected = theirs(family).apply_chat_template(chat, tokenize=False, **OPTIONS[option])
        except Exception:
            with pytest.raises(PromptRefused) as refused:
                rendered(family, chat, **OPTIONS[option])
            assert refused.value.field == "messages"
        else:
            assert rendered(family, chat, **OPTIONS[option]) == expected


def test_every_family_renders_most_and_refuses_some_of_these_chats() -> None:
    """The comparison above would hold for templates that refuse everything too."""
    outcomes = {family: [0, 0] for family in FAMILIES}
    for family in FAMILIES:
        for chat in CHATS.values():
            for option in OPTIONS.values():
                try:
                    rendered(family, chat, **option)
                except PromptRefused:
                    outcomes[family][1] += 1
                else:
                    outcomes[family][0] += 1
    assert all(done >= 20 for done, _ in outcomes.values()), outcomes
    assert sum(refused for _, refused in outcomes.values()) > 50


@pytest.mark.parametrize(
    ("family", "messages", "said"),
    [
        ("gemma", [SYSTEM, HELLO], "System role not supported"),
        ("mistral", [HELLO, AGAIN], "roles must alternate"),
        ("llama3", [HELLO, {**CALL, "tool_calls": CALL["tool_calls"] * 2}], "One tool call at a time"),
    ],
)
def test_what_a_template_refuses_is_refused_in_its_words(family: str, messages: list[Any], said: str) -> None:
    with pytest.raises(PromptRefused) as refused:
        rendered(family, messages)
    assert refused.value.field == "messages"
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (b"", "messages"),
        (b"{}", "an array"),
        (b"[]", "at least one"),
        (b"[1]", "messages[0]"),
        (b'[{"content": "x"}]', "messages[0].role"),
        (b'[{"role": 1, "content": "x"}]', "messages[0].role"),
        (b'[{"role": "user", "content": 1}]', "messages[0].content"),
        (b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]', "content[0].type"),
        (b'[{"role": "user", "content": [{"type": "text", "text": 1}]}]', "content[0].text"),
        (b'[{"role": "user", "content": "\\ud800"}]', "messages"),
        (b'[{"role": "user", "content": "\xff"}]', "messages"),
        (b'[{"role": "user", "content": NaN}]', "messages"),
        (b'[{"role": "assistant", "tool_calls": [1]}]', "tool_calls[0]"),
        (b'[{"role": "assistant", "tool_calls": {}}]', "tool_calls"),
        (b"[" * 5000 + b"]" * 5000, "messages"),
    ],
)
def test_messages_that_are_none_are_refused_with_their_place(messages: bytes, where: str) -> None:
    with pytest.raises(PromptRefused) as refused:
        template("chatml").render(ChatPrompt(messages=messages), SPECIAL)
    assert refused.value.field == "messages"
    assert where in refused.value.message


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (ChatPrompt(messages=b"[]", tools=b"{}"), "messages"),
        (ChatPrompt(messages=b'[{"role":"user","content":"x"}]', tools=b"{}"), "tools"),
        (ChatPrompt(messages=b'[{"role":"user","content":"x"}]', tools=b"[1]"), "tools"),
        (
            ChatPrompt(messages=b'[{"role":"user","content":"x"}]', continue_final_message=True),
            "continue_final_message",
        ),
        (ChatPrompt(messages=b"[]", template_kwargs={"messages": []}), "chat_template_kwargs"),
        (ChatPrompt(messages=b"[]", template_kwargs={"add_generation_prompt": 1}), "chat_template_kwargs"),
        (
            ChatPrompt(messages=b'[{"role":"user","content":"x"}]', template_kwargs={"documents": [1]}),
            "chat_template_kwargs",
        ),
    ],
)
def test_other_parts_of_a_chat_are_refused_by_their_own_names(prompt: ChatPrompt, field: str) -> None:
    with pytest.raises(PromptRefused) as refused:
        template("chatml").render(prompt, SPECIAL)
    assert refused.value.field == field


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_text_parts_become_a_string_where_the_template_wants_one() -> None:
    assert template("chatml").content_format == "string"
    messages = [{"role": "user", "content": PARTS}]
    assert rendered("chatml", messages) == rendered("chatml", [{"role": "user", "content": "one\ntwo"}])


def test_text_parts_stay_parts_where_the_template_goes_through_them() -> None:
    assert template("gemma3").content_format == "openai"
    messages = [{"role": "user", "content": PARTS}]
    assert rendered("gemma3", messages) == theirs("gemma3").apply_chat_template(messages, tokenize=False)
    assert "onetwo" in rendered("gemma3", messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% set ms = messages[1:] %}"
         "{% for m in ms %}{% for p in m.content | list %}{% endfor %}{% endfor %}", "openai"),
        ("{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.content) }}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set content = m.content %}"
         "{% for p in content %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{{ m.content }}{% endfor %}", "string"),
    ],
)  # fmt: skip
def test_what_a_template_wants_is_seen_from_its_loops(source: str, expected: str) -> None:
    assert ChatTemplate(source).content_format == expected


def test_a_tool_calls_arguments_in_json_become_an_object() -> None:
    def calling(arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": arguments}
        return [AGAIN, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]

    assert rendered("qwen3", calling('{"a": [1, 2]}')) == rendered("qwen3", calling({"a": [1, 2]}))
    for unusable in ("", "{", "[1]", None):
        assert rendered("qwen3", calling(unusable)) == rendered("qwen3", calling({}))


def test_a_developer_is_the_system_for_templates_that_know_none() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert rendered("qwen3", [developer, HELLO]) == rendered("qwen3", [{**developer, "role": "system"}, HELLO])
    knowing = ChatTemplate("{% for m in messages %}{% if m.role == 'developer' %}dev{% endif %}{% endfor %}")
    prompt = ChatPrompt(messages=json.dumps([developer]).encode(), add_generation_prompt=False)
    assert knowing.render(prompt, SPECIAL) == "dev"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__class__.__base__ }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    prompt = ChatPrompt(messages=json.dumps([HELLO]).encode())
    try:
        text = ChatTemplate(source).render(prompt, SPECIAL)
    except PromptRefused:
        return
    assert text == ""


def files_of(folder: Path, **settings: Any) -> Path:
    return tiny_tokenizers.write_model(folder, tiny_tokenizers.byte_level(), {**SPECIAL, **settings})


def names_and_texts(folder: Path) -> dict[str, str]:
    return read_templates(load_tokenizer(folder))


def test_templates_are_found_wherever_models_keep_them(tmp_path: Path) -> None:
    assert names_and_texts(files_of(tmp_path / "none")) == {}
    assert names_and_texts(files_of(tmp_path / "text", chat_template="A")) == {"default": "A"}
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert names_and_texts(files_of(tmp_path / "list", chat_template=named)) == {"default": "A", "tool_use": "B"}
    older = files_of(tmp_path / "older")
    (older / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
    assert names_and_texts(older) == {"default": "C"}
    newer = files_of(tmp_path / "newer", chat_template="A")
    (newer / "chat_template.jinja").write_text("D")
    (newer / "additional_chat_templates").mkdir()
    (newer / "additional_chat_templates" / "tool_use.jinja").write_text("E")
    assert names_and_texts(newer) == {"default": "D", "tool_use": "E"}
    assert read_templates(load_tokenizer(newer), newer / "chat_template.jinja") == {"default": "D"}


def test_the_template_named_tool_use_serves_requests_with_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"})

    def text(name: str | None, tools: bool) -> str:
        chosen = templates.choose(name, tools=tools)
        assert chosen is not None
        return chosen.render(ChatPrompt(messages=json.dumps([HELLO]).encode()), SPECIAL)

    assert [text(None, False), text(None, True), text("default", True)] == ["plain", "tools", "plain"]
    assert templates.choose("{{ 1 }}", tools=False) is None


def test_a_model_without_a_chat_template_refuses_chats_and_one_with_a_broken_one_does_not_start() -> None:
    with pytest.raises(PromptRefused, match="no chat template"):
        ChatTemplates({}).choose(None, tools=False)
    with pytest.raises(TokenizerUnusable, match="does not compile"):
        ChatTemplates({"default": "{% if %}"})


CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Paris?",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"city": "Paris é"}'}}],
    },
]


def shown(source: str) -> str:
    return ChatTemplate(source).render(ChatPrompt(messages=json.dumps(CALLING).encode()), SPECIAL)


def test_arguments_are_json_for_a_template_that_joins_them_to_text() -> None:
    """As DeepSeek's own templates do."""
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}SHOWN{% endfor %}{% endfor %}"
    joined = loop.replace("SHOWN", "{{ '<' + c.function.name + '>' + c.function.arguments }}")
    assert shown(joined) == '<f>{"city": "Paris é"}'
    assert shown(loop.replace("SHOWN", "{{ c.function.arguments.city }}")) == "Paris é"
    with pytest.raises(PromptRefused, match="the chat template refuses"):
        shown(loop.replace("SHOWN", "{{ 'x' + 5 }}"))


def test_what_comes_before_a_call_is_in_one_place_where_outputs_have_channels() -> None:
    """gpt-oss's template refuses a message with a call, text and reasoning."""
    both = "{% for m in messages %}{{ m.thinking }}|{{ m.content }};{% endfor %}"
    assert shown(both) == "|hi;Paris?|I look.;"
    assert shown(both + "<|channel|>") == "|hi;Paris?\nI look.|;<|channel|>"


def test_an_image_is_its_token_where_a_template_takes_strings() -> None:
    """One that goes through parts itself gets the part."""
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    prompt = ChatPrompt(messages=json.dumps([{"role": "user", "content": content}]).encode())
    plain = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert plain.render(prompt, {"image_token": "<image>"}) == "a\n<image>\nb"
    parts = ChatTemplate("{% for m in messages %}{% for c in m.content %}[{{ c.type }}]{% endfor %}{% endfor %}")
    assert parts.render(prompt, {"image_token": "<image>"}) == "[text][image][text]"


def test_a_message_without_content_has_an_empty_one() -> None:
    """As in vLLM: DeepSeek-V3.1's template joins it to the text of a call unless it is none, and agents send null."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    prompt = ChatPrompt(messages=json.dumps([call]).encode())
    joined = "{% for m in messages %}{{ m['content'] + '<call>' }}{% endfor %}"
    assert ChatTemplate(joined).render(prompt, SPECIAL) == "<call>"
    parts = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}<call>{% endfor %}"
    assert ChatTemplate(parts).render(prompt, SPECIAL) == "<call>"
    with pytest.raises(PromptRefused, match="has no content to continue"):
        ChatTemplate(joined).render(replace(prompt, continue_final_message=True, add_generation_prompt=False), SPECIAL)
