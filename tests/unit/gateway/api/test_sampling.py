"""The fields of sampling, of log-probabilities and of beam search: what they come to, and how each is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.chat import read_chat
from services.gateway.api.completions import read_completion
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import BeamSearchParams, GenerationRequest, RequestLimits, ResponseOptions
from shared.ids import ModelName
from shared.messages.model_card import ModelCard, SamplingDefaults

CARD = ModelCard(
    name=ModelName("demo"), max_model_len=2048, vocab_size=2048, eos_token_ids=(2,), dtype="float32", created=1
)
GENEROUS = RequestLimits(max_logprobs=4096)


NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def chat(limits: RequestLimits = RequestLimits(), **fields: Any) -> GenerationRequest:  # noqa: B008
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return read_chat(msgspec.json.encode(body), [CARD], limits)


def completion(limits: RequestLimits = RequestLimits(), **fields: Any) -> GenerationRequest:  # noqa: B008
    return read_completion(msgspec.json.encode({"prompt": "hi"} | fields), [CARD], limits)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bad_words": "no"}, "bad_words"),
    ({"bad_words": ["a", 5]}, "bad_words[1]"),
    ({"bad_words": ["a", ""]}, "bad_words"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [2048]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [2**80]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 2049}, "allowed_token_ids"),
    ({"logprob_token_ids": []}, "logprob_token_ids"),
    ({"logprob_token_ids": [4096]}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    ({"logprob_token_ids": {"1": 2}}, "logprob_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": "all"}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 2.5}, "truncate_prompt_tokens"),
    ({"vllm_xargs": {"begin": [7]}}, "vllm_xargs"),
    ({"vllm_xargs": [7]}, "vllm_xargs"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": 2**63}, "thinking_token_budget"),
    ({"thinking_token_budget": []}, "thinking_token_budget"),
    ({"min_tokens": 2049, "max_tokens": 2**40}, "min_tokens"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"return_prompt_text": "yes"}, "return_prompt_text"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"use_beam_search": True, "n": 17}, "n"),
    ({"use_beam_search": True, "best_of": 4}, "best_of"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "length_penalty": None, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
    ({"use_beam_search": True, "top_k": 5}, "top_k"),
    ({"use_beam_search": True, "min_p": 0.1}, "min_p"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
    ({"use_beam_search": True, "repetition_penalty": 1.5}, "repetition_penalty"),
    ({"use_beam_search": True, "min_tokens": 3}, "min_tokens"),
    ({"use_beam_search": True, "stop": ["x"]}, "stop"),
    ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
    ({"use_beam_search": True, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ({"use_beam_search": True, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"use_beam_search": True, "thinking_token_budget": 0}, "thinking_token_budget"),
    ({"use_beam_search": True, "vllm_xargs": {"begin": [7]}}, "vllm_xargs"),
    ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
]
ONLY_OF_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprobs": False, "logprob_token_ids": [1]}, "logprob_token_ids"),
]
ONLY_OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": [1], "echo": True, "max_tokens": 0}, "logprob_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"use_beam_search": True, "echo": True}, "echo"),
]


def label(case: Any) -> str | None:
    return None if isinstance(case, str) else repr(case)[:60]


@pytest.mark.parametrize(("fields", "param"), REFUSED + ONLY_OF_CHATS, ids=label)
def test_a_chat_is_refused_with_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(**fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert error.value.message.startswith(param)


@pytest.mark.parametrize(("fields", "param"), REFUSED + ONLY_OF_COMPLETIONS, ids=label)
def test_a_completion_is_refused_with_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        completion(**fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert error.value.message.startswith(param)


@pytest.mark.parametrize("read", [chat, completion])
def test_every_field_arrives(read: Any) -> None:
    job: GenerationRequest = read(
        bad_words=["damn", "so what"],
        allowed_token_ids=[5, 3, 5],
        logprob_token_ids=[7, 8],
        logprobs=True if read is chat else 3,
        prompt_logprobs=3,
        truncate_prompt_tokens=10,
        thinking_token_budget=64,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    assert job.bad_words == ("damn", "so what")
    assert job.sampling.allowed_token_ids == (5, 3)
    assert (job.sampling.logprobs, job.sampling.logprob_token_ids) == (0, (7, 8))
    assert (job.sampling.prompt_logprobs, job.sampling.thinking_budget) == (3, 64)
    assert job.truncate_prompt_tokens == 10
    assert job.response_options == ResponseOptions(logprobs=True, prompt_logprobs=3, token_ids=True, tokens_as_ids=True)


@pytest.mark.parametrize("read", [chat, completion])
def test_null_means_the_default(read: Any) -> None:
    names: tuple[str, ...] = (
        "bad_words",
        "allowed_token_ids",
        "logprob_token_ids",
        "prompt_logprobs",
        "truncate_prompt_tokens",
    )
    names += ("thinking_token_budget", "return_token_ids", "use_beam_search", "length_penalty", "early_stopping")
    assert read(**dict.fromkeys(names)) == read()


def test_minus_one_means_the_whole_vocabulary_where_that_is_allowed() -> None:
    assert chat(GENEROUS, logprobs=True, top_logprobs=-1).sampling.logprobs == 2048
    assert completion(GENEROUS, logprobs=-1).sampling.logprobs == 2048
    assert completion(GENEROUS, prompt_logprobs=-1).sampling.prompt_logprobs == 2048
    assert completion(GENEROUS, prompt_logprobs=3000).sampling.prompt_logprobs == 2048
    with pytest.raises(RequestError) as error:
        completion(GENEROUS, prompt_logprobs=-2)
    assert error.value.param == "prompt_logprobs"


def test_named_tokens_take_the_place_of_the_most_likely_ones() -> None:
    for job in (
        chat(logprobs=True, top_logprobs=5, logprob_token_ids=[7]),
        completion(logprobs=5, logprob_token_ids=[7]),
    ):
        assert (job.sampling.logprobs, job.sampling.logprob_token_ids) == (0, (7,))


def test_a_budget_of_minus_one_is_none() -> None:
    assert chat(thinking_token_budget=-1).sampling.thinking_budget is None


def test_zero_most_likely_tokens_are_still_log_probabilities() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=0).response_options.logprobs
    assert completion(logprobs=0).sampling.logprobs == 0
    assert chat(top_logprobs=0).sampling.logprobs is None
    assert not chat(logprobs=False).response_options.logprobs


def test_an_echo_with_log_probabilities_wants_those_of_the_prompt() -> None:
    job = completion(echo=True, logprobs=2)
    assert (job.sampling.prompt_logprobs, job.response_options.echo_logprobs, job.response_options.prompt_logprobs) == (
        2,
        2,
        None,
    )
    both = completion(echo=True, logprobs=2, prompt_logprobs=4)
    assert (both.sampling.prompt_logprobs, both.response_options.echo_logprobs) == (4, 2)
    assert completion(echo=True, logprobs=2, stream=True).sampling.prompt_logprobs == 2
    assert completion(echo=True).sampling.prompt_logprobs is None


def test_an_echo_may_ask_for_no_output() -> None:
    job = completion(echo=True, max_tokens=0, logprobs=1)
    assert job.only_echo
    assert job.stopping.max_tokens == 1
    assert not completion(echo=True, max_tokens=1).only_echo


def test_one_choice_of_a_prompt_learns_its_log_probabilities_unless_each_streams_them() -> None:
    asked = [c.sampling.prompt_logprobs for c in completion(prompt=["a", "b"], n=2, prompt_logprobs=1).choices(0)]
    assert asked == [1, None, 1, None]
    asked = [c.sampling.prompt_logprobs for c in completion(n=2, echo=True, logprobs=1, stream=True).choices(0)]
    assert asked == [1, 1]


def test_choices_draw_with_seeds_of_their_own_and_the_same_ones_each_time() -> None:
    def seeds(**fields: Any) -> list[int]:
        return [choice.sampling.seed for choice in completion(**fields).choices(1000)]

    assert seeds(n=3, seed=5) == [5, 6, 7]
    assert seeds(n=2, seed=5, prompt=["a", "b"]) == [5, 6, 5, 6]
    assert seeds(n=2, prompt=["a", "b"]) == [1000, 1001, 1002, 1003]
    assert seeds(n=2, seed=2**63 - 1) == [2**63 - 1, 0]


@pytest.mark.parametrize("read", [read_chat, read_completion])
def test_a_models_own_defaults_are_for_what_a_request_does_not_say(read: Any) -> None:
    own = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=9)
    cards = [replace(CARD, sampling=own)]
    body = {"messages": [{"role": "user", "content": "hi"}]} if read is read_chat else {"prompt": "hi"}
    found = read(msgspec.json.encode({**body, "max_tokens": 20}), cards, RequestLimits())
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    assert (sampling.min_p, sampling.repetition_penalty, found.stopping.max_tokens) == (0.1, 1.05, 9)
    found = read(msgspec.json.encode({**body, **NEUTRAL, "max_tokens": 3}), cards, RequestLimits())
    assert (found.sampling, found.stopping.max_tokens) == (replace(sampling, **NEUTRAL), 3)
    beams = read(msgspec.json.encode({**body, "use_beam_search": True, "n": 2}), cards, RequestLimits())
    assert beams.sampling == replace(sampling, **{**NEUTRAL, "temperature": 1.0})


def test_truncation_by_minus_one_leaves_room_for_the_output() -> None:
    assert completion(truncate_prompt_tokens=-1, max_tokens=48).truncate_prompt_tokens == 2000
    assert chat(truncate_prompt_tokens=-1).truncate_prompt_tokens == 2047


@pytest.mark.parametrize("read", [chat, completion])
def test_a_beam_search_takes_what_changes_nothing(read: Any) -> None:
    job: GenerationRequest = read(
        use_beam_search=True,
        n=4,
        temperature=0,
        top_p=1,
        top_k=-1,
        length_penalty=0.5,
        early_stopping="never",
        seed=3,
        stop=[],
        response_format={"type": "text"},
    )
    assert (job.n, job.beam_search) == (4, BeamSearchParams(0.5, "never"))
    assert read(use_beam_search=True).beam_search == BeamSearchParams(1.0, False)
    assert read(use_beam_search=False, length_penalty=1.0, early_stopping=False).beam_search is None


def test_arguments_of_logits_processors_are_those_that_the_engine_has() -> None:
    card = replace(CARD, extra_args=("begin", "end"))

    def read(**args: Any) -> GenerationRequest:
        return read_completion(msgspec.json.encode({"prompt": "hi", "vllm_xargs": args}), [card], RequestLimits())

    assert msgspec.json.decode(read(begin=[7, 8.5], end="x").sampling.extra_args) == {"begin": [7, 8.5], "end": "x"}
    assert read().sampling.extra_args == b""
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    for args, why in [
        ({"start": 1}, "'start' is not allowed; one of begin, end is"),
        ({"begin": "x" * 20_000}, "at most 16384"),
        ({"begin": nested}, "nested too deeply"),
        ({"begin": 2**70}, "integers must be"),
    ]:
        with pytest.raises(RequestError) as refused:
            read(**args)
        assert (refused.value.status, refused.value.message.startswith("vllm_xargs")) == (400, True)
        assert why in refused.value.message
    with pytest.raises(RequestError) as none:
        completion(vllm_xargs={"begin": 1})
    assert none.value.message == "vllm_xargs: 'begin' is not allowed; no logits processor is loaded"
