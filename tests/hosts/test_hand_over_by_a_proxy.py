"""A proxy between two hosts, as vLLM's disaggregated proxies and llm-d's sidecar are: it has one host compute a prompt,
and the other one go on from there, by what `kv_transfer_params` say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from services.offline import LLM, SamplingParams
from tests.support.cluster.namespace_hosts import Host, Hosts
from tests.support.paths import DEMO_MODEL

STORE = "--kvstore-memory=64MiB"
DEADLINE = 60.0
TOKENS = 40
WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's proxies add to the first request."""
STORY = " ".join(f"{word} {n}." for n in range(60) for word in ("north", "south", "east"))


class Answer(NamedTuple):
    text: str
    cached: int
    params: dict[str, Any]
    """What the first host has said of where the prompt's blocks are."""


class Proxy:
    """Owns the clients of two hosts. It knows their addresses, and nothing else of them."""

    def __init__(self, prefill: str, decode: str, model: str) -> None:
        self._prefill, self._decode = (
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE) for url in (prefill, decode)
        )
        self._model = model

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()

    def complete(self, prompt: str) -> Answer:
        ask = {"model": self._model, "prompt": prompt, "temperature": 0}
        first: Any = self._prefill.completions.create(**ask, max_tokens=1, extra_body={"kv_transfer_params": WANTED})
        params = first.kv_transfer_params
        chunks: Any = self._decode.completions.create(
            **ask,
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"kv_transfer_params": params, "ignore_eos": True},
        )
        *texts, last = list(chunks)
        text = "".join(chunk.choices[0].text for chunk in texts)
        return Answer(text, last.usage.prompt_tokens_details.cached_tokens, params)

    def chat(self, content: str) -> Answer:
        ask: Any = {"model": self._model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        asked = {"kv_transfer_params": WANTED}
        first: Any = self._prefill.chat.completions.create(**ask, max_completion_tokens=1, extra_body=asked)
        params = first.kv_transfer_params
        found = {"kv_transfer_params": params, "ignore_eos": True}
        answer = self._decode.chat.completions.create(**ask, max_completion_tokens=TOKENS, extra_body=found)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        return Answer(answer.choices[0].message.content or "", cached or 0, params)


@pytest.fixture(scope="module")
def decode(hosts: Hosts) -> Host:
    host = hosts["d"]
    host.first(STORE, "--gateways=1", "--decode=1")
    return host


@pytest.fixture(scope="module")
def prefill(hosts: Hosts, decode: Host) -> Host:
    host = hosts["p"]
    host.join(decode.token(), STORE, "--prefill=1", *host.with_everything())
    return host


@pytest.fixture(scope="module")
def proxy(prefill: Host, decode: Host) -> Iterator[Proxy]:
    for host in (prefill, decode):
        host.until_ready("p-prefill-1", "decode-1", "kvstore-1", "p-kvstore-1")
    proxy = Proxy(prefill.url, decode.url, prefill.state.model)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One process that does it all."""
    with LLM(str(DEMO_MODEL), device="cpu", kv_memory="32MiB", progress=False) as llm:
        yield llm


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_second_host_goes_on_from_the_firsts_blocks(proxy: Proxy, decode: Host, alone: LLM, kind: str) -> None:
    text = f"Tell me how to get there from {kind}: {STORY}"
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (expected,) = (
        alone.generate(text, greedy)
        if kind == "completion"
        else alone.chat([{"role": "user", "content": text}], greedy)
    )
    fetched = decode.ps()["kvstore-1"]["detail"]["lower_hits"]
    answer = proxy.complete(text) if kind == "completion" else proxy.chat(text)
    assert answer.text == expected.outputs[0].text
    assert (answer.params["remote_engine_id"], answer.params["remote_host"]) == ("p-prefill-1", "p")
    (blocks,) = answer.params["remote_block_ids"]
    assert len(blocks) > 40
    assert decode.ps()["kvstore-1"]["detail"]["lower_hits"] == fetched + len(blocks), "they came from the other host"
    assert answer.cached == 16 * len(blocks), "only what is behind the last full block is computed again"
