"""A real stack with plug-ins of packages of their own, installed by pip into folders that only the stack has."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import REPOSITORY
from tests.support.plugin_packages import pip_installed

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    examples = ("bracket-parsers", "sequence-processors", "pocket-platform")
    packages = [str(pip_installed(each, tmp_path_factory)) for each in examples]
    environment = {"PYTHONPATH": os.pathsep.join((*packages, str(REPOSITORY)))}
    more = ["--tool-call-parser=brackets", "--logits-processors=begin_with"]
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(folder, tp=2, device="pocket", more=more, environment=environment) as stack:
        yield stack


def test_the_ranks_compute_on_the_devices_of_a_package(stack: RunningStack) -> None:
    said = stack.baton("ps", "--run-dir", str(stack.run_dir)).stdout
    assert [f"rank {rank} of 2 on pocket:{rank}" in said for rank in (0, 1)] == [True, True], said
    assert "pocket operations" in stack.log(stack.instances("worker")[0])


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


async def test_a_package_changes_logits_of_the_requests_that_ask_and_another_reads_what_comes(
    stack: RunningStack,
) -> None:
    async with client_of(stack.url) as client:
        text = '[[get_weather {"city": "Rome"}]]'
        question = {"model": stack.model, "prompt": text, "add_special_tokens": False}
        begun: Any = await client.post(str(client.base_url.join("/tokenize")), body=question, cast_to=object)
        fields: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "temperature": 0.8, "seed": 3}
        fields |= {"max_tokens": len(begun["tokens"]), "tools": TOOLS}
        asking = {"vllm_xargs": {"begin_with": begun["tokens"]}}
        plain, forced, again = [
            await client.chat.completions.create(**fields, extra_body=body) for body in ({}, asking, {})
        ]
        (call,) = forced.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
        assert plain.choices[0].message == again.choices[0].message
        for args, why in [
            ({"begin_with": "Rome"}, "vllm_xargs: begin_with = 'Rome': a list of token ids is expected"),
            ({"begin_wit": []}, "vllm_xargs: 'begin_wit' is not allowed; one of begin_with is"),
        ]:
            with pytest.raises(BadRequestError) as refused:
                await client.chat.completions.create(**fields, extra_body={"vllm_xargs": args})
            assert (refused.value.param, why in str(refused.value)) == ("vllm_xargs", True), refused.value
