"""Who may do what: the key of each call, what its requests are bound to, and the audit line at its end."""

from __future__ import annotations

import logging
import time
from typing import Any

from msgspec.structs import replace

from services.gateway.api.errors import RequestError, not_allowed
from services.gateway.api.generation import GenerationRequest
from services.gateway.core.api_keys import ANONYMOUS, MIN_PRIORITY, ApiKey, KeyScope
from services.gateway.http.call import Call
from services.gateway.key_file import KeyFileWatcher
from shared.ids import ModelName

log = logging.getLogger(__name__)


class AccessControl:
    """Decides by the key that a client sends; owns nothing, as the keys are the watcher's."""

    def __init__(self, keys: KeyFileWatcher, *, share_prefixes: bool) -> None:
        """`share_prefixes`: requests of different keys share cached prefixes."""
        self._keys, self._share_prefixes = keys, share_prefixes

    def identify(self, call: Call, scope: KeyScope) -> None:
        """Sets the call's key. Raises RequestError: 401 without a valid key, 403 where it lacks `scope`."""
        if not self._keys.required:
            return
        kind, _, secret = (call.header(b"authorization") or b"").partition(b" ")
        key = self._keys.ring.find(secret.strip()) if kind.lower() == b"bearer" else None
        if key is None:
            raise RequestError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        call.key = key
        if not key.allows(scope):
            text = f"the key {key.name!r} has the scopes {', '.join(sorted(key.scopes))}; this needs {scope}"
            raise RequestError(403, text, code="insufficient_permissions")

    def bound(self, generation: GenerationRequest, key: ApiKey) -> GenerationRequest:
        """Returns a request as the key may make it: no other key's requests share prefixes with it. Raises
        RequestError: 403 for the model, 400 for the priority."""
        if key is ANONYMOUS:
            return generation
        check_model(generation.model.name, key)
        if generation.priority < key.priority_ceiling:
            rule = f"requests of this key may have {key.priority_ceiling} or more (lower goes first)"
            raise not_allowed("priority", generation.priority, rule)
        if self._share_prefixes:
            return generation
        return replace(generation, cache_salt=key.salt(generation.cache_salt))

    def keys(self) -> dict[str, Any]:
        """Returns what an administrator sees of the keys."""
        file = None if self._keys.path is None else {"path": str(self._keys.path), "error": self._keys.error}
        return {"object": "list", "data": [_key_body(key) for key in self._keys.ring], "file": file}

    def audit(self, call: Call, endpoint: str, began: float) -> None:
        """Logs who asked for what, and what it came to; nothing of any text. `began` is the monotonic time at which the
        call came in."""
        record = call.record
        fields = {
            "key": call.key.name or None,
            "endpoint": endpoint,
            "status": record.status,
            "outcome": record.outcome,
            "model": record.model,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "duration": round(time.monotonic() - began, 4),
            "client": (call.scope.get("client") or [None])[0],
            "request": record.request,
            "client_request": call.client_id,
        }
        log.info("audit", extra={name: value for name, value in fields.items() if value is not None})


def check_model(model: ModelName, key: ApiKey) -> None:
    """Raises RequestError 403 for a model that the key may not use."""
    if not key.allows_model(model):
        text = f"model: the key {key.name!r} does not have access to {str(model)!r}"
        raise RequestError(403, text, param="model", code="model_not_found")


def _key_body(key: ApiKey) -> dict[str, Any]:
    return {
        "object": "api_key",
        "name": key.name,
        "scopes": sorted(key.scopes),
        "models": None if key.models is None else sorted(key.models),
        "priority_ceiling": None if key.priority_ceiling == MIN_PRIORITY else key.priority_ceiling,
    }
