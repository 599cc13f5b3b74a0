"""Models with caches of another kind on a whole stack, latents, groups of layers with windows, and states: handed over
(to two ranks, where the model has such), guided, resumed where an engine dies."""

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


LAYERS = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
"""Of Gemma 3; its windows have 24 tokens."""


def written(family: str, folder: Path, different: dict[str, Any]) -> TinyModel:
    """Random weights over a byte-level vocabulary; no end token among them, so that texts have one length."""
    tokenizer = byte_level()
    words = tokenizer.get_vocab_size(with_added_tokens=True)
    model = make_model(family, folder, vocab_size=words, **different)
    config = (folder / "config.json").read_text()
    write_model(folder, tokenizer)
    (folder / "config.json").write_text(config)
    return model


@pytest.mark.faults
@pytest.mark.features(
    "hybrid KV cache", "prefill/decode", "tensor parallel", "re-dispatch", "guided", "chunked prefill"
)
@pytest.mark.parametrize(("family", "different"), [("deepseek-v3", {}), ("gemma3", LAYERS)])
async def test_they_are_handed_over_and_an_engine_that_dies_changes_no_token(
    tmp_path: Path, family: str, different: dict[str, Any]
) -> None:
    await no_token_changes(tmp_path, family, different, ["--tp-decode=2", "--hybrid-kv-cache=on"])


@pytest.mark.faults
@pytest.mark.features("states", "prefill/decode", "tensor parallel", "re-dispatch", "guided", "chunked prefill")
@pytest.mark.parametrize(
    ("family", "different", "options", "dies"),
    [
        ("qwen3-next", {}, [], "decode-1"),
        ("granite-hybrid", {"mamba_n_groups": 1}, ["--tp-prefill=2", "--tp-decode=2"], "prefill-1"),
    ],
)
async def test_states_are_handed_over_and_an_engine_that_dies_changes_no_token(
    tmp_path: Path, family: str, different: dict[str, Any], options: list[str], dies: str
) -> None:
    await no_token_changes(tmp_path, family, different, options, dies)


async def no_token_changes(
    tmp_path: Path, family: str, different: dict[str, Any], options: list[str], dies: str = "decode-1"
) -> None:
    """Where an engine dies while requests are handed over."""
    model = written(family, tmp_path / "model", different)
    common = [5 + 7 * i % 90 for i in range(50)]
    prompts = [common + [20 + i] * (i + 1) for i in range(4)]
    expected = [model.greedy(prompt, OUTPUT) for prompt in prompts]
    settings = ("coordinator.disaggregate_tokens=0", "coordinator.disaggregate_least=0", "scheduler.store_deadline=5")
    more = [*options, "--max-num-seqs=16", "--max-batch-tokens=48"]
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
            stack.kill(dies)
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
