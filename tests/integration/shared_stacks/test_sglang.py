"""SGLang's API on the whole stack: the same model says the same as by OpenAI's."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.stack import RunningStack

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


async def test_texts_and_log_probabilities_are_those_of_completions(stack: RunningStack, client: AsyncOpenAI) -> None:
    extra: Any = {"prompt_logprobs": 0, "return_token_ids": True}
    whole = await client.completions.create(
        model=stack.model, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0, extra_body=extra
    )
    [choice] = whole.choices
    shown: Any = choice.model_dump()
    asked: Any = {"text": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0}, "return_logprob": True}
    async with httpx2.AsyncClient(base_url=stack.url, timeout=60) as http:
        answer = (await http.post("/generate", json={**asked, "logprob_start_len": 0})).raise_for_status().json()
        guided = {"text": PROMPT, "sampling_params": {"max_new_tokens": 8, "regex": "[0-9]{4}"}}
        digits = (await http.post("/generate", json=guided)).raise_for_status().json()
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (choice.text, shown["token_ids"])
    assert choice.logprobs is not None
    assert [each[0] for each in meta["output_token_logprobs"]] == pytest.approx(
        choice.logprobs.token_logprobs, abs=1e-3
    )
    scored = [
        each[str(token)]["logprob"]
        for each, token in zip(shown["prompt_logprobs"][1:], shown["prompt_token_ids"][1:], strict=True)
    ]
    assert [each[0] for each in meta["input_token_logprobs"][1:]] == pytest.approx(scored, abs=1e-3)
    assert [each[1] for each in meta["input_token_logprobs"]] == shown["prompt_token_ids"]
    assert digits["text"].isdigit()
    assert digits["meta_info"]["finish_reason"]["type"] == "stop"
