"""What a client may send has an effect or is refused by name: each field of each request, and vLLM's by their list.

A field that is added to a struct needs a value here with which the request is another, or a refusal that names it; or
it is one of `WITHOUT_EFFECT`, which docs/api.md lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.anthropic.request import MessagesFields, read_messages
from services.gateway.api.chat import ChatFields, read_chat
from services.gateway.api.cohere.request import CohereChatFields, read_cohere_chat
from services.gateway.api.completions import CompletionFields, read_completion
from services.gateway.api.errors import RequestError
from services.gateway.api.fields.generation import NEUTRAL, WITHOUT_EFFECT, StreamOptionFields
from services.gateway.api.generation import RequestLimits
from services.gateway.api.ollama.request import (
    OllamaChatFields,
    OllamaGenerateFields,
    OptionFields,
    read_ollama_chat,
    read_ollama_generate,
)
from services.gateway.api.pooling.classification import ClassificationFields, read_classification
from services.gateway.api.pooling.cohere import CohereEmbedFields, read_cohere_embed
from services.gateway.api.pooling.embeddings import (
    EmbeddingFields,
    PoolingFields,
    read_embedding,
    read_pooling_request,
)
from services.gateway.api.pooling.scores import RerankFields, ScoreFields, read_rerank, read_score
from services.gateway.api.prompts import DetokenizeFields, TokenizeFields, read_detokenize, read_tokenize
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import LoraId, ModelName
from shared.messages.model_card import LoraCard, ModelCard, PoolingCard
from tests.support.paths import TESTS

LORA = LoraCard(name=ModelName("adapter"), id=LoraId(b"\0" * 16), rank=1)
CARD = ModelCard(
    name=ModelName("demo"),
    max_model_len=2048,
    vocab_size=2048,
    eos_token_ids=(2,),
    dtype="float32",
    created=1,
    loras=(LORA,),
    extra_args=("begin",),
)
EMBEDS = replace(CARD, pooling=PoolingCard(pooling="mean", normalize=True, size=8, prompts=(("query", "find: "),)))
LABELS = replace(
    CARD, pooling=PoolingCard(pooling="last", normalize=False, size=2, labels=("good", "bad"), activation="softmax")
)
LIMITS = RequestLimits(allow_request_template=True)
TOOL = {"type": "function", "function": {"name": "f"}}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}
THOUGHTFUL = [
    {"role": role, "content": [{"type": "thinking", "thinking": "hm", "signature": ""}] if role[0] == "a" else "hi"}
    for role in ("user", "assistant") * 2
]


class Case(NamedTuple):
    """A value of a field, and what else the request has, with and without it."""

    value: Any
    beside: Mapping[str, Any] = {}


class Endpoint(NamedTuple):
    """How a body is read, and what a plain one is."""

    read: Callable[[bytes], Any]
    plain: Mapping[str, Any]


SAMPLED: dict[str, Case] = {
    "model": Case("adapter"),
    "stream": Case(True),
    "stream_options": Case({"include_usage": True}, {"stream": True}),
    "n": Case(2),
    "best_of": Case(2),
    "temperature": Case(0.5),
    "top_p": Case(0.5),
    "top_k": Case(5),
    "min_p": Case(0.1),
    "presence_penalty": Case(1),
    "frequency_penalty": Case(1),
    "repetition_penalty": Case(1.5),
    "logit_bias": Case({"5": 1}),
    "max_tokens": Case(3),
    "min_tokens": Case(3),
    "seed": Case(1),
    "stop": Case("x"),
    "stop_token_ids": Case([5]),
    "ignore_eos": Case(True),
    "include_stop_str_in_output": Case(True),
    "skip_special_tokens": Case(False),
    "spaces_between_special_tokens": Case(False, {"skip_special_tokens": False}),
    "add_special_tokens": Case(True),
    "priority": Case(1),
    "cache_salt": Case("salt"),
    "enable_prefix_caching": Case(False),
    "response_format": Case({"type": "json_object"}),
    "structured_outputs": Case({"regex": "a"}),
    "guided_json": Case({"type": "object"}),
    "guided_regex": Case("a"),
    "guided_choice": Case(["a"]),
    "guided_grammar": Case("root ::= 'a'"),
    "bad_words": Case(["x"]),
    "allowed_token_ids": Case([5]),
    "logprob_token_ids": Case([5], {"logprobs": True}),
    "prompt_logprobs": Case(1),
    "truncate_prompt_tokens": Case(5),
    "truncation_side": Case("right", {"truncate_prompt_tokens": 5}),
    "thinking_token_budget": Case(5),
    "request_id": Case("mine"),
    "return_metrics": Case(True),
    "return_token_ids": Case(True),
    "return_weight_versions": Case(True),
    "return_prompt_text": Case(True),
    "return_tokens_as_token_ids": Case(True),
    "use_beam_search": Case(True),
    "length_penalty": Case(2.0, {"use_beam_search": True}),
    "early_stopping": Case(True, {"use_beam_search": True}),
    "vllm_xargs": Case({"begin": 1}),
    "ec_transfer_params": Case({"a": 1}),
    "guided_whitespace_pattern": Case(""),
    "kv_transfer_params": Case({"do_remote_decode": True}),
    "logits_processors": Case(["x"]),
    "media_io_kwargs": Case({"image": {}}),
    "moderation": Case({"model": "x"}),
    "mm_processor_kwargs": Case({"a": 1}),
    "prompt_embeds": Case("AAAA"),
    "repetition_detection": Case({"max_pattern_size": 3}),
    "return_token_offsets": Case(True),
    "routed_experts_prompt_start": Case(1),
    "watermarking": Case(True),
    "service_tier": Case("flex"),
    "stream_interval": Case(2),
    "verbosity": Case("high"),
}
CHAT = SAMPLED | {
    "messages": Case([{"role": "user", "content": "other"}]),
    "prompt_token_ids": Case([5]),
    "tools": Case([TOOL]),
    "tool_choice": Case("required", {"tools": [TOOL]}),
    "parallel_tool_calls": Case(False, {"tools": [TOOL, OTHER_TOOL], "tool_choice": "required"}),
    "add_generation_prompt": Case(False),
    "continue_final_message": Case(True),
    "chat_template": Case("{{ messages }}"),
    "chat_template_kwargs": Case({"a": 1}),
    "max_completion_tokens": Case(3),
    "logprobs": Case(True),
    "top_logprobs": Case(1, {"logprobs": True}),
    "include_reasoning": Case(False),
    "echo": Case(True, {"messages": [{"role": "assistant", "content": "Once"}]}),
    "documents": Case([{"title": "a"}]),
    "reasoning_effort": Case("low"),
    "functions": Case([]),
    "function_call": Case("auto"),
    "modalities": Case(["audio"]),
    "store": Case(True),
    "metadata": Case({"a": "b"}, {"store": True}),
    "audio": Case({"voice": "alloy"}),
    "web_search_options": Case({}),
}
COMPLETION = SAMPLED | {
    "prompt": Case("other"),
    "logprobs": Case(1),
    "logprob_token_ids": Case([5], {"logprobs": 1}),
    "echo": Case(True),
    "suffix": Case("x"),
    "decoder_prompt": Case("x"),
    "add_special_tokens": Case(False),
}
TOKENIZE: dict[str, Case] = {
    "prompt": Case("other"),
    "model": Case("other"),
    "return_token_strs": Case(True),
    "media_io_kwargs": Case({"image": {}}),
    "mm_processor_kwargs": Case({"a": 1}),
    **{name: CHAT[name] for name in ("messages", "tools", "add_generation_prompt", "continue_final_message")},
    **{name: CHAT[name] for name in ("chat_template", "chat_template_kwargs", "add_special_tokens")},
}
POOLED: dict[str, Case] = {
    "model": Case("adapter"),
    "truncate_prompt_tokens": Case(5),
    "truncation_side": Case("left", {"truncate_prompt_tokens": 5}),
    "request_id": Case("mine"),
    "priority": Case(1),
    "cache_salt": Case("salt"),
    "enable_prefix_caching": Case(False),
    **{name: Case(False) for name in ("use_activation", "activation", "softmax")},
    "mm_processor_kwargs": Case({"a": 1}),
    "padding": Case("max_length"),
}
CHATTED = {"input": [{"role": "user", "content": "hi"}]}
INPUT = POOLED | {
    "input": Case("other"),
    "add_special_tokens": Case(False),
    "messages": Case([{"role": "user", "content": "other"}]),
    "add_generation_prompt": Case(True, CHATTED),
    "continue_final_message": Case(True, CHATTED),
    "chat_template": Case("{{ messages }}", CHATTED),
    "chat_template_kwargs": Case({"a": 1}, CHATTED),
    "tools": Case([{"type": "function", "function": {"name": "f"}}], CHATTED),
    "media_io_kwargs": Case({"image": {}}),
}
VECTORS = INPUT | {
    "encoding_format": Case("base64"),
    "dimensions": Case(3),
    "normalize": Case(False),
    "embed_dtype": Case("float16"),
    "endianness": Case("big"),
}
PAIRS = POOLED | {
    **{name: Case(1) for name in ("max_tokens_per_query", "max_tokens_per_doc", "max_chunks_per_doc", "rank_fields")},
    "instruction": Case("Find."),
    "chat_template_kwargs": Case({"instruction": "Find."}),
    "relevant_spans": Case({"mode": "enabled"}),
}
OLLAMA: dict[str, Case] = {
    "model": Case("adapter"),
    "stream": Case(False),
    "format": Case("json"),
    "options": Case({"seed": 1}),
    "think": Case(True),
    "logprobs": Case(True),
    "top_logprobs": Case(1, {"logprobs": True}),
}
COHERE: dict[str, Case] = {
    "model": Case("adapter"),
    "messages": Case([{"role": "user", "content": "ho"}]),
    "stream": Case(True),
    "tools": Case([TOOL]),
    "strict_tools": Case(True, {"tools": [TOOL]}),
    "tool_choice": Case("REQUIRED", {"tools": [TOOL]}),
    "documents": Case(["a"]),
    "citation_options": Case({"mode": "FAST"}),
    "response_format": Case({"type": "json_object"}),
    "safety_mode": Case("STRICT"),
    "max_tokens": Case(3),
    "stop_sequences": Case(["x"]),
    "temperature": Case(0.5),
    "seed": Case(1),
    "frequency_penalty": Case(1),
    "presence_penalty": Case(1),
    "k": Case(5),
    "p": Case(0.5),
    "logprobs": Case(True),
    "thinking": Case({"type": "disabled"}),
    "priority": Case(1),
    "chat_template_kwargs": Case({"a": 1}),
}
CASES: dict[type[msgspec.Struct], dict[str, Case]] = {
    CohereChatFields: COHERE,
    ChatFields: CHAT,
    CompletionFields: COMPLETION,
    StreamOptionFields: {name: Case(True) for name in ("include_usage", "resumable", "include_obfuscation")}
    | {"continuous_usage_stats": Case(True, {"include_usage": True})},
    TokenizeFields: TOKENIZE,
    DetokenizeFields: {"tokens": Case([5]), "model": Case("other")},
    EmbeddingFields: VECTORS,
    PoolingFields: VECTORS
    | {"data": Case("x"), "task": Case("token_embed"), "step_tag_id": Case(1), "returned_token_ids": Case([1])},
    ClassificationFields: INPUT,
    CohereEmbedFields: {
        "model": Case("adapter"),
        "texts": Case(["other"]),
        "input_type": Case("query"),
        "output_dimension": Case(3),
        "embedding_types": Case(["base64"]),
        "truncate": Case("START"),
        "max_tokens": Case(3),
        "priority": Case(1),
        "images": Case(["x"]),
        "inputs": Case([{"content": []}]),
    },
    MessagesFields: {
        "model": Case("adapter"),
        "messages": Case([{"role": "user", "content": "other"}]),
        "system": Case("x"),
        "tools": Case([{"name": "f", "input_schema": {"type": "object"}}]),
        "tool_choice": Case({"type": "any"}, {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
        "thinking": Case({"type": "enabled", "budget_tokens": 5}),
        "output_config": Case({"effort": "low"}),
        "stop_sequences": Case(["x"]),
        "service_tier": Case("priority"),
        "speed": Case("fast"),
        "priority": Case(3),
        "context_management": Case({"edits": [{"type": "clear_thinking_20251015"}]}, {"messages": THOUGHTFUL}),
        "chat_template_kwargs": Case({"a": 1}),
        "kv_transfer_params": SAMPLED["kv_transfer_params"],
        "cache_salt": SAMPLED["cache_salt"],
        **{name: SAMPLED[name] for name in ("max_tokens", "stream", "temperature", "top_p", "top_k", "vllm_xargs")},
    },
    OllamaChatFields: OLLAMA | {"messages": CHAT["messages"], "tools": CHAT["tools"]},
    OllamaGenerateFields: OLLAMA
    | {
        "prompt": Case("other"),
        "system": Case("x"),
        "raw": Case(True),
        "suffix": Case("x"),
        "template": Case("x"),
        "context": Case([1]),
        "images": Case(["x"]),
    },
    OptionFields: {
        "num_predict": Case(3),
        "num_ctx": Case(10**6),
        "repeat_penalty": Case(1.5),
        "repeat_last_n": Case(5, {"repeat_penalty": 1.5}),
        "tfs_z": Case(0.5),
        "typical_p": Case(0.5),
        "mirostat": Case(1),
        "penalize_newline": Case(False),
        **{name: SAMPLED[name] for name in ("seed", "temperature", "top_k", "top_p", "min_p", "stop")},
        **{name: SAMPLED[name] for name in ("presence_penalty", "frequency_penalty")},
    },
    ScoreFields: PAIRS
    | {name: Case("c") for name in ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2")},
    RerankFields: PAIRS
    | {"query": Case("b"), "documents": Case(["c"]), "top_n": Case(1), "return_documents": Case(False)},
}


def chat(body: bytes) -> Any:
    return read_chat(body, [CARD], LIMITS, dialect_of)


def streamed_chat(body: bytes) -> Any:
    options = msgspec.json.decode(body)
    return chat(msgspec.json.encode(ENDPOINTS[ChatFields].plain | {"stream": True, "stream_options": options}))


def dialect_of(_: ModelName) -> OutputDialect:
    return OutputDialect("hermes", "qwen3")


def ollama_options(body: bytes) -> Any:
    plain = {**ENDPOINTS[OllamaChatFields].plain, "options": msgspec.json.decode(body)}
    return ENDPOINTS[OllamaChatFields].read(msgspec.json.encode(plain))


ENDPOINTS: dict[type[msgspec.Struct], Endpoint] = {
    ChatFields: Endpoint(chat, {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}),
    CompletionFields: Endpoint(lambda body: read_completion(body, [CARD], LIMITS), {"model": "demo", "prompt": "hi"}),
    StreamOptionFields: Endpoint(streamed_chat, {}),
    TokenizeFields: Endpoint(lambda body: read_tokenize(body, [CARD], LIMITS), {"prompt": "hi"}),
    DetokenizeFields: Endpoint(lambda body: read_detokenize(body, [CARD]), {"tokens": [1]}),
    EmbeddingFields: Endpoint(lambda body: read_embedding(body, [EMBEDS], LIMITS), {"input": "hi"}),
    PoolingFields: Endpoint(lambda body: read_pooling_request(body, [EMBEDS], LIMITS), {"input": "hi"}),
    CohereChatFields: Endpoint(
        lambda body: read_cohere_chat(body, [CARD], LIMITS, dialect_of),
        {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    ),
    CohereEmbedFields: Endpoint(lambda body: read_cohere_embed(body, [EMBEDS], LIMITS), {"texts": ["hi"]}),
    ClassificationFields: Endpoint(lambda body: read_classification(body, [LABELS], LIMITS), {"input": "hi"}),
    MessagesFields: Endpoint(
        lambda body: read_messages(body, [CARD], LIMITS, dialect_of),
        {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    ),
    OllamaChatFields: Endpoint(
        lambda body: read_ollama_chat(body, [CARD], LIMITS, dialect_of),
        {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    ),
    OllamaGenerateFields: Endpoint(
        lambda body: read_ollama_generate(body, [CARD], LIMITS, dialect_of), {"model": "demo", "prompt": "hi"}
    ),
    OptionFields: Endpoint(ollama_options, {}),
    ScoreFields: Endpoint(lambda body: read_score(body, [EMBEDS], LIMITS), {"text_1": "a", "text_2": "b"}),
    RerankFields: Endpoint(lambda body: read_rerank(body, [EMBEDS], LIMITS), {"query": "a", "documents": ["b", "c"]}),
}
IDLE: dict[type[msgspec.Struct], frozenset[str]] = {
    CohereChatFields: frozenset(),
    MessagesFields: frozenset({"cache_control", "metadata"}),
    OllamaChatFields: frozenset({"keep_alive"}),
    OllamaGenerateFields: frozenset({"keep_alive"}),
    OptionFields: frozenset({"mirostat_tau", "mirostat_eta", "num_keep", "num_batch", "num_gpu", "num_thread"})
    | {"main_gpu", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock"},
}
"""Fields of other APIs that change no answer, as docs/api.md says."""
OF_MESSAGES = {
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
    "add_special_tokens",
}
"""Fields of `/tokenize` that say how messages become a prompt."""


@pytest.mark.parametrize("struct", CASES, ids=lambda struct: struct.__name__)
def test_each_field_changes_the_request_or_is_refused_by_name(struct: type[msgspec.Struct]) -> None:
    read, plain = ENDPOINTS[struct]
    known = set(struct.__struct_fields__)
    idle = IDLE.get(struct, WITHOUT_EFFECT)
    assert known - idle == CASES[struct].keys(), "each field has a case, and each case a field"
    for name, (value, beside) in CASES[struct].items():
        base = {**plain, **beside}
        if struct is TokenizeFields and name in OF_MESSAGES:
            base = {"messages": [{"role": "user", "content": "hi"}]}
        without = read(msgspec.json.encode(base))
        assert without == read(msgspec.json.encode(base)), "the same fields make the same request"
        outcome = with_field(read, base | {name: value})
        if isinstance(outcome, RequestError):
            assert outcome.status in (400, 404), name
            assert (outcome.param or "").split(".")[-1].split("[")[0] in (name, "text_1"), (name, outcome)
        else:
            assert outcome != without, f"{name} is taken, and without any effect"


def with_field(read: Callable[[bytes], Any], body: dict[str, Any]) -> Any:
    """The request, or why it is none."""
    try:
        return read(msgspec.json.encode(body))
    except RequestError as error:
        return error


def test_what_has_no_effect_is_said_to_have_none() -> None:
    page = (TESTS.parent / "docs" / "api.md").read_text()
    (said,) = [line for line in page.splitlines() if "change nothing here" in line]
    assert [name for name in (*WITHOUT_EFFECT, *NEUTRAL) if f"`{name}`" not in said] == []
    read, plain = ENDPOINTS[ChatFields]
    ignored: dict[str, Any] = dict.fromkeys(WITHOUT_EFFECT, "x") | {"store": False, "return_mm_kwargs": False}
    neutral = {name: values[0] for name, values in NEUTRAL.items()}
    assert read(msgspec.json.encode({**plain, **ignored, **neutral})) == read(msgspec.json.encode(plain))


VLLM: dict[type[msgspec.Struct], str] = {
    ChatFields: """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
        reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
        repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
        logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
        add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
        structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
        routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs cache_salt
        kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
        return_weight_versions mm_payload
        """,
    CompletionFields: """
        model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
        length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
        logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
        request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
        return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
        repetition_detection thinking_token_budget stream_interval return_weight_versions mm_payload
        """,
    TokenizeFields: """
        model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools
        """,
    DetokenizeFields: "model tokens",
    EmbeddingFields: """
        model input user truncate_prompt_tokens truncation_side padding request_id priority mm_processor_kwargs
        cache_salt add_special_tokens encoding_format embed_dtype endianness dimensions use_activation messages
        add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs
        """,
    PoolingFields: "data task",
    ScoreFields: """
        model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs cache_salt
        use_activation max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs text_1 text_2 queries
        documents items data_1 data_2
        """,
    RerankFields: "query documents top_n",
}
"""The fields of vLLM's requests, as its protocol classes of November 2026 have them."""


@pytest.mark.parametrize("struct", VLLM, ids=lambda struct: struct.__name__)
def test_no_field_of_vllms_is_unknown(struct: type[msgspec.Struct]) -> None:
    assert set(VLLM[struct].split()) - set(struct.__struct_fields__) == set()
