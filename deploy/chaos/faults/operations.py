"""What operators and other clients do while streams are open: scaling and draining, and requests that are no good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from deploy.chaos.faults.fault import Fault
from deploy.chaos.stack import ChaosStack
from deploy.supervisor.operator_bus import ask_admin
from services.bench.client.http_client import HttpClient, HttpClientError

SCALED = ("tokenizer", "coordinator", "detokenizer")
BAD_TIMEOUT = 60.0
LEFT_AFTER = 0.3
"""Seconds after which a client of a whole answer leaves."""


class ScaleAndDrain(Fault):
    """At the same time an engine is drained, and one more is started of each service; then all of it is undone."""

    name = "scale-drain"
    hold = 4.0

    def missing(self, stack: ChaosStack) -> str | None:
        """Somebody else has to be there for new requests."""
        return None if self.targets(stack) else "it needs two engines of a kind (--engines 2)"

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Every engine that is not the last of its kind."""
        engines = [m.instance for m in stack.state.members if m.service == "scheduler" and stack.peers(m.instance) > 1]
        return {"": engines} if engines else {}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        state = stack.state
        count = {each: sum(m.service == each and m.wanted for m in state.members) for each in SCALED}
        grow = (ask_admin(state, "scale", {"service": each, "count": count[each] + 1}) for each in SCALED)
        await asyncio.gather(ask_admin(state, "drain", {"instance": victim}), *grow)
        yield
        shrink = (ask_admin(state, "scale", {"service": each, "count": count[each]}) for each in SCALED)
        await asyncio.gather(ask_admin(state, "undrain", {"instance": victim}), *shrink)


class BadRequest(NamedTuple):
    """A body that no gateway may accept, and what is bad about it."""

    what: str
    body: bytes


class BadRequests(Fault):
    """Requests among the good ones that must be refused, each with a 4xx; and clients that leave early."""

    name = "bad-requests"
    hold = 1.0

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """The stack as a whole."""
        return {"": ["gateways"]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`. What was answered otherwise is a complaint."""
        state = stack.state
        client = HttpClient(state.url, state.api_key)

        async def ask(request: BadRequest) -> str | None:
            try:
                answer = await client.call("POST", "/v1/completions", request.body, BAD_TIMEOUT)
            except HttpClientError as error:
                return f"{request.what}: {error}"
            return None if 400 <= answer.status < 500 else f"{request.what}: HTTP {answer.status}"

        async def leave() -> None:
            body = _body(state.model, prompt="Once upon a time", max_tokens=200, ignore_eos=True)
            with contextlib.suppress(HttpClientError):
                await client.call("POST", "/v1/completions", body, LEFT_AFTER)

        try:
            answers = await asyncio.gather(*map(ask, bad_requests(state.model)), *(leave() for _ in range(4)))
            stack.complaints += [complaint for complaint in answers if complaint is not None]
            yield
        finally:
            client.close()


def bad_requests(model: str) -> list[BadRequest]:
    """One of each kind that clients get wrong, by accident or on purpose."""
    deep = b"[" * 5000 + b"]" * 5000
    return [
        BadRequest("no JSON", b'{"model": '),
        BadRequest("deep JSON", b'{"model": "m", "prompt": ' + deep + b"}"),
        BadRequest("unknown model", _body("no-such-model", prompt="a")),
        BadRequest("no prompt", _body(model)),
        BadRequest("a prompt that is too long", _body(model, prompt="fox " * 200_000)),
        BadRequest("token ids beyond the vocabulary", _body(model, prompt=[2**31 - 1, 5])),
        BadRequest("max_tokens", _body(model, prompt="a", max_tokens=-1)),
        BadRequest("temperature", _body(model, prompt="a", temperature=-1)),
        BadRequest("a regex that is none", _body(model, prompt="a", structured_outputs={"regex": "(((("})),
        BadRequest("a schema that is none", _body(model, prompt="a", structured_outputs={"json": {"type": "dream"}})),
    ]


def _body(model: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": model, **fields})
