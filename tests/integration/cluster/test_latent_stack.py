"""A model with latent attention on a whole stack: handed over to two ranks, guided, resumed where an engine dies."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.bus_moments import listening, requests_are_handed_to
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import running_stack
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.models.tiny_tokenizers import byte_level, write_model

OUTPUT = 48
EXPRESSION = r"(ab|ba){3}"


def written(folder: Path) -> TinyModel:
    """Random weights over a byte-level vocabulary; no end token among them, so that texts have one length."""
    tokenizer = byte_level()
    model = make_model("deepseek-v3", folder, vocab_size=tokenizer.get_vocab_size(with_added_tokens=True))
    config = (folder / "config.json").read_text()
    write_model(folder, tokenizer)
    (folder / "config.json").write_text(config)
    return model


@pytest.mark.faults
async def test_latents_are_handed_over_and_an_engine_that_dies_changes_no_token(tmp_path: Path) -> None:
    model = written(tmp_path / "model")
    common = [5 + 7 * i % 90 for i in range(50)]
    prompts = [common + [20 + i] * (i + 1) for i in range(4)]
    expected = [model.greedy(prompt, OUTPUT) for prompt in prompts]
    settings = ("coordinator.disaggregate_tokens=0", "coordinator.disaggregate_least=0", "scheduler.store_deadline=5")
    more = ["--tp-decode=2", "--max-num-seqs=16", "--max-batch-tokens=48"]
    shape: dict[str, Any] = {"prefill": 1, "decode": 1, "kvstore": "64MiB"}
    with running_stack(tmp_path / "run", model=model.path, settings=settings, more=more, **shape) as stack:
        async with client_of(stack.url) as client:

            async def tokens(prompt: list[int]) -> list[int]:
                body = {"ignore_eos": True, "return_token_ids": True}
                answer = await client.completions.create(
                    model=stack.model, prompt=prompt, max_tokens=OUTPUT, temperature=0, extra_body=body
                )
                found: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
                return found

            async with listening(stack, requests_are_handed_to("decode-1")) as listener:
                asked = [asyncio.create_task(tokens(prompt)) for prompt in prompts]
                await listener.moment()
            stack.kill("decode-1")
            assert await asyncio.gather(*asked) == expected
            guided = await client.completions.create(
                model=stack.model,
                prompt=prompts[0],
                max_tokens=20,
                temperature=0,
                extra_body={"structured_outputs": {"regex": EXPRESSION}},
            )
            assert re.fullmatch(EXPRESSION, guided.choices[0].text)
            assert await asyncio.gather(*map(tokens, prompts)) == expected
