"""How often the demo model calls the right tool with the right arguments, asked as clients ask: over HTTP, greedily.

    python -m tests.benchmarks.demo_tool_calls

The same held-out conversations as in the demo model's own evaluation, once with functions as they are and once with
`strict` ones, whose arguments are bound to their schemas.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.demo_training.evaluation import questions, wanted
from tests.demo_training.examples import Exchange
from tests.demo_training.texts.tools import CALL, OFFER, RESPONSE
from tests.support.cluster.stack import running_stack

QUESTIONS = 200
AT_ONCE = 8


def main() -> None:
    asked = [example for example in questions("tools", QUESTIONS) if isinstance(example, Exchange)]
    with tempfile.TemporaryDirectory() as folder, running_stack(Path(folder)) as stack:
        for strict in (False, True):
            right = asyncio.run(right_of(AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none"), asked, strict))
            kind = "strict" if strict else "plain"
            print(f"{kind} functions: {right} of {len(asked)} right ({right / len(asked):.1%})")


async def right_of(client: AsyncOpenAI, asked: list[Exchange], strict: bool) -> int:
    """How many are answered rightly: with the call, or, where none is needed, with the words."""
    room = asyncio.Semaphore(AT_ONCE)

    async def is_right(example: Exchange) -> bool:
        async with room:
            answer = await client.chat.completions.create(**request(example, strict))
        said = answer.choices[0].message
        right = wanted(example)
        if not right.startswith(_marks(CALL)[0]):
            return bool(said.content == right)
        called = said.tool_calls[0].function if said.tool_calls else None
        return called is not None and within(CALL, right) == {
            "name": called.name,
            "arguments": json.loads(called.arguments),
        }

    return sum(await asyncio.gather(*map(is_right, asked)))


def request(example: Exchange, strict: bool) -> dict[str, Any]:
    """The conversation in OpenAI's shapes, up to its last question."""
    before, _, offered = (example.system or "").partition(OFFER)
    messages: list[dict[str, Any]] = [{"role": "system", "content": before.strip()}] if before.strip() else []
    for turn in example.turns:
        result = turn.question.startswith(_marks(RESPONSE)[0])
        messages.append(
            {"role": "tool", "tool_call_id": "call", "content": json.dumps(within(RESPONSE, turn.question))}
            if result
            else {"role": "user", "content": turn.question}
        )
        if turn is not example.turns[-1]:
            messages.append(said_before(turn.answer))
    functions = [json.loads(line) | ({"strict": True} if strict else {}) for line in offered.strip().splitlines()]
    return {
        "model": "baton-demo",
        "messages": messages,
        "tools": [{"type": "function", "function": function} for function in functions],
        "temperature": 0,
        "max_tokens": 200,
    }


def said_before(answer: str) -> dict[str, Any]:
    call = within(CALL, answer)
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"role": "assistant", "tool_calls": [{"id": "call", "type": "function", "function": function}]}


def within(markup: str, text: str) -> Any:
    """The JSON between the marks."""
    before, after = _marks(markup)
    return json.loads(text.removeprefix(before).removesuffix(after))


def _marks(markup: str) -> tuple[str, str]:
    before, _, after = markup.partition("{}")
    return before, after


if __name__ == "__main__":
    main()
