"""Attacks by what requests say: bodies that are large, deep or malformed, and values that cost much and look small."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from deploy.chaos.attacks.attack import EXCERPT, AttackCounts, Victim, all_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FEW = 8
"""Requests at a time of those that take the engines' time: the others are to be served beside them."""
DEEP = 100_000
MANY = 10_000
MILLION = 1_000_000


async def json_bodies(victim: Victim, counts: AttackCounts) -> None:
    """JSON that is deep, large, broken, or has numbers and texts that no field can hold."""
    bodies = {
        "deep arrays": b'{"prompt":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "deep arrays without an end": b"[" * MILLION,
        "millions of values": b'{"messages":[{"role":"user","content":[' + b"0," * (4 * MILLION) + b"0]}]}",
        "millions of keys": b"{" + b",".join(b'"%d":0' % at for at in range(MILLION)) + b"}",
        "a number of a megabyte": b'{"max_tokens":' + b"9" * MILLION + b"}",
        "an infinite number": victim.completion()[:-1] + b',"temperature":1e999999}',
        "no UTF-8": b'{"model":"\xff\xfe\xfd","prompt":"\xc3\x28"}',
        "half a surrogate": victim.completion()[:-1] + b',"prompt":"\\ud800"}',
        "control characters": victim.completion(prompt="\0\x01\x1b[2J" * 100),
        "not an object": b"[" + b'"a",' * MANY + b'"a"]',
        "more than a body may have": b'{"prompt":"' + b"x" * (20 * 2**20) + b'"}',
    }
    await _ask(victim, counts, ((what, path, body) for what, body in bodies.items() for path in (COMPLETIONS, CHAT)))


async def grammars(victim: Victim, counts: AttackCounts) -> None:
    """Regular expressions, grammars and schemas that grow when they are compiled, and choices in thousands."""
    wide = {"type": "object", "properties": {f"p{at}": {"type": "string", "maxLength": at} for at in range(2000)}}
    deep: Any = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    itself = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    wanted: dict[str, dict[str, Any]] = {
        "a regex of nested counts": {"regex": "((a{1,99}){1,99}){1,99}"},
        "a regex that backtracks": {"regex": "(a|aa|a?)+" * 40 + "$"},
        "a regex of a megabyte": {"regex": "(a|b)" * 200_000},
        "a regex of all characters": {"regex": "[\\s\\S]{0,100000}"},
        "a regex that looks behind": {"regex": "(?<=a)(?!b)\\1+"},
        "a grammar of itself": {"grammar": "root ::= root root | root"},
        "a grammar that is ambiguous": {"grammar": 'root ::= a a a a a a a a\na ::= "x" | a a | ""'},
        "a grammar of a megabyte": {"grammar": "root ::= " + " | ".join(f'"{at}"' for at in range(100_000))},
        "a schema with 2000 properties": {"json": wide},
        "a deep schema": {"json": deep},
        "a schema of itself": {"json": itself},
        "a schema of counts": {"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
        "100,000 choices": {"choice": [f"choice {at}" for at in range(100_000)]},
    }
    bodies = {what: victim.completion(structured_outputs=value) for what, value in wanted.items()}
    await _ask(victim, counts, ((what, COMPLETIONS, body) for what, body in bodies.items() for _ in range(3)))


async def tools(victim: Victim, counts: AttackCounts) -> None:
    """Tools by the hundred, with schemas of a megabyte, names that are none, and a call of each demanded."""

    def tool(name: str, schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": "d" * 1000, "parameters": schema}}

    wide = {"type": "object", "properties": {f"p{at}": {"enum": list(range(40))} for at in range(300)}}
    narrow = {"type": "object", "properties": {"a": {"type": "string"}}}
    bodies = {
        "128 tools": victim.chat(tools=[tool(f"t{at}", narrow) for at in range(128)], tool_choice="required"),
        "wide tools": victim.chat(tools=[tool(f"t{at}", wide) for at in range(64)], tool_choice="required"),
        "5000 tools": victim.chat(tools=[tool(f"t{at}", narrow) for at in range(5000)]),
        "a tool without a name": victim.chat(tools=[tool("", narrow)], tool_choice="required"),
        "a tool of a name of a megabyte": victim.chat(tools=[tool("t" * MILLION, narrow)]),
        "a schema that is none": victim.chat(tools=[tool("t", {"type": "dream"})], tool_choice="required"),
        "a schema from elsewhere": victim.chat(
            tools=[tool("t", {"$ref": "http://127.0.0.1:1/x"})], tool_choice="required"
        ),
    }
    await _ask(victim, counts, ((what, CHAT, body) for what, body in bodies.items() for _ in range(3)))


async def many_outputs(victim: Victim, counts: AttackCounts) -> None:
    """128 choices, all log-probabilities there are, of prompts too, and prompts by the thousand."""
    bodies = {
        "n = 128": victim.completion(n=128, max_tokens=8, temperature=1.0),
        "best_of": victim.completion(n=1, best_of=128, max_tokens=8, temperature=1.0),
        "log-probabilities": victim.completion(n=16, logprobs=20, max_tokens=64, temperature=1.0, ignore_eos=True),
        "of the prompt": victim.completion(prompt="fox " * 500, echo=True, logprobs=20, max_tokens=1),
        "of all tokens": victim.completion(logprobs=MILLION, prompt_logprobs=-1),
        "n of a million": victim.completion(n=MILLION),
        "thousands of prompts": victim.completion(prompt=["a"] * MANY),
        "stop strings": victim.completion(stop=[f"s{at}" for at in range(MANY)]),
        "a bias of all tokens": victim.completion(logit_bias={str(at): 100 for at in range(MANY)}),
        "bad words": victim.completion(bad_words=[f"w{at}" for at in range(MANY)]),
        "as many tokens as there are": victim.completion(max_tokens=2**31 - 1),
    }
    await _ask(victim, counts, ((what, COMPLETIONS, body) for what, body in bodies.items() for _ in range(4)), FEW)


async def long_prompts(victim: Victim, counts: AttackCounts) -> None:
    """A million tokens, as a text, as ids, as one word, and as a chat."""
    bodies: Mapping[str, tuple[str, bytes]] = {
        "a text": (COMPLETIONS, victim.completion(prompt="fox " * MILLION)),
        "ids": (COMPLETIONS, victim.completion(prompt=[5] * MILLION)),
        "one word": (COMPLETIONS, victim.completion(prompt="a" * (4 * MILLION))),
        "spaces": (COMPLETIONS, victim.completion(prompt=" " * (4 * MILLION))),
        "a chat": (CHAT, victim.chat("fox " * MILLION)),
        "a chat of many messages": (CHAT, _chat_of(victim, 50_000)),
        "a text to count": ("/tokenize", victim.completion(prompt="fox " * MILLION)),
    }
    await _ask(victim, counts, ((what, path, body) for what, (path, body) in bodies.items() for _ in range(3)), FEW)


async def images(victim: Victim, counts: AttackCounts) -> None:
    """Images at addresses that no gateway may ask, and files that are none; sounds likewise."""
    bomb = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xff\xff\xff\xff\xff\xff\xff\x08\x06\0\0\0" + b"\0" * 99)
    addresses = (
        "file:///etc/passwd",
        f"http://127.0.0.1:{victim.port}/v1/models",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:1/",
        "gopher://x",
        "data:image/png;base64,!!!!",
        f"data:image/png;base64,{bomb.decode()}",
        "data:image/png;base64," + "A" * (4 * 2**20),
        "x" * MILLION,
    )
    bodies = {
        f"an image at {address[:40]}": victim.chat([{"type": "image_url", "image_url": {"url": address}}])
        for address in addresses
    }
    sound = {"type": "input_audio", "input_audio": {"data": "A" * MILLION, "format": "wav"}}
    bodies["a sound that is none"] = victim.chat([sound])
    bodies["a thousand images"] = victim.chat([{"type": "image_url", "image_url": {"url": addresses[1]}}] * 1000)
    await _ask(victim, counts, ((what, CHAT, body) for what, body in bodies.items() for _ in range(3)))


async def forms(victim: Victim, counts: AttackCounts) -> None:
    """Uploads whose boundaries nearly come, again and again, with hundreds of thousands of fields and of headers."""
    field, file = b'Content-Disposition: form-data; name="purpose"', b'Content-Disposition: form-data; name="file"'
    named = file + b'; filename="a.jsonl"'
    dashes = "-" * 70
    bodies = {
        "nearly boundaries": ("xx", _form(b"xx", (field, b"batch"), (named, b"\r\n--xy" * (2 * MILLION)))),
        "long boundaries": (dashes, _form(dashes.encode(), (named, (b"\r\n--" + b"-" * 69) * (MILLION // 5)))),
        "returns": ("xx", _form(b"xx", (field, b"batch"), (named, b"\r" * (12 * MILLION)))),
        "many fields": ("xx", _form(b"xx", *[(field, b"1")] * (MILLION // 5))),
        "many headers": ("xx", _form(b"xx", (b"\r\n".join([field] + [b"X: 1"] * MILLION), b"batch"))),
        "a header of megabytes": ("xx", _form(b"xx", (field + b"a" * (8 * MILLION), b"batch"))),
        "no end": ("xx", b"--xx\r\n" + named + b"\r\n\r\n" + b"x" * (12 * MILLION)),
        "no boundary": ("x" * 30_000, b"x"),
    }

    async def send(what: str, path: str, boundary: str, body: bytes) -> None:
        more = f"Content-Type: multipart/form-data; boundary={boundary}\r\n"
        counts.record(f"{what} ({path})", await victim.post(path, body, more))

    paths = ("/v1/files", "/v1/audio/transcriptions")
    jobs = (partial(send, what, path, *body) for what, body in bodies.items() for path in paths for _ in range(2))
    await all_of(jobs, FEW)


async def encodings(victim: Victim, counts: AttackCounts) -> None:
    """Bodies that say that they are compressed, and would be 200 MB then."""
    body = gzip.compress(b" " * (200 * MILLION))

    async def send(named: str) -> None:
        counts.record(named, await victim.post(CHAT, body, f"{named}\r\n"))

    kinds = ("gzip", "deflate", "br", "zstd", "gzip, gzip")
    headers = [f"Content-Encoding: {kind}" for kind in kinds] + ["Transfer-Encoding: gzip, chunked"]
    await all_of(partial(send, header) for header in headers for _ in range(16))


async def arguments(victim: Victim, counts: AttackCounts) -> None:
    """Chats with calls of tools, whose arguments the chat template reads: deep, wide, and numbers without an end."""
    given = {
        "deep": "[" * DEEP + "]" * DEEP,
        "digits": '{"a":' + "9" * MILLION + "}",
        "digits behind a point": '{"a":1.' + "9" * MILLION + "e5}",
        "keys": "{" + ",".join(f'"{at}":0' for at in range(MILLION // 4)) + "}",
        "half a surrogate": '{"a":"\\ud800"}',
    }

    def chat(count: int, said: str) -> bytes:
        call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": said}}
        calls = [{"role": "assistant", "content": None, "tool_calls": [call]}] * count
        return victim.chat(messages=[{"role": "user", "content": "a"}, *calls, {"role": "user", "content": "b"}])

    bodies = {what: chat(1, said) for what, said in given.items()} | {"calls": chat(3 * MANY, '{"a":"b"}')}
    await _ask(victim, counts, ((what, CHAT, body) for what, body in bodies.items() for _ in range(3)), FEW)


async def queries(victim: Victim, counts: AttackCounts) -> None:
    """As many parameters behind a path as a head has room for, and paths that are as long."""
    paths = (
        "/v1/chat/completions?" + "&".join(f"metadata[k{at}]=v" for at in range(3000)),
        "/v1/batches?" + "limit=1&" * 7000,
        "/v1/models/" + "%41" * 15_000,
        "/" + "../" * 15_000 + "etc/passwd",
        "/v1/conversations/" + "%00" * MANY,
    )

    async def ask(path: str) -> None:
        counts.record(path[:EXCERPT], await victim.get(path))

    await all_of(partial(ask, path) for path in paths for _ in range(60))


def _form(boundary: bytes, *parts: tuple[bytes, bytes]) -> bytes:
    said = [b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, body) for head, body in parts]
    return b"".join(said) + b"--" + boundary + b"--\r\n"


def _chat_of(victim: Victim, count: int) -> bytes:
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": "fox"} for at in range(count)]
    return msgspec.json.encode({"model": victim.model, "messages": messages, "max_tokens": 4})


async def _ask(
    victim: Victim, counts: AttackCounts, asked: Iterable[tuple[str, str, bytes]], at_once: int = 16
) -> None:
    async def ask(what: str, path: str, body: bytes) -> None:
        counts.record(f"{what} ({path})", await victim.post(path, body))

    await all_of((partial(ask, what, path, body) for what, path, body in asked), at_once)


BODY_ATTACKS = {
    "json": json_bodies,
    "grammars": grammars,
    "tools": tools,
    "many-outputs": many_outputs,
    "long-prompts": long_prompts,
    "images": images,
    "forms": forms,
    "encodings": encodings,
    "arguments": arguments,
    "queries": queries,
}
