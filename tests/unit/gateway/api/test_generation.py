"""What clients may send: what it comes to, and how a refusal names the field, its value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from services.gateway.api.chat import read_chat
from services.gateway.api.chat_batch import read_chat_batch
from services.gateway.api.completions import read_completion
from services.gateway.api.errors import RequestError
from services.gateway.api.fields.reasoning_effort import read_effort_map
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.prompts import read_detokenize, read_tokenize
from services.gateway.config import GatewayConfig
from services.gateway.parsing.events import ContentText
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import OutputParser
from shared.ids import ModelName
from shared.messages.generation import Grammar
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import ChatPrompt, Encode, TextPrompt, TokenPrompt
from shared.packing import pack, unpack

CARD = ModelCard(
    name=ModelName("demo"), max_model_len=2048, vocab_size=2048, eos_token_ids=(2,), dtype="float32", created=1
)
OTHER = msgspec.structs.replace(CARD, name=ModelName("other"))
USER = {"role": "user", "content": "hi"}


def chat(limits: RequestLimits | None = None, **fields: Any) -> GenerationRequest:
    body = {"model": "demo", "messages": [USER]} | fields
    return read_chat(msgspec.json.encode(body), [CARD], limits or RequestLimits())


def completion(limits: RequestLimits | None = None, **fields: Any) -> GenerationRequest:
    body = {"model": "demo", "prompt": "hi"} | fields
    return read_completion(msgspec.json.encode(body), [CARD], limits or RequestLimits())


def refusal(read: Any, *arguments: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        read(*arguments, **fields)
    return error.value


def test_parts_of_messages_keep_what_chat_templates_may_read() -> None:
    part = {"type": "text", "text": "hi", "source_lang_code": "en", "target_lang_code": "es"}
    body = msgspec.json.encode({"messages": [{"role": "user", "content": [part]}]})
    [asked] = read_chat(body, [CARD], RequestLimits()).prompts
    assert isinstance(asked, ChatPrompt)
    assert msgspec.json.decode(asked.messages) == [{"role": "user", "content": [part]}]


def test_defaults_are_openais() -> None:
    job = chat()
    assert (job.n, job.seed, job.stream, job.echo, job.skip_special_tokens) == (1, None, None, False, True)
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k) == (1.0, 1.0, 0)
    assert job.stopping.max_tokens is None
    assert completion().stopping.max_tokens == 16


@pytest.mark.parametrize("settings", [None, {}, {"use_audio_in_video": False}, {"use_audio_in_video": None}])
def test_settings_of_processors_that_ask_for_what_is_done_are_taken(settings: Any) -> None:
    """Sounds within videos are not heard, which vLLM's clients may say."""
    assert chat(mm_processor_kwargs=settings).prompts == chat().prompts
    body = {"messages": [USER], "mm_processor_kwargs": settings}
    assert read_tokenize(msgspec.json.encode(body), [CARD], RequestLimits())[0] == CARD


@pytest.mark.parametrize("settings", [{"use_audio_in_video": True}, {"fps": 2}, {"use_audio_in_video": False, "a": 1}])
def test_settings_of_processors_that_ask_for_more_are_refused(settings: Any) -> None:
    error = refusal(chat, mm_processor_kwargs=settings)
    assert error.param == "mm_processor_kwargs"
    assert "use_audio_in_video: sounds within videos are not heard; false is allowed" in str(error)


def test_null_means_the_default() -> None:
    names = ("temperature", "top_p", "n", "stop", "max_tokens", "seed", "logit_bias", "stream", "user", "tools")
    assert chat(**dict.fromkeys(names)) == chat()


def test_unknown_fields_are_ignored() -> None:
    assert chat(frobnicate={"a": [1, None]}, metadata={"x": "y"}) == chat()


def test_every_field_arrives() -> None:
    job = completion(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias={"5": 200, "7": -1},
        max_tokens=9,
        min_tokens=2,
        seed=-3,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-2,
        cache_salt="s",
        logprobs=3,
        user="me",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    sampling, stopping = job.sampling, job.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 1.5, 1.1)
    assert (sampling.logit_bias, sampling.logprobs) == (((5, 100.0), (7, -1.0)), 3)
    assert (stopping.max_tokens, stopping.min_tokens, stopping.stop, stopping.stop_token_ids) == (
        9,
        2,
        ("a", "b"),
        (4,),
    )
    assert (stopping.ignore_eos, stopping.include_stop) == (True, True)
    assert (job.n, job.seed, job.priority, job.cache_salt, job.skip_special_tokens) == (2, -3, -2, "s", False)
    assert job.stream == (True, True, False)


@pytest.mark.parametrize(
    ("allowed", "asked", "cached"),
    [(True, None, True), (True, True, True), (True, False, False), (False, None, False), (False, True, False)],
)
def test_prefixes_are_cached_unless_the_request_or_the_stack_says_no(
    allowed: bool, asked: bool | None, cached: bool
) -> None:
    limits = RequestLimits(allow_prefix_caching=allowed)
    assert completion(limits=limits, enable_prefix_caching=asked).prefix_caching is cached
    assert chat(limits=limits, enable_prefix_caching=asked).prefix_caching is cached


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).stopping.max_tokens == 7


def test_a_temperature_too_small_to_divide_by_is_lifted() -> None:
    assert chat(temperature=1e-300).sampling.temperature == 0.01
    assert chat(temperature=0).sampling.temperature == 0


def test_a_negative_top_k_keeps_every_token() -> None:
    assert chat(top_k=-1).sampling.top_k == 0


def test_each_choice_has_its_own_seed_in_63_bits() -> None:
    seeds = [choice.sampling.seed for choice in chat(n=3, seed=-(2**63)).choices(drawn_seed=0)]
    assert seeds == [0, 1, 2]
    job = completion(prompt=["a", "b"], n=2)
    assert [(c.position, c.sampling.seed) for c in job.choices(drawn_seed=10)] == [(0, 10), (1, 11), (2, 12), (3, 13)]
    job = completion(prompt=["a", "b"], n=2, seed=5)
    assert [c.sampling.seed for c in job.choices(drawn_seed=10)] == [5, 6, 5, 6]


def test_messages_reach_the_template_as_they_came() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    [prompt] = chat(messages=messages, tools=tools, tool_choice="auto", chat_template_kwargs={"x": 1}).prompts
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.json.decode(prompt.messages) == messages
    assert prompt.tools is not None
    assert msgspec.json.decode(prompt.tools) == tools
    assert prompt.template_kwargs == {"x": 1}


@pytest.mark.parametrize(("guided", "content"), [(True, "{}"), (False, "")])
def test_what_a_grammar_bound_from_its_start_is_no_reasoning(guided: bool, content: str) -> None:
    """deepseek_r1 takes text without a mark for reasoning; a grammar lets a model think between both marks alone."""
    fields = {"response_format": {"type": "json_object"}} if guided else {}
    body = {"model": "demo", "messages": [USER], **fields}
    dialect = OutputDialect(reasoning="deepseek_r1")
    options = read_chat(msgspec.json.encode(body), [CARD], RequestLimits(), lambda _: dialect).parser_options
    assert options is not None
    events = OutputParser(options).read("{}", "stop")
    assert "".join(event.text for event in events if isinstance(event, ContentText)) == content


def test_documents_and_reasoning_effort_are_the_templates_variables() -> None:
    documents = [{"title": "a", "text": "b"}]
    [prompt] = chat(documents=documents, reasoning_effort="low", chat_template_kwargs={"x": 1}).prompts
    assert isinstance(prompt, ChatPrompt)
    effort = {"reasoning_effort": "low", "enable_thinking": True}
    assert prompt.template_kwargs == {"documents": documents, **effort, "x": 1}
    [prompt] = chat(reasoning_effort="none", chat_template_kwargs={"reasoning_effort": "high"}).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"reasoning_effort": "high", "enable_thinking": False}


def test_an_effort_is_what_the_operator_has_it_mean_unless_the_request_says_the_templates_own() -> None:
    limits = RequestLimits(efforts=read_effort_map('{"medium": "low", "minimal": "none"}'))
    kwargs = [
        chat(limits, **fields).prompts[0].template_kwargs
        for fields in (
            {"reasoning_effort": "medium"},
            {"reasoning_effort": "minimal"},
            {"reasoning_effort": "high"},
            {"reasoning_effort": "medium", "chat_template_kwargs": {"reasoning_effort": "medium"}},
        )
    ]
    assert [each["reasoning_effort"] for each in kwargs] == ["low", "none", "high", "medium"]
    assert [each["enable_thinking"] for each in kwargs] == [True, False, True, True]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("low", "'low' is not allowed; a JSON object of efforts and texts is"),
        ('{"low": 1}', "'{\"low\": 1}' is not allowed; a JSON object of efforts and texts is"),
        ('{"lowest": "low"}', "'lowest' is not allowed; none, minimal, low, medium, high, xhigh, max are"),
    ],
)
def test_a_map_of_efforts_that_is_none_ends_the_start(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"reasoning_effort_map: {complaint}")):
        GatewayConfig(instance="g", reasoning_effort_map=text)


def test_allowed_tools_are_what_the_model_is_told_of() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    allowed = [{"type": "function", "function": {"name": "h"}}, {"type": "function", "name": "f"}]
    for mode, bound in (("auto", False), ("required", True)):
        job = chat(
            tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        )
        [prompt] = job.prompts
        assert isinstance(prompt, ChatPrompt)
        assert prompt.tools is not None
        assert msgspec.json.decode(prompt.tools) == [tools[0], tools[2]]
        assert (job.output_grammar is not None) == bound


def test_structural_tags_come_in_two_shapes() -> None:
    schema = {"type": "integer"}
    older = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    content = {"type": "json_schema", "json_schema": schema}
    tags = [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}]
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}}
    wanted = Grammar("structural_tag", msgspec.json.encode(tag).decode())
    for asked in (
        {"response_format": {"type": "structural_tag", **older}},
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": older}},
        {"structured_outputs": {"structural_tag": msgspec.json.encode(tag).decode()}},
    ):
        guided = chat(**asked).output_grammar
        assert guided is not None
        assert guided.grammar == wanted


def test_prompts_come_in_four_shapes() -> None:
    assert completion(prompt="a", add_special_tokens=False).prompts == (TextPrompt("a", False),)
    assert completion(prompt=["a", "b"]).prompts == (TextPrompt("a"), TextPrompt("b"))
    assert completion(prompt=[1, 2]).prompts == (TokenPrompt(pack([1, 2])),)
    assert [unpack(p.tokens) for p in completion(prompt=[[1], [2, 3]]).prompts] == [[1], [2, 3]]  # type: ignore[union-attr]


CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "x" * 65, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0]"),
    ({"tools": "x"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "use_beam_search": True}, "echo"),
    ({"documents": ["x"]}, "documents[0]"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"reasoning_effort": "lots"}, "reasoning_effort"),
]
COMMON_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"priority": 2**40}, "priority"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [2048]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"2048": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"request_id": "two words"}, "request_id"),
    ({"return_metrics": True, "stream": True}, "return_metrics"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"structured_outputs": {"structural_tag": {"structures": []}}}, "structured_outputs.structural_tag.structures"),
    (
        {"response_format": {"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["a"]}},
        "response_format.structures[0]",
    ),
    (
        {"structured_outputs": {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": ""}]}}},
        "structured_outputs.structural_tag.triggers",
    ),
]
COMPLETION_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [2048]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt[1]"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"suffix": "x", "prompt": [1, 2]}, "prompt"),
    ({"suffix": "x", "prompt": []}, "prompt"),
    ({"suffix": "x", "echo": True}, "suffix"),
    ({"suffix": "x", "truncate_prompt_tokens": 5}, "suffix"),
    ({"suffix": "x", "use_beam_search": True}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]


def label(case: Any) -> str | None:
    return None if isinstance(case, str) else repr(case)[:50]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSALS + COMMON_REFUSALS, ids=label)
def test_a_chat_is_refused_with_the_fields_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(param)


@pytest.mark.parametrize(("fields", "param"), COMPLETION_REFUSALS + COMMON_REFUSALS, ids=label)
def test_a_completion_is_refused_with_the_fields_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(completion, **fields)
    assert (error.status, error.param) == (400, param)


def test_a_refusal_says_the_value_and_what_is_allowed() -> None:
    assert refusal(chat, top_p=1.5).message == "top_p: 1.5 is not allowed; it must be above 0 and at most 1"
    assert refusal(chat, n="2").message.startswith("n: '2' is not allowed; expected ")
    wrong = refusal(chat, logit_bias={"x": 1, "5": 1, "2048": 1, "-1": 1}).message
    assert wrong == "logit_bias: keys 'x', '2048', '-1' are not allowed; keys are token ids below 2048"
    assert refusal(chat, top_k=-2).message.endswith("it must be at least -1 and at most 2^63 - 1")
    picture = [{"role": "user", "content": [{"type": "image_url"}]}]
    assert refusal(chat, messages=picture).message.endswith("which is not text, is not supported: demo takes no images")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"\xff\xfe", "body"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "x"}], "user": "\\udc00"}', "user"),
        (b'{"x": {"\\ud800": 1}}', "x"),
        (b'{"x": ' + b"[" * 100_000, "body"),
        (b'{"messages": [{"role": "user", "content": "x", "y": ' + b"[" * 99 + b"]" * 99 + b"}]}", "messages"),
        (b"{}", "messages"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(body: bytes, param: str) -> None:
    error = refusal(read_chat, body, [CARD], RequestLimits())
    assert (error.status, error.param) == (400, param)


def test_the_model_is_chosen_by_its_name_or_by_being_the_only_one() -> None:
    for body in (b'{"prompt": "x"}', b'{"prompt": "x", "model": ""}'):
        assert read_completion(body, [CARD], RequestLimits()).served_name == "demo"
        assert refusal(read_completion, body, [CARD, OTHER], RequestLimits()).param == "model"
    assert refusal(read_completion, b'{"prompt": "x", "model": "no"}', [CARD], RequestLimits()).status == 404
    starting = refusal(read_completion, b'{"prompt": "x", "model": "demo"}', [], RequestLimits())
    assert (starting.status, starting.retry_after) == (503, 1.0)


def test_a_role_is_the_template_s_business() -> None:
    messages = [{"role": "critic", "content": "no"}, {"role": "narrator"}]
    [prompt] = chat(messages=messages).prompts
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.json.decode(prompt.messages) == messages


@pytest.mark.parametrize("content", ["Once upon", [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]])
def test_a_continued_message_is_echoed_if_its_role_speaks(content: Any) -> None:
    begun = [USER, {"role": "assistant", "content": content}]
    job = chat(messages=begun, echo=True, continue_final_message=True)
    [prompt] = job.prompts
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert job.echoed_messages in (("Once upon",), ("Once\nupon",))
    assert job.response_options.role == "assistant"
    assert chat(messages=begun, continue_final_message=True).echoed_messages == ()
    assert chat(echo=True).echoed_messages == ("",), "the assistant speaks, and the last message is the user's"
    own = chat(echo=True, continue_final_message=True)
    assert (own.echoed_messages, own.response_options.role) == (("hi",), "user")


def test_prompts_are_shortened_on_the_side_that_the_client_says() -> None:
    assert completion(truncate_prompt_tokens=3).truncation_side == "left"
    assert completion(truncate_prompt_tokens=3, truncation_side="right").truncation_side == "right"


def test_tokenize_takes_text_or_messages() -> None:
    card, question = read_tokenize(b'{"prompt": "a b", "return_token_strs": true}', [CARD], RequestLimits())
    assert (card, question) == (CARD, Encode(TextPrompt("a b"), True))
    _, question = read_tokenize(b'{"messages": [{"role": "user", "content": "a"}]}', [CARD], RequestLimits())
    assert isinstance(question.prompt, ChatPrompt)
    assert refusal(read_tokenize, b"{}", [CARD], RequestLimits()).param == "prompt"


def test_detokenize_takes_tokens_of_the_vocabulary() -> None:
    _, question = read_detokenize(b'{"tokens": [1, 2]}', [CARD])
    assert unpack(question.tokens) == [1, 2]
    assert refusal(read_detokenize, b'{"tokens": [4096]}', [CARD]).param == "tokens"
    assert refusal(read_detokenize, b'{"tokens": "x"}', [CARD]).param == "tokens"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"chat_template_kwargs": {"a": {"b": [0, 2**64]}}}, "chat_template_kwargs.a.b[1]"),
        ({"chat_template_kwargs": {"a": -(2**63) - 1}}, "chat_template_kwargs.a"),
        ({"documents": [{"title": 10**30}]}, "documents[0].title"),
    ],
)
def test_integers_that_the_bus_cannot_carry_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match="at least -2\\^63 and at most 2\\^64 - 1") as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, field)


def test_integers_of_64_bits_reach_the_chat_template() -> None:
    [prompt] = chat(chat_template_kwargs={"most": 2**64 - 1, "least": -(2**63)}).prompts
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=ChatPrompt) == prompt


def test_a_batch_of_chats_whose_fields_are_no_text_is_refused() -> None:
    body = b'{"messages": [[{"role": "user", "content": "x"}]], "\xa6": 1}'
    with pytest.raises(RequestError, match="not valid JSON"):
        read_chat_batch(body, [CARD], RequestLimits(), None)
