"""Guided decoding through the whole ring, by the openai SDK, and over the death of the engine."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE, blocks_in_use, stream_chat
from tests.support.cluster.stack import RunningStack

QUESTION = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Tokyo"]},
        "population": {"type": "integer", "minimum": 1000, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["old", "new", "großstadt"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "population", "tags"],
}
LONG = {"type": "array", "items": {"enum": ["fox", "owl", "hen"]}, "minItems": 40, "maxItems": 40}
STREAMS = 3


def asks_for(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


async def ask(client: AsyncOpenAI, model: str, **options: Any) -> str:
    options = {"max_tokens": 120, "temperature": 0.8, "seed": 5, **options}
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], **options
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


async def test_a_schema_is_satisfied_streamed_and_whole(stack: RunningStack, client: AsyncOpenAI) -> None:
    whole = await ask(client, stack.model, temperature=0, response_format=asks_for(SCHEMA), max_tokens=200)
    jsonschema.validate(json.loads(whole), SCHEMA)
    streamed = await stream_chat(client, stack.model, QUESTION, response_format=asks_for(SCHEMA), max_tokens=200)
    assert (streamed.text, streamed.finishes) == (whole, ["stop"])


async def test_every_way_to_ask_binds(stack: RunningStack, client: AsyncOpenAI) -> None:
    async def guided(**fields: Any) -> str:
        return await ask(client, stack.model, extra_body=fields)

    assert await guided(structured_outputs={"choice": ["Lyon", "Nice"]}) in ("Lyon", "Nice")
    assert re.fullmatch(r"\d{2}:\d{2}", await guided(structured_outputs={"regex": r"\d{2}:\d{2}"}))
    assert re.fullmatch("(ab){2,3}", await guided(guided_grammar='root ::= "ab"{2,3}'))
    assert await guided(guided_choice=["söder", "北"]) in ("söder", "北")
    assert re.fullmatch("x{3}", await guided(guided_regex="x{3}"))
    closed = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    compact = {"json": closed, "disable_any_whitespace": True}
    assert await guided(structured_outputs=compact) in ('{"a": true}', '{"a": false}')
    assert isinstance(json.loads(await guided(guided_json=json.dumps(closed)))["a"], bool)
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "over"}}
    assert await guided(structured_outputs={"structural_tag": tag}) == "over"
    small = {"type": "json_object"}
    assert isinstance(json.loads(await ask(client, stack.model, temperature=0, response_format=small)), dict)


async def test_what_cannot_be_compiled_is_refused_while_others_stream_on(
    stack: RunningStack, client: AsyncOpenAI
) -> None:
    async def refusal(**fields: Any) -> dict[str, Any]:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=stack.model, messages=[{"role": "user", "content": QUESTION}], **fields
            )
        body = caught.value.body
        assert isinstance(body, dict)
        return body

    streaming = asyncio.create_task(stream_chat(client, stack.model, "Count from 3 to 12.", max_tokens=100))
    schema = await refusal(response_format=asks_for({"properties": {"a": {"not": {}}}}))
    regex = await refusal(extra_body={"structured_outputs": {"regex": "a(b"}}, stream=True)
    grammar = await refusal(extra_body={"guided_grammar": "root ::= other"})
    stream = await streaming
    assert schema["param"] == "response_format.json_schema.schema"
    assert "$.properties.a.not: this keyword is not supported" in schema["message"]
    assert regex["message"].startswith("structured_outputs.regex: ")
    assert "position" in regex["message"]
    assert grammar["param"] == "guided_grammar"
    assert "line 1, column" in grammar["message"]
    assert stream.text
    assert len(stream.finishes) == 1


@pytest.mark.faults
@pytest.mark.features("guided", "re-dispatch")
async def test_documents_go_on_where_a_killed_engine_left_them(stack: RunningStack, client: AsyncOpenAI) -> None:
    async def documents(started: asyncio.Event | None = None) -> list[str]:
        streams = await asyncio.gather(
            *(
                stream_chat(
                    client,
                    stack.model,
                    f"{QUESTION} ({number})",
                    started,
                    max_tokens=800,
                    extra_body={"structured_outputs": {"json": LONG, "disable_any_whitespace": True}},
                )
                for number in range(STREAMS)
            )
        )
        assert [stream.finishes for stream in streams] == [["stop"]] * STREAMS
        return [stream.text for stream in streams]

    async with asyncio.timeout(2 * DEADLINE):
        undisturbed = await documents()
        started = asyncio.Event()
        task = asyncio.create_task(documents(started))
        await started.wait()
        assert not task.done()
        stack.kill("engine-1-rank0")
        survived = await task
    for text in undisturbed:
        jsonschema.validate(json.loads(text), LONG)
    assert survived == undisturbed
    assert await blocks_in_use(stack) == 0
