"""`kv_transfer_params`: what the proxies of vLLM send, what they are given, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.api.completions import read_completion
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.vllm.kv_transfer import NO_TRANSFER, KvTransfer, kv_transfer_params
from shared.ids import Attempt, EngineId, ModelName, NodeId, RequestId
from shared.messages.gateway import PromptKept
from shared.messages.generation import KeptPrompt
from shared.messages.model_card import ModelCard

CARD = ModelCard(
    name=ModelName("demo"), max_model_len=2048, vocab_size=2048, eos_token_ids=(2,), dtype="float32", created=1
)
OF_A_PROXY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's `toy_proxy_server.py` and llm-d's sidecar send it."""
KEPT = PromptKept(
    request=RequestId("cmpl-1-0"),
    attempt=Attempt(1),
    blocks=2,
    engine=EngineId("engine-0"),
    node=NodeId("host-1"),
    tokens=32,
    ranks=4,
)


def read(params: Any, **more: Any) -> GenerationRequest:
    body = {"model": "demo", "prompt": "hi", "kv_transfer_params": params, **more}
    return read_completion(msgspec.json.encode(body), [CARD], RequestLimits())


def test_what_an_answer_says_is_what_the_next_request_may_say() -> None:
    assert read(OF_A_PROXY, max_tokens=1).kv_transfer == KvTransfer(keep=True)
    params = kv_transfer_params(KEPT)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[0, 1]],
        "remote_engine_id": "engine-0",
        "remote_request_id": "cmpl-1-0",
        "remote_host": "host-1",
        "remote_port": None,
        "remote_num_tokens": 32,
        "tp_size": 4,
        "pp_size": 1,
        "dcp_size": 1,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": None,
        "transfer_mode": None,
    }
    kept = KeptPrompt(EngineId("engine-0"), RequestId("cmpl-1-0"), NodeId("host-1"))
    assert read(params).kv_transfer == KvTransfer(kept=kept)
    assert kv_transfer_params(None) is None
    assert kv_transfer_params(msgspec.structs.replace(KEPT, blocks=0, node=None)) is None


@pytest.mark.parametrize("nothing", [None, {}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_a_client_may_ask_for_nothing(nothing: Any) -> None:
    assert read(nothing).kv_transfer == NO_TRANSFER


BACK = kv_transfer_params(KEPT)
assert BACK is not None


@pytest.mark.parametrize(
    ("params", "more", "field", "words"),
    [
        ([], {}, "kv_transfer_params", "an object is"),
        ({"do_remote_decode": "yes"}, {}, "kv_transfer_params.do_remote_decode", "true or false is"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "kv_transfer_params", "not allowed together"),
        ({"transfer_id": 7}, {}, "kv_transfer_params.transfer_id", "are known"),
        ({"do_remote_prefill": True}, {}, "kv_transfer_params.remote_engine_id", "former answer"),
        ({**BACK, "remote_host": "a.b >"}, {}, "kv_transfer_params.remote_host", "former answer"),
        ({**BACK, "remote_engine_id": "*"}, {}, "kv_transfer_params.remote_engine_id", "former answer"),
        ({**BACK, "remote_block_ids": [0]}, {}, "kv_transfer_params.remote_block_ids", "former answer"),
        ({**BACK, "remote_port": -1}, {}, "kv_transfer_params.remote_port", "former answer"),
        ({**BACK, "transfer_mode": "push"}, {}, "kv_transfer_params.transfer_mode", "former answer"),
        (OF_A_PROXY, {"n": 2}, "kv_transfer_params", "one choice only, not 2"),
        (OF_A_PROXY, {"stream": True}, "kv_transfer_params", "not allowed in a stream"),
        (BACK, {"enable_prefix_caching": False}, "kv_transfer_params", "without prefix caching"),
        (BACK, {"use_beam_search": True, "temperature": 0}, "kv_transfer_params", "use_beam_search"),
    ],
)
def test_the_rest_is_refused_by_name(params: Any, more: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(params, **more)
    assert (refused.value.status, refused.value.param) == (400, field)
    assert words in refused.value.message
