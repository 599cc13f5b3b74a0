"""Who may do what: the key of each call, what its requests are bound to, and the audit line at its end."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from msgspec.structs import replace

from services.gateway.api.errors import RequestError, abbreviated, not_allowed
from services.gateway.api.generation import GenerationRequest
from services.gateway.core.api_keys import ANONYMOUS, MIN_PRIORITY, ApiKey, KeyName, KeyScope
from services.gateway.core.rate_limits import LimitExceeded, LimitState, TokenBucket
from services.gateway.http.call import KEY_EXTENSION, Call
from services.gateway.key_file import KeyFileWatcher
from services.gateway.key_limiter import KeyLimiter
from shared.ids import ModelName
from shared.messages.tokenizer import (
    ChatPrompt,
    EmbedsPrompt,
    InfillPrompt,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from shared.packing import count

log = logging.getLogger(__name__)

MAX_SHARE = 3
"""So many times what is free may one key have open: three quarters where it is alone, and the less the more keys there
are, so that there is always room for another (dynamic thresholds, Choudhury and Hahne 1998)."""
MAX_STRANGERS = 60
"""Audit lines per minute of calls without a valid key."""
CHARS_PER_TOKEN = 4


class KeyAdmission(NamedTuple):
    """What an open request counts for at its key."""

    key: ApiKey
    reserved: int | None
    """Tokens; None: the key has no limits."""
    sequences: int


class AccessControl:
    """Decides by the key that a client sends. Owns how many sequences each key has open; the keys and their limits
    belong to others."""

    def __init__(
        self,
        keys: KeyFileWatcher,
        limiter: KeyLimiter,
        *,
        share_prefixes: bool,
        reachable: bool = False,
        origins: Collection[str] = (),
    ) -> None:
        """`share_prefixes`: requests of different keys share cached prefixes. `reachable`: other machines can reach
        the port. `origins`: of web pages that may call from elsewhere; "*": all."""
        self._keys, self._limiter, self._share_prefixes = keys, limiter, share_prefixes
        self._reachable, self._origins = reachable, origins
        self._open: Counter[KeyName] = Counter()
        """Open sequences of each key."""
        self._strangers = TokenBucket(MAX_STRANGERS, time.monotonic())

    def admit(self, call: Call, scope: KeyScope, *, counted: bool = True) -> None:
        """Sets the call's key, and counts a call for `inference` as an open request of it, until `finish`; not one that
        is not `counted`. Raises RequestError: 401 without a valid key, 403 where it lacks `scope`, 429 above a limit.
        Operators' calls must not come from a foreign web page, and need a key wherever other machines can reach the
        port."""
        if scope == "admin":
            self._check_operator(call)
        if not self._keys.required:
            return
        key = self._key_of(call)
        if key is None:
            text = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise RequestError(401, text, code="invalid_api_key")
        call.key = key
        if not key.allows(scope):
            text = f"the key {key.name!r} has the scopes {', '.join(sorted(key.scopes))}; this needs {scope}"
            raise RequestError(403, text, code="insufficient_permissions")
        if scope == "inference" and counted and key.limited:
            exceeded = self._limiter.start(key)
            call.limit_headers = limit_headers(self._limiter.state(key))
            if exceeded is not None:
                raise _too_many(key, exceeded)
            call.reserved = 0

    def _check_operator(self, call: Call) -> None:
        """A browser sends some requests to any site for any page, so that this machine's user must not be enough."""
        origin = call.headers.get(b"origin", b"").decode("latin-1")
        own = origin.partition("://")[2] == call.headers.get(b"host", b"").decode("latin-1")
        if origin and not own and not {"*", origin} & set(self._origins):
            raise RequestError(403, f"web pages of {abbreviated(origin)} may not do this (gateway.cors_origins)")
        self._check_name(call, origin)
        if self._reachable and not self._keys.required:
            text = "this needs API keys (--api-key, --keys-file), as other machines can reach the port"
            raise RequestError(403, text)

    def _check_name(self, call: Call, origin: str) -> None:
        """Without keys a page must have come by a name that only this machine has: one from elsewhere may have pointed
        a name of its own here meanwhile (DNS rebinding), and be of the same origin then."""
        page = origin or call.scope["path"].startswith("/console")
        host = call.headers.get(b"host", b"").decode("latin-1")
        if page and not self._keys.required and not {"*", origin} & set(self._origins) and not is_own_name(host):
            text = (
                f"host: {abbreviated(host)} is no address and not localhost; this needs API keys (--api-key), or that"
            )
            raise RequestError(403, f"{text} web pages of that name are allowed (gateway.cors_origins)")

    def _key_of(self, call: Call) -> ApiKey | None:
        if (name := call.scope["extensions"].get(KEY_EXTENSION)) is not None:
            return self._keys.ring.named(name)
        secret = sent_key(call)
        return None if secret is None else self._keys.ring.find(secret)

    def bound(self, generation: GenerationRequest, key: ApiKey) -> GenerationRequest:
        """Returns a request as the key may make it: no other key's requests share prefixes with it. Raises
        RequestError: 403 for the model, 400 for the priority."""
        if key is ANONYMOUS:
            return generation
        check_model(generation.allowed_names, key)
        if generation.priority < key.priority_ceiling:
            rule = f"requests of this key may have {key.priority_ceiling} or more (lower goes first)"
            raise not_allowed("priority", generation.priority, rule)
        if not self._share_prefixes:
            generation = replace(generation, cache_salt=key.salt(generation.cache_salt))
        if len(self._keys.ring) == 1:  # it competes with nobody
            return generation
        return replace(generation, key=key.name, weight=key.weight)

    def reserve(self, call: Call, generation: GenerationRequest, free: int) -> None:
        """Takes from the key's tokens per minute what the request is expected to use. `free`: how many more sequences
        the gateway may have open. Raises RequestError 429, where the key has too many of these, too."""
        if generation.key:
            open_sequences = self._open[call.key.name]
            if open_sequences + generation.sequences > MAX_SHARE * free:
                text = f"{open_sequences} requests of the key {call.key.name!r} are open, and {free} more may be"
                raise RequestError(429, f"{text}, which are kept for other keys", retry_after=1.0)
            call.sequences = generation.sequences
            self._open[call.key.name] += call.sequences
        if call.reserved is not None:
            self._reserve_tokens(call, expected_tokens(generation))

    def _reserve_tokens(self, call: Call, tokens: int) -> None:
        reserved = self._limiter.reserve(call.key, tokens)
        call.limit_headers = limit_headers(self._limiter.state(call.key))
        if isinstance(reserved, LimitExceeded):
            raise _too_many(call.key, reserved)
        call.reserved = reserved

    def admit_elsewhere(self, call: Call, names: Sequence[ModelName], tokens: int) -> None:
        """A request that may not have been read here goes to the overflow provider: what its key may do holds there,
        too. `names`: its model's, by one of which the key must allow it; `tokens`: what it may come to. Raises
        RequestError 403 for the model, 429 above a limit."""
        check_model(names, call.key)
        if call.reserved == 0:
            self._reserve_tokens(call, tokens)

    def detach(self, call: Call) -> KeyAdmission:
        """What a call counts for goes on counting behind its end, until `settle`."""
        admission = KeyAdmission(call.key, call.reserved, call.sequences)
        call.reserved, call.sequences = None, 0
        return admission

    def settle(self, admission: KeyAdmission, tokens: int) -> None:
        """What was admitted has ended, and has used so many tokens."""
        self._open[admission.key.name] -= admission.sequences
        if admission.reserved is not None:
            self._limiter.finish(admission.key, admission.reserved, tokens)

    def key_named(self, name: str) -> ApiKey | None:
        """Returns the key that is called so; None where there is none any more."""
        if not self._keys.required:
            return ANONYMOUS if name == ANONYMOUS.name else None
        return next((key for key in self._keys.ring if key.name == name), None)

    def finish(self, call: Call, endpoint: str, began: float) -> None:
        """The call has ended: settles what it has used, and logs who asked for what, and what it came to; nothing of
        any text. `began` is the monotonic time at which the call came in. Of those without a valid key some are left
        out of the log, so that strangers cannot fill it."""
        self.settle(self.detach(call), call.record.prompt_tokens + call.record.output_tokens)
        record, now = call.record, time.monotonic()
        if self._keys.required and call.key is ANONYMOUS:
            if self._strangers.level(now) < 1:
                return
            self._strangers.take(1, now)
        fields = {
            "key": call.key.name or None,
            "endpoint": endpoint,
            "status": record.status,
            "outcome": record.outcome,
            "param": record.param,
            "code": record.code,
            "model": record.model,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "duration": round(now - began, 4),
            "client": (call.scope.get("client") or [None])[0],
            "request": record.request,
            "client_request": call.id,  # what the answer's headers, and Anthropic's errors, call it
            "trace": None if call.span is None else call.span.trace_id,
        }
        log.info("audit", extra={name: value for name, value in fields.items() if value is not None})

    def keys(self) -> dict[str, Any]:
        """Returns what an administrator sees of the keys."""
        file = None if self._keys.path is None else {"path": str(self._keys.path), "error": self._keys.error}
        return {"object": "list", "data": [self._key_body(key) for key in self._keys.ring], "file": file}

    def _key_body(self, key: ApiKey) -> dict[str, Any]:
        limits = self._limiter.state(key) if key.limited else None
        return {
            "object": "api_key",
            "name": key.name,
            "scopes": sorted(key.scopes),
            "models": None if key.models is None else sorted(key.models),
            "priority_ceiling": None if key.priority_ceiling == MIN_PRIORITY else key.priority_ceiling,
            "requests_per_minute": key.requests_per_minute,
            "tokens_per_minute": key.tokens_per_minute,
            "concurrent_requests": key.concurrent_requests,
            "weight": key.weight,
            "requests_left": limits.requests.remaining if limits and limits.requests else None,
            "tokens_left": limits.tokens.remaining if limits and limits.tokens else None,
            "requests_open": limits.open if limits else None,
        }


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine in a way that no name server can have answered."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def sent_key(call: Call) -> bytes | None:
    """Returns the key that a client sends, as OpenAI's do or as Anthropic's do."""
    kind, _, secret = call.headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return secret.strip()
    return call.headers.get(b"x-api-key")


def check_model(names: Sequence[ModelName], key: ApiKey) -> None:
    """Raises RequestError 403 for a model that the key may use by none of these names, of which the first is shown."""
    if not any(map(key.allows_model, names)):
        text = f"model: the key {key.name!r} does not have access to {str(names[0])!r}"
        raise RequestError(403, text, param="model", code="model_not_found")


def expected_tokens(generation: GenerationRequest) -> int:
    """Returns how many tokens a request may come to, as OpenAI estimates it: those of its prompts, by their length, and
    all that it lets each choice generate."""
    most = min(generation.stopping.expected_tokens, generation.model.max_model_len)
    return sum(_prompt_tokens(prompt) for prompt in generation.prompts) + generation.sequences * most


def _prompt_tokens(prompt: Prompt) -> int:
    if isinstance(prompt, TokenPrompt):
        return count(prompt.tokens)
    if isinstance(prompt, EmbedsPrompt):
        return prompt.embeds.count
    match prompt:
        case TextPrompt():
            length = len(prompt.text)
        case PairPrompt():
            length = len(prompt.text) + len(prompt.second)
        case InfillPrompt():
            length = len(prompt.prefix) + len(prompt.suffix)
        case ChatPrompt():
            length = len(prompt.messages) + CHARS_PER_TOKEN * sum(each.count for each in prompt.embeds)
    return math.ceil(length / CHARS_PER_TOKEN)


def limit_headers(state: LimitState) -> list[tuple[bytes, bytes]]:
    """Returns OpenAI's headers about the limits that there are."""
    headers: list[tuple[bytes, bytes]] = []
    for name, bucket in (("requests", state.requests), ("tokens", state.tokens)):
        if bucket is not None:
            values = {"limit": bucket.limit, "remaining": bucket.remaining, "reset": duration(bucket.reset)}
            headers += [(f"x-ratelimit-{what}-{name}".encode(), str(value).encode()) for what, value in values.items()]
    return headers


def duration(seconds: float) -> str:
    """Formats seconds as these headers do: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def _too_many(key: ApiKey, exceeded: LimitExceeded) -> RequestError:
    text = f"Rate limit reached for the key {key.name!r}: {exceeded.allowed} {exceeded.name}. Please try again in "
    wait = duration(exceeded.retry_after)
    return RequestError(429, f"{text}{wait}.", code="rate_limit_exceeded", retry_after=exceeded.retry_after)
