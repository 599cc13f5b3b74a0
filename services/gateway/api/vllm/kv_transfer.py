"""`kv_transfer_params`: a hand-over that the client conducts, in two requests, as vLLM's NixlConnector and the proxies
in front of it have it.

The first (`do_remote_decode`) has a prompt computed and kept; its answer has the params for the second one
(`do_remote_prefill`), which goes on from there. See docs/disaggregation.md.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from services.gateway.api.errors import invalid, not_allowed
from shared.ids import EngineId, NodeId, RequestId
from shared.messages.gateway import PromptKept
from shared.messages.generation import KeptPrompt

FIELD = "kv_transfer_params"
_FLAGS = ("do_remote_prefill", "do_remote_decode")
_NAMES = {"remote_engine_id": "engine", "remote_request_id": "request", "remote_host": "node"}
_NUMBERS = ("remote_port", "remote_num_tokens", "tp_size", "pp_size", "dcp_size")
_OF_VLLM_ALONE = ("remote_blocks_expiry_time", "remote_registration_generation", "transfer_mode")
"""What an answer has as null, for proxies that look for it."""
_KNOWN = (*_FLAGS, *_NAMES, *_NUMBERS, "remote_block_ids", *_OF_VLLM_ALONE)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class KvTransfer(NamedTuple):
    """What a request wants of a hand-over that its client conducts."""

    keep: bool = False
    """Its prompt's blocks are to be kept for a later request."""
    kept: KeptPrompt | None = None
    """Where those of its prompt are kept."""


NO_TRANSFER = KvTransfer()


def read_kv_transfer(given: Any) -> KvTransfer:
    """Raises RequestError 400 for what no answer of ours has, and what vLLM does not define."""
    if given is None:
        return NO_TRANSFER
    if not isinstance(given, dict):
        raise not_allowed(FIELD, given, "an object is")
    for name, value in given.items():
        if name not in _KNOWN and value is not None:
            raise invalid(f"{FIELD}.{name}", f"unknown; {', '.join(_KNOWN)} are known")
    for name in _FLAGS:
        if not isinstance(given.get(name), bool | None):
            raise not_allowed(f"{FIELD}.{name}", given[name], "true or false is")
    prefilled, keep = bool(given.get("do_remote_prefill")), bool(given.get("do_remote_decode"))
    if prefilled and keep:
        raise invalid(FIELD, "do_remote_prefill and do_remote_decode are not allowed together")
    return KvTransfer(keep, _kept(given) if prefilled else None)


def _kept(given: dict[str, Any]) -> KeptPrompt:
    for name in _NAMES:
        value = given.get(name)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise not_allowed(f"{FIELD}.{name}", value, "with do_remote_prefill that of a former answer is")
    for name in _NUMBERS:
        value = given.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise not_allowed(f"{FIELD}.{name}", value, "null, or the number of a former answer, is")
    for name in _OF_VLLM_ALONE:
        if given.get(name) is not None:
            raise not_allowed(f"{FIELD}.{name}", given[name], "null, as in a former answer, is")
    groups = given.get("remote_block_ids")
    if groups is not None and not (isinstance(groups, list) and all(map(_is_group, groups))):
        raise not_allowed(f"{FIELD}.remote_block_ids", groups, "null, or the lists of a former answer, is")
    return KeptPrompt(
        EngineId(given["remote_engine_id"]), RequestId(given["remote_request_id"]), NodeId(given["remote_host"])
    )


def _is_group(blocks: Any) -> bool:
    return isinstance(blocks, list) and all(isinstance(block, int) for block in blocks)


def kv_transfer_params(outcome: PromptKept | None) -> dict[str, Any] | None:
    """What the answer says of a prompt that was to be kept: the params of the request that goes on with it; None where
    nothing is kept, or that is not known in time."""
    if outcome is None or not outcome.blocks:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(outcome.blocks))],
        "remote_engine_id": outcome.engine,
        "remote_request_id": outcome.request,
        "remote_host": outcome.node,
        "remote_port": None,
        "remote_num_tokens": outcome.tokens,
        "tp_size": outcome.ranks,
        "pp_size": outcome.stages,
        "dcp_size": 1,
        **dict.fromkeys(_OF_VLLM_ALONE),
    }
