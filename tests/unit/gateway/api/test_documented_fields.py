"""Every body on the OpenAPI page has a test that its fields have an effect or are refused: those of SGLang's API, of
Responses and of what vLLM alone has are here, the others in test_every_field.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.gateway.api.anthropic.request import MessagesTokensFields, read_messages
from services.gateway.api.chat import ChatFields, read_chat
from services.gateway.api.chat_batch import ChatBatchFields, read_chat_batch
from services.gateway.api.completions import CompletionFields
from services.gateway.api.decisions.request import DecisionFields, read_decisions
from services.gateway.api.errors import RequestError
from services.gateway.api.ollama.embeddings import (
    OllamaEmbeddingsFields,
    OllamaEmbedFields,
    read_ollama_embed,
    read_ollama_embeddings,
)
from services.gateway.api.openapi import OPERATIONS, openapi_page
from services.gateway.api.pooling.cohere import CohereEmbedFields
from services.gateway.api.pooling.embeddings import EmbeddingFields
from services.gateway.api.pooling.scores import RerankFields
from services.gateway.api.prompts import InvocationFields
from services.gateway.api.responses.request import ResponseRequest, ResponsesFields, read_responses
from services.gateway.api.sglang.request import SglangFields, SglangSamplingParams, read_sglang
from services.gateway.api.tokens.generative_scores import GenerativeScoreFields, read_generative_scores
from services.gateway.api.tokens.request import TokensFields, VllmSamplingParams, read_tokens
from services.gateway.parsing.output_dialect import OutputDialect
from tests.unit.gateway.api.test_every_field import CARD, EMBEDS, ENDPOINTS, LIMITS, TOOL, Case, with_field

SCORED = {"query": "is it?", "items": ["yes", "no"], "label_token_ids": [3, 4]}
PLAIN_RESPONSE = {"model": "demo", "input": "hi"}
RESPONSE_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
UNSUPPORTED_RESPONSES = sorted(
    {"context_management", "access_programs", "moderation", "background_options", "image", "media_io_kwargs"}
    | {"mm_processor_kwargs", "watermarking"}
)
LOGPROBS = {"include": ["message.output_text.logprobs"]}
RESPONSES: dict[str, Case] = {
    "model": Case("adapter"),
    "input": Case("ho"),
    "instructions": Case("be short"),
    "tools": Case([RESPONSE_TOOL]),
    "tool_choice": Case("required", {"tools": [RESPONSE_TOOL]}),
    "parallel_tool_calls": Case(False, {"tools": [RESPONSE_TOOL]}),
    "max_tool_calls": Case(3),
    "text": Case({"format": {"type": "json_object"}}),
    "reasoning": Case({"effort": "high"}),
    "max_output_tokens": Case(3),
    "temperature": Case(0.5),
    "top_p": Case(0.5),
    "top_logprobs": Case(2, LOGPROBS),
    "include": Case(LOGPROBS["include"]),
    "metadata": Case({"a": "b"}),
    "truncation": Case("auto"),
    "stream": Case(True),
    "stream_options": Case({"include_obfuscation": True}, {"stream": True}),
    "store": Case(False),
    "previous_response_id": Case("resp_1"),
    "background": Case(True),
    "user": Case("bob"),
    "safety_identifier": Case("bob"),
    "prompt_cache_key": Case("x"),
    "prompt_cache_retention": Case("24h"),
    "prompt_cache_options": Case({"mode": "explicit"}),
    "service_tier": Case("flex"),
    "top_k": Case(5),
    "min_p": Case(0.1),
    "presence_penalty": Case(1),
    "frequency_penalty": Case(1),
    "repetition_penalty": Case(1.5),
    "logit_bias": Case({"5": 1}),
    "seed": Case(1),
    "stop": Case("x"),
    "ignore_eos": Case(True),
    "skip_special_tokens": Case(False),
    "include_stop_str_in_output": Case(True),
    "priority": Case(1),
    "cache_salt": Case("salt"),
    "enable_prefix_caching": Case(False),
    "structured_outputs": Case({"regex": "a"}),
    "chat_template_kwargs": Case({"a": 1}),
    "vllm_xargs": Case({"begin": 1}),
    "stop_token_ids": Case([5]),
    "include_reasoning": Case(False),
    "request_id": Case("mine"),
    "conversation": Case("conv_1"),
    "prompt": Case({"id": "x"}),
    **dict.fromkeys(UNSUPPORTED_RESPONSES, Case("x")),
}
"""`user` and the like are repeated in the answer, which is their effect."""
SGLANG: dict[str, Case] = {
    "text": Case("ho"),
    "input_ids": Case([1, 2]),
    "sampling_params": Case({"top_k": 5}),
    "stream": Case(True),
    "model": Case("adapter"),
    "lora_path": Case("adapter"),
    "return_logprob": Case(True),
    "logprob_start_len": Case(0, {"return_logprob": True}),
    "top_logprobs_num": Case(2, {"return_logprob": True}),
    "return_text_in_logprobs": Case(True, {"return_logprob": True}),
    "priority": Case(1),
    "rid": Case("mine"),
    "input_embeds": Case([[0.1]]),
    "image_data": Case("x"),
    "audio_data": Case("x"),
    "video_data": Case("x"),
    "token_ids_logprob": Case([5]),
    "return_hidden_states": Case(True),
    "session_params": Case({"id": "x"}),
    "custom_logit_processor": Case("x"),
}
SGLANG_SAMPLING: dict[str, Case] = {
    "max_new_tokens": Case(3),
    "min_new_tokens": Case(3),
    "n": Case(2),
    "temperature": Case(0.5),
    "top_p": Case(0.5),
    "top_k": Case(5),
    "min_p": Case(0.1),
    "frequency_penalty": Case(1),
    "presence_penalty": Case(1),
    "repetition_penalty": Case(1.5),
    "sampling_seed": Case(1),
    "logit_bias": Case({"5": 1}),
    "stop": Case("x"),
    "stop_token_ids": Case([5]),
    "ignore_eos": Case(True),
    "no_stop_trim": Case(True),
    "skip_special_tokens": Case(False),
    "spaces_between_special_tokens": Case(False, {"skip_special_tokens": False}),
    "json_schema": Case('{"type": "object"}'),
    "regex": Case("a"),
    "ebnf": Case("root ::= 'a'"),
    "structural_tag": Case('{"type": "structural_tag", "structures": [], "triggers": []}'),
    "stop_regex": Case("a"),
    "custom_params": Case({"a": 1}),
}
TOKENS: dict[str, Case] = {
    "token_ids": Case([2, 1]),
    "sampling_params": Case({"top_k": 5}),
    "model": Case("adapter"),
    "request_id": Case("mine"),
    "stream": Case(True),
    "stream_options": Case({"include_usage": True}, {"stream": True}),
    "output_mode": Case("text"),
    "return_token_ids": Case(True),
    "reasoning_ended": Case(False, {"sampling_params": {"structured_outputs": {"regex": "a"}}}),
    "cache_salt": Case("salt"),
    "priority": Case(1),
    "kv_transfer_params": Case({"do_remote_decode": True}),
    "ec_transfer_params": Case({"a": 1}),
    "features": Case({"mm_hashes": {}}),
    "content_parts": Case([{"type": "image_url"}]),
}
TOKENS_SAMPLING: dict[str, Case] = {
    "n": Case(2),
    "temperature": Case(0.5),
    "top_p": Case(0.5),
    "top_k": Case(5),
    "min_p": Case(0.1),
    "presence_penalty": Case(1),
    "frequency_penalty": Case(1),
    "repetition_penalty": Case(1.5),
    "seed": Case(1),
    "stop": Case("x"),
    "stop_token_ids": Case([5]),
    "ignore_eos": Case(True),
    "max_tokens": Case(3),
    "min_tokens": Case(3),
    "logprobs": Case(2),
    "prompt_logprobs": Case(2),
    "logprob_token_ids": Case([5], {"logprobs": 1}),
    "logit_bias": Case({"5": 1}),
    "allowed_token_ids": Case([5]),
    "bad_words": Case(["x"]),
    "structured_outputs": Case({"regex": "a"}),
    "skip_special_tokens": Case(False),
    "spaces_between_special_tokens": Case(False, {"skip_special_tokens": False}),
    "include_stop_str_in_output": Case(True),
    "thinking_token_budget": Case(5),
    "stream_interval": Case(5),
    "extra_args": Case({"begin": 1}),
    "skip_reading_prefix_cache": Case(True),
    "detokenize": Case(False, {"stop": "x"}),
    "repetition_detection": Case({"max_pattern_size": 1}),
    "routed_experts_prompt_start": Case(1),
    "watermarking": Case(True),
    "prompt_logprob_token_ids": Case([[1]]),
    "prompt_logprob_start": Case(1),
    "trace_decode_token_ids": Case([1]),
}
"""`detokenize` says that there is no text, which has an effect where one is wanted."""
GENERATIVE_SCORES: dict[str, Case] = {
    "query": Case([1, 2]),
    "items": Case(["a"]),
    "label_token_ids": Case([1]),
    "model": Case("adapter"),
    "apply_softmax": Case(False),
    "item_first": Case(True),
    "add_special_tokens": Case(False),
    "cache_salt": Case("salt"),
    "priority": Case(1),
    "request_id": Case("mine"),
}
QUESTION = {"type": "predicate", "instructions": "Is it late?"}
DECISION = {"input": "Twelve o'clock.", "questions": [QUESTION]}
DECISIONS: dict[str, Case] = {
    "input": Case("One o'clock."),
    "questions": Case([QUESTION, QUESTION]),
    "model": Case("adapter"),
    "chat_template_kwargs": Case({"enable_thinking": True}),
    "cache_salt": Case("salt"),
    "priority": Case(1),
    "request_id": Case("mine"),
}
CHATS = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
CHAT_BATCH: dict[str, Case] = {
    "messages": Case(CHATS[::-1]),
    "n": Case(2),
    "stream": Case(True),
    "use_beam_search": Case(True),
    "prompt_token_ids": Case([1, 2]),
    "kv_transfer_params": Case({"do_remote_decode": True}),
    "store": Case(True),
}
OLLAMA: dict[str, Case] = {
    "model": Case("adapter"),
    "options": Case({"num_ctx": 9}),
    "keep_alive": Case(0),
}
OF_OPERATORS = frozenset(
    (
        *("AbortFields", "ContinueFields", "DrainFields", "MemoryFields", "PauseFields", "ScaleFields"),
        *("ScalePoolFields", "StrikeFields", "UndrainFields", "LoadLoraRequest", "UnloadLoraRequest"),
    )
)
"""Bodies that change a stack: tests/actors/gateway/test_operations.py, tests/integration/shared_stacks/test_lora.py."""
OF_FILES = frozenset(
    (
        *("BatchFields", "UploadFields", "ShowFields", "TranscriptionFields", "TranslationFields"),
        *("MessageBatchFields", "ConversationFields", "ConversationItemsFields", "ConversationUpdateFields"),
        "StoredChatUpdateFields",
    )
)
"""Bodies that name things: tests/actors/gateway/test_batches.py, test_files.py, test_ollama.py, test_anthropic.py,
test_stored_responses.py."""
ELSEWHERE = frozenset((MessagesTokensFields.__name__, InvocationFields.__name__))
"""Read as MessagesFields; passed on to the endpoint that a body is for."""


def dialect_of(_: Any) -> OutputDialect:
    return OutputDialect("hermes", "qwen3")


def responses(body: bytes) -> Any:
    """All of a request but its ids, which are drawn: with them no two requests were equal."""
    asked = read_responses(body, [CARD], LIMITS, dialect_of)
    assert isinstance(asked, ResponseRequest)
    return asked.generation, asked.echoed, asked.store, asked.added, asked.background


def sglang(body: bytes) -> Any:
    return read_sglang(body, [CARD], LIMITS)


def sglang_sampling(body: bytes) -> Any:
    return sglang(msgspec.json.encode({"text": "hi", "sampling_params": msgspec.json.decode(body)}))


def tokens(body: bytes) -> Any:
    return read_tokens(body, [CARD], LIMITS, dialect_of)


def tokens_sampling(body: bytes) -> Any:
    return tokens(msgspec.json.encode({"token_ids": [1, 2], "sampling_params": msgspec.json.decode(body)}))


def generative_scores(body: bytes) -> Any:
    return read_generative_scores(body, [CARD], LIMITS)


def decisions(body: bytes) -> Any:
    return read_decisions(body, [CARD], LIMITS)


def chat_batch(body: bytes) -> Any:
    return read_chat_batch(body, [CARD], LIMITS, dialect_of)


@pytest.mark.parametrize(
    ("struct", "cases", "read", "plain"),
    [
        (ResponsesFields, RESPONSES, responses, PLAIN_RESPONSE),
        (SglangFields, SGLANG, sglang, {"text": "hi"}),
        (SglangSamplingParams, SGLANG_SAMPLING, sglang_sampling, {}),
        (TokensFields, TOKENS, tokens, {"token_ids": [1, 2], "sampling_params": {}}),
        (VllmSamplingParams, TOKENS_SAMPLING, tokens_sampling, {}),
        (GenerativeScoreFields, GENERATIVE_SCORES, generative_scores, SCORED),
        (DecisionFields, DECISIONS, decisions, DECISION),
        (ChatBatchFields, CHAT_BATCH, chat_batch, {"messages": CHATS}),
        (
            OllamaEmbedFields,
            OLLAMA | {"input": Case(["hi", "ho"]), "truncate": Case(False), "dimensions": Case(3)},
            lambda body: read_ollama_embed(body, [EMBEDS], LIMITS),
            {"model": "demo:latest", "input": "hi"},
        ),
        (
            OllamaEmbeddingsFields,
            OLLAMA | {"prompt": Case("ho")},
            lambda body: read_ollama_embeddings(body, [EMBEDS], LIMITS),
            {"model": "demo", "prompt": "hi"},
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_each_field_changes_the_request_or_is_refused_by_name(
    struct: type[msgspec.Struct], cases: dict[str, Case], read: Callable[[bytes], Any], plain: dict[str, Any]
) -> None:
    idle = {"client_metadata", "session_id"} if struct is ResponsesFields else set()
    if struct is DecisionFields:
        idle = {"prompt_cache_key", "prompt_cache_options", "safety_identifier"}
    assert set(struct.__struct_fields__) - idle == cases.keys()
    for name, (value, beside) in cases.items():
        base = {**plain, **beside}
        without = read(msgspec.json.encode(base))
        outcome = with_field(read, base | {name: value})
        if isinstance(outcome, RequestError):
            assert outcome.status in (400, 404), name
            assert name in f"{outcome.param} {outcome.message}", (name, outcome)
        else:
            assert outcome != without, f"{name} is taken, and without any effect"


def test_every_body_on_the_page_is_looked_at() -> None:
    page = msgspec.json.decode(openapi_page("1"))
    structs: list[type[msgspec.Struct]] = [*ENDPOINTS, ResponsesFields, SglangFields, ChatBatchFields]
    structs += [TokensFields, GenerativeScoreFields, DecisionFields, OllamaEmbedFields, OllamaEmbeddingsFields]
    looked_at = {struct.__name__ for struct in structs}
    bodies = {operation.body.__name__ for operation in OPERATIONS if operation.body is not None}
    assert bodies - looked_at == OF_OPERATORS | OF_FILES | ELSEWHERE
    assert bodies <= page["components"]["schemas"].keys()


@pytest.mark.parametrize(
    ("parameters", "struct"),
    [
        (
            "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens "
            "messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty "
            "prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format "
            "safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools "
            "top_logprobs top_p user verbosity web_search_options",
            ChatFields,
        ),
        (
            "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop "
            "stream stream_options suffix temperature top_p user",
            CompletionFields,
        ),
        ("dimensions encoding_format input model user", EmbeddingFields),
        (
            "embedding_types images input_type inputs max_tokens model output_dimension priority texts truncate",
            CohereEmbedFields,
        ),
        ("documents max_tokens_per_doc model priority query relevant_spans top_n", RerankFields),
    ],
    ids=lambda each: "" if isinstance(each, str) else each.__name__,
)
def test_no_parameter_of_a_vendors_client_is_ignored(parameters: str, struct: type[msgspec.Struct]) -> None:
    """Those of `openai` 3.57 and `cohere` 7.3, of the endpoints that take fields which they do not know."""
    assert set(parameters.split()) - set(struct.__struct_fields__) == set()


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (lambda body: read_chat(body, [CARD], LIMITS, dialect_of), {"messages": [{"role": "user", "content": "hi"}]}),
        (responses, PLAIN_RESPONSE),
        (
            lambda body: read_messages(body, [CARD], LIMITS, dialect_of),
            {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        ),
    ],
    ids=["chat", "responses", "messages"],
)
def test_mcp_is_refused_with_what_to_do_instead(read: Callable[[bytes], Any], body: dict[str, Any]) -> None:
    mcp = {"type": "mcp", "server_label": "x", "server_url": "https://mcp.example", "require_approval": "never"}
    with pytest.raises(RequestError) as refused:
        read(msgspec.json.encode({**body, "tools": [mcp]}))
    assert (refused.value.status, refused.value.param) == (400, "tools[0].type")
    assert "'mcp'" in refused.value.message or '"mcp"' in refused.value.message
    assert refused.value.message.endswith("call the MCP server in the client, and give its tools as functions")


def test_tools_of_chats_are_functions_and_others_are_named() -> None:
    with pytest.raises(RequestError, match="which a server would run, is not supported"):
        chat_with({"tools": [{"type": "web_search"}]})
    assert chat_with({"tools": [TOOL]})


def chat_with(fields: dict[str, Any]) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return read_chat(msgspec.json.encode(body), [CARD], LIMITS, dialect_of)
