"""Sampling through a whole stack of two pools, where every request is handed over, against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.cluster.stack import RunningStack
from tests.support.kv.prompts import handed_over

TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of"
LONG = "Once upon a time there was a lighthouse. " * 9


@pytest.fixture(scope="module")
def stack(pools: RunningStack) -> RunningStack:
    return pools


class Reference:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[length, vocab] of what follows each token."""
        return torch.log_softmax(self.model(torch.tensor([tokens])).logits[0].double(), dim=-1)

    @torch.inference_mode()
    def beams(self, prompt: list[int], width: int, most: int, **settings: Any) -> list[list[int]]:
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
        return [row[len(prompt) :].tolist() for row in output]


@pytest.fixture(scope="module")
def reference(thinking_model: Path) -> Reference:
    return Reference(thinking_model)


def extra(completion: Any) -> dict[str, Any]:
    """Fields that the SDK does not know."""
    fields: dict[str, Any] = completion.model_extra
    return fields


async def complete(client: AsyncOpenAI, prompt: Any = TEXT, *, body: dict[str, Any], **fields: Any) -> Any:
    fields = {"max_tokens": 8, "temperature": 0, **fields}
    return await client.completions.create(model="model", prompt=prompt, extra_body=body, **fields)


async def test_prompts_are_scored_as_transformers_scores_them_cached_or_not(
    client: AsyncOpenAI, reference: Reference
) -> None:
    ids = reference.tokens(LONG)
    expected = reference.logprobs(ids)
    for _ in range(2):
        answer = await complete(client, LONG, body={"prompt_logprobs": 2, "return_token_ids": True})
        (choice,) = answer.choices
        assert extra(choice)["prompt_token_ids"] == ids
        first, *scores = extra(choice)["prompt_logprobs"]
        assert first is None
        for before, (token, entry) in enumerate(zip(ids[1:], scores, strict=True)):
            own = entry[str(token)]
            assert own["logprob"] == pytest.approx(expected[before, token].item(), abs=1e-3)
            likelier = int((expected[before] > expected[before, token] + 1e-3).sum())
            assert own["rank"] >= likelier + 1
            assert 2 <= len(entry) <= 3
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    other = await complete(client, LONG, body={}, max_tokens=1)
    assert other.usage.prompt_tokens_details.cached_tokens > 0, "what was scored can be read by others"


async def test_an_echo_is_scored_with_the_output(client: AsyncOpenAI, reference: Reference) -> None:
    answer = await complete(client, body={"return_token_ids": True}, echo=True, logprobs=1, max_tokens=3)
    (choice,) = answer.choices
    ids = extra(choice)["prompt_token_ids"] + extra(choice)["token_ids"]
    expected = reference.logprobs(ids)
    shown = choice.logprobs
    assert choice.text.startswith(TEXT)
    assert shown.token_logprobs[0] is None
    assert shown.token_logprobs[1:] == pytest.approx(
        [expected[i, token].item() for i, token in enumerate(ids[1:])], abs=1e-3
    )
    assert "".join(shown.tokens) == choice.text


async def test_beams_find_what_transformers_finds(client: AsyncOpenAI, reference: Reference) -> None:
    for prompt, settings in ((TEXT, {"length_penalty": 0.0}), (LONG, {"early_stopping": True})):
        answer = await complete(
            client, prompt, n=3, max_tokens=10, body={"use_beam_search": True, "return_token_ids": True, **settings}
        )
        found = [extra(choice)["token_ids"] for choice in answer.choices]
        expected = reference.beams(reference.tokens(prompt), 3, 10, **settings)
        assert found == [tokens[: len(own)] for tokens, own in zip(expected, found, strict=True)]
        assert answer.usage.completion_tokens == sum(map(len, found))


async def test_what_is_asked_holds_across_a_hand_over(stack: RunningStack, client: AsyncOpenAI) -> None:
    """The first token is drawn on one engine, the others on another."""
    body = {"bad_words": ["a lighthouse", "the"], "repetition_penalty": 1.2, "top_k": 30, "min_p": 0.01}
    asked: dict[str, Any] = {"body": body, "seed": 5, "temperature": 1.0, "logprobs": 3, "presence_penalty": 0.5}
    before = handed_over(stack)
    whole = await complete(client, LONG, max_tokens=24, **asked)
    assert handed_over(stack) == before + 1
    first = await complete(client, LONG, max_tokens=1, **asked)
    assert handed_over(stack) == before + 1, "one token is drawn where the prompt is computed"
    assert whole.choices[0].text.startswith(first.choices[0].text)
    assert whole.choices[0].logprobs.tokens[0] == first.choices[0].logprobs.tokens[0]
    assert not {"the", " the"} & set(whole.choices[0].logprobs.tokens)


async def test_bad_words_are_never_written_at_any_place(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    free = await client.chat.completions.create(**asked)
    bound = await client.chat.completions.create(**asked, extra_body={"bad_words": ["Paris"]})
    assert "Paris" in free.choices[0].message.content
    assert "Paris" not in bound.choices[0].message.content


async def test_only_allowed_tokens_are_drawn(client: AsyncOpenAI, reference: Reference) -> None:
    allowed = sorted({token for word in (" one", " two", " three") for token in reference.tokens(word)[-1:]})
    body = {"allowed_token_ids": allowed, "ignore_eos": True, "return_token_ids": True}
    answer = await complete(client, body=body, temperature=1.0, n=4, max_tokens=12, seed=3)
    drawn = [token for choice in answer.choices for token in extra(choice)["token_ids"]]
    assert set(drawn) <= set(allowed)
    assert len(set(drawn)) > 1


async def test_choices_share_their_prompt_and_draw_by_their_place(client: AsyncOpenAI) -> None:
    several = await complete(client, body={}, n=3, seed=11, temperature=1.0)
    alone = [await complete(client, body={}, seed=11 + i, temperature=1.0) for i in range(3)]
    assert [choice.text for choice in several.choices] == [each.choices[0].text for each in alone]
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens


async def test_long_prompts_are_cut_from_the_left(client: AsyncOpenAI, reference: Reference) -> None:
    answer = await complete(client, LONG, body={"truncate_prompt_tokens": 20, "return_token_ids": True})
    assert extra(answer.choices[0])["prompt_token_ids"] == reference.tokens(LONG)[-20:]
    assert answer.usage.prompt_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_ends_with_its_budget(client: AsyncOpenAI, reference: Reference, stream: bool) -> None:
    end = reference.tokens("</think>")
    answer: Any = await client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "Tell me a story about a lighthouse."}],
        temperature=0,
        max_tokens=40,
        stream=stream,
        extra_body={
            "thinking_token_budget": 12,
            "return_token_ids": True,
            "chat_template_kwargs": {"thinking": True},
        },
    )
    if stream:
        tokens = [t async for chunk in answer for c in chunk.choices for t in extra(c).get("token_ids", [])]
    else:
        tokens = extra(answer.choices[0])["token_ids"]
    assert tokens[12 : 12 + len(end)] == end
    assert end[0] not in tokens[:12]


async def test_thoughts_that_never_begin_are_not_ended(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": "Count from 3 to 12."}],
        "temperature": 0,
    }
    free = await client.chat.completions.create(**asked)
    bound = await client.chat.completions.create(**asked, extra_body={"thinking_token_budget": 1})
    assert bound.choices[0].message.content == free.choices[0].message.content


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["\U0001f600" * 200]}, "bad_words"),
        ({"allowed_token_ids": [-5]}, "allowed_token_ids"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
        ({"prompt_logprobs": 2**70}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 10**9}, "truncate_prompt_tokens"),
        ({"use_beam_search": True, "n": 2, "temperature": 1}, "temperature"),
        ({"best_of": 5}, "best_of"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(client: AsyncOpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, body=body)
    assert refused.value.param == param


@pytest.mark.features("beam search", "guided", refused=True)
@pytest.mark.features("beam search", "tool calls", refused=True)
@pytest.mark.features("beam search", "prompt logprobs", refused=True)
@pytest.mark.features("beam search", "logits processors", refused=True)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"vllm_xargs": {"begin_with": [7]}}, "vllm_xargs"),
    ],
)
async def test_what_beams_cannot_have_is_refused_by_name(
    client: AsyncOpenAI, stack: RunningStack, body: dict[str, Any], param: str
) -> None:
    asked: Any = [{"role": "user", "content": "Hi"}]
    more = {"use_beam_search": True, **body}
    with pytest.raises(openai.BadRequestError, match="use_beam_search") as refused:
        await client.chat.completions.create(model=stack.model, messages=asked, temperature=0, extra_body=more)
    assert refused.value.param == param
