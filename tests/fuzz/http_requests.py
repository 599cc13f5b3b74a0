"""HTTP requests made from the OpenAPI page of a gateway: valid, nearly valid, spoilt, and hostile to HTTP itself."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any, NamedTuple

import msgspec

from tests.fuzz.mutations import changed, spoilt_bytes

MAX_DEPTH = 4
MAX_OPTIONAL = 5
REFUSED = (
    *("model", "prompt_embeds", "logits_processors", "vllm_xargs"),
    *("guided_whitespace_pattern", "functions", "function_call"),
)
"""Fields that make a body useless unless their values are certain ones; most bodies have none of them."""
REFUSED_IN_RESPONSES = (
    *("model", "vllm_xargs", "conversation", "prompt", "context_management", "moderation", "image"),
    *("access_programs", "background_options", "prompt_cache_options", "previous_response_id", "background", "store"),
    *("service_tier", "truncation", "include", "stream_options", "tool_choice", "tools", "reasoning", "text"),
)
"""The same, of `/v1/responses`."""
TIMEOUT = 240.0
"""Seconds for one answer, on a machine that is busy with all the others."""
TEXTS = (
    "",
    "hi",
    "user",
    "text",
    "auto",
    "none",
    "json_object",
    "\0",
    "ÿ日本🎉",
    "a" * 300,
    "{{ x }}",
    "^(a|b)+$",
    "[0-9]{3}",
)
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "early_stopping": {"use_beam_search": True, "n": 2},
    "length_penalty": {"use_beam_search": True, "n": 2},
    "continue_final_message": {"add_generation_prompt": False},
    "top_logprobs": {"logprobs": True},
}
"""Fields that only mean something beside others."""
WEIGHTS = {"/v1/chat/completions": 8, "/v1/completions": 6}
FIELD = re.compile(r"[\w.\[\]-]+: |'max_tokens' |.*: this field is not known$", re.DOTALL)
"""How the text of an error begins that names a field."""
ROLES = ("system", "user", "assistant", "tool", "developer")
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW", "get")
HOSTILE_HEADERS = (
    b"content-length: -1",
    b"content-length: 99999999999999999999999",
    b"content-length: 1e3",
    b"content-length: 5\r\ncontent-length: 7",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked\r\ncontent-length: 3",
    b"expect: 100-continue",
    b"upgrade: websocket\r\nconnection: upgrade",
    b"authorization: Bearer " + b"x" * 3000,
    b"authorization: \xff\xfe",
    b"x-request-id: " + b"\x80" * 50,
    b"x-request-id:",
    b"content-type: text/plain; charset=utf-16",
    b"content-type: multipart/form-data",
    b"content-encoding: gzip",
    b"accept: nothing/*;q=x",
    b"host: a\r\nhost: b",
    b"cookie: " + b"a=b; " * 500,
    b": empty",
    b"no colon",
    b"bad name: 1",
    b"x" * 70_000 + b": 1",
)


UNASKED = (
    *("/scale_elastic_ep", "/admin/scale", "/admin/strike", "/admin/drain"),
    *("/pause", "/pause_generation", "/sleep", "/release_memory_occupation"),
)
"""As they would work: up to 256 engines, or none that takes or computes requests."""


class FuzzRequest(NamedTuple):
    """One request as bytes, and whether it is valid HTTP, so that an answer must come."""

    data: bytes
    proper: bool


class RequestGenerator:
    """Draws requests from a page; the same ones for the same seed."""

    def __init__(self, page: dict[str, Any], seed: int) -> None:
        self._schemas = page["components"]["schemas"]
        self._rng = random.Random(seed)
        self._bodies = {
            path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, methods in page["paths"].items()
            if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
            and path not in UNASKED
        }
        self._paths = [path for path in page["paths"] if path not in UNASKED]

    def request(self) -> FuzzRequest:
        """Draws the next request."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.06:
            return self._other_path()
        path = rng.choices([*self._bodies], [WEIGHTS.get(path, 1) for path in self._bodies])[0]
        body = self._body(path)
        if kind < 0.45:
            return post(path, _json(body))
        if kind < 0.75:
            return post(path, _json(changed(body, rng)))
        if kind < 0.9:
            return post(path, spoilt_bytes(_json(body), rng))
        return self._hostile(path, _json(body))

    def _body(self, path: str) -> dict[str, Any]:
        """A valid body, by the page; it asks for few tokens, so that a thousand of them are no load."""
        rng = self._rng
        body: dict[str, Any] = self._value(self._bodies[path], 0)
        if path == "/v1/responses":
            body["max_output_tokens"] = rng.randrange(1, 4)
            body["input"] = rng.choice((rng.choice(TEXTS), [self._item() for _ in range(rng.randrange(4))]))
            for name in REFUSED_IN_RESPONSES:
                if rng.random() < 0.95:
                    body.pop(name, None)
            return body
        if path.startswith("/v1/"):
            body["max_tokens"] = rng.randrange(1, 4)
            if isinstance(body.get("n"), int):
                body["n"] = rng.randrange(1, 4)
            for name, value in NEEDS.items():
                if name in body and rng.random() < 0.9:
                    body |= value
        for name in REFUSED:
            if rng.random() < 0.9:
                body.pop(name, None)
        if isinstance(body.get("messages"), list):
            body["messages"] = [self._message() for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
        elif "tokens" not in body and rng.random() < 0.9:
            ids = [rng.randrange(300) for _ in range(rng.randrange(1, 20))]
            body["prompt"] = rng.choice(TEXTS) if path == "/tokenize" else rng.choice((*TEXTS, ids, [ids, ids]))
        return body

    def _item(self) -> dict[str, Any]:
        rng = self._rng
        text = rng.choice(TEXTS)
        content = rng.choice(
            (text, [{"type": "input_text", "text": text}], [{"type": "output_text", "text": text}], [])
        )
        item = rng.choice(
            (
                {"role": rng.choice(ROLES), "content": content},
                {"type": "function_call", "call_id": "c", "name": text, "arguments": text},
                {"type": "function_call_output", "call_id": "c", "output": content},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]},
                {"type": text},
            )
        )
        return item | ({"status": rng.choice(("completed", "incomplete", text))} if rng.random() < 0.2 else {})

    def _message(self) -> dict[str, Any]:
        rng = self._rng
        text = rng.choice(TEXTS)
        content = rng.choice((text, text, [{"type": "text", "text": text}], [], [text], None))
        return {"role": "assistant" if content is None else rng.choice(ROLES), "content": content}

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        rng = self._rng
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            return self._value(rng.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "string":
                return rng.choice(TEXTS)
            case "integer":
                return self._integer(schema)
            case "number":
                return rng.choice((self._integer(schema), rng.uniform(-2, 2), 0.5, 1e-9, 1e300))
            case "array":
                items = schema.get("items", {})
                return [self._value(items, depth + 1) for _ in range(rng.randrange(4) if depth < MAX_DEPTH else 0)]
            case "object":
                return self._object(schema, depth)
            case _:
                return self._anything(depth)

    def _integer(self, schema: dict[str, Any]) -> int:
        low, high = int(schema.get("minimum", -3)), int(schema.get("maximum", 40))
        return self._rng.choice((low, high, low + 1, 0, 1, 2, 5, self._rng.randrange(3000)))

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, known = self._rng, schema.get("properties", {})
        required = schema.get("required", [])
        optional = [name for name in known if name not in required]
        chosen = rng.sample(optional, min(len(optional), rng.randrange(MAX_OPTIONAL + 1)))
        made = {name: self._value(known[name], depth + 1) for name in (*required, *chosen)}
        if not known and depth < MAX_DEPTH:
            inner = schema.get("additionalProperties")
            for _ in range(rng.randrange(4)):
                name = rng.choice((*TEXTS[:7], "5", "17", "type", "name", "properties", "function"))
                made[name] = self._value(inner if isinstance(inner, dict) else {}, depth + 1)
        return made

    def _anything(self, depth: int) -> Any:
        rng = self._rng
        simple = (None, True, 0, -1, 2**63, 2**64, 0.5, 1e308, rng.choice(TEXTS))
        if depth >= MAX_DEPTH or rng.random() < 0.4:
            return rng.choice(simple)
        return rng.choice(
            (self._object({}, depth), [self._anything(depth + 1) for _ in range(rng.randrange(3))], SCHEMA)
        )

    def _other_path(self) -> FuzzRequest:
        rng = self._rng
        path = rng.choice(
            (*self._paths, "/", "/nothing", "/v1/models/%ff%00", "/v1/models/../x", "/%2e%2e", "*", "/?a=b#c")
        )
        method = rng.choice(METHODS)
        return FuzzRequest(_head(method, path.replace("{name}", rng.choice(("x", "%F0%9F%8E%89", "a/b"))), ()), False)

    def _hostile(self, path: str, body: bytes) -> FuzzRequest:
        rng = self._rng
        length = b"content-length: %d" % (len(body) + rng.choice((0, 0, -1, -5)))
        headers = [length, *rng.sample(HOSTILE_HEADERS, rng.randrange(1, 3))]
        rng.shuffle(headers)
        data = _head("POST", path, headers) + body
        if rng.random() < 0.4:
            data = spoilt_bytes(data, rng)
        return FuzzRequest(data, False)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 2**70}, "b": {"enum": [1, "x", None]}, "c": {"$ref": "#/x"}},
    "required": ["a"],
    "pattern": "(((",
}


def _json(value: Any) -> bytes:
    """As clients manage to send it: NaN, infinities and lone surrogates included."""
    return json.dumps(value, default=lambda _: None).encode()


def _head(method: str, path: str, headers: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: x", b"connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(path: str, body: bytes) -> FuzzRequest:
    """Returns a request that is valid HTTP, whatever its body."""
    headers = (b"content-type: application/json", b"content-length: %d" % len(body))
    return FuzzRequest(_head("POST", path, headers) + body, True)


async def send(port: int, request: FuzzRequest) -> bytes | None:
    """Returns all that the server answers until it closes the connection; None where that takes too long. Improper
    requests are cut off in the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.data)
        await writer.drain()
        if not request.proper:
            writer.write_eof()  # what is missing will not come
        async with asyncio.timeout(TIMEOUT):
            return await reader.read(-1)
    except ConnectionError:
        return b""
    except TimeoutError:
        return None
    finally:
        writer.close()


def status_of(answer: bytes | None) -> int | None:
    """The status of an answer; None where none came."""
    if answer is None:
        return None
    words = answer.split(b"\r\n", 1)[0].split(b" ")
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


def faults(request: FuzzRequest, answer: bytes | None) -> str | None:
    """Returns what is wrong with an answer: none at all, a server's error, or an error that names no field."""
    status = status_of(answer)
    if answer is None:
        return "no end in time"
    if status is None:
        return "no answer" if request.proper else None
    if status >= 500 and status != 503:
        return f"status {status}"
    if b'"type":"server_error"' in answer:
        return "a server's error within a stream"
    if request.proper and status >= 400:
        page = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
        if status == 400 and not names_field(page):
            return "an error that names no field"
    return None


def names_field(page: dict[str, Any]) -> bool:
    """Whether an error says which field is wrong: OpenAI's in `param`, Anthropic's and Ollama's in their text."""
    error = page["error"]
    if isinstance(error, str) or page.get("type") == "error":
        return FIELD.match(error if isinstance(error, str) else error["message"]) is not None
    return isinstance(error["param"], str)
