"""A real stack with plug-ins of a package of its own, installed by pip into a folder that only the stack has."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import REPOSITORY
from tests.support.plugin_packages import pip_installed

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    packages = pip_installed("bracket-parsers", tmp_path_factory.mktemp("parsers"))
    environment = {"PYTHONPATH": os.pathsep.join((str(packages), str(REPOSITORY)))}
    more = ["--tool-call-parser=brackets"]
    with running_stack(tmp_path_factory.mktemp("stack"), more=more, environment=environment) as stack:
        yield stack


async def test_calls_are_forced_and_read_in_the_markup_of_a_package(stack: RunningStack) -> None:
    async with client_of(stack.url) as client:
        fields: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_tokens": 100}
        forced = await client.chat.completions.create(
            **fields, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        (call,) = forced.choices[0].message.tool_calls
        city = json.loads(call.function.arguments)["city"]
        assert (forced.choices[0].finish_reason, city in ("Rome", "Paris")) == ("tool_calls", True)
        written = {"structured_outputs": {"choice": ['[[get_weather {"city": "Rome"}]]']}}
        free = await client.chat.completions.create(**fields, extra_body=written)
        assert free.choices[0].message.content == '[[get_weather {"city": "Rome"}]]', "no tools, no calls"
