"""Libraries and load generators that speak OpenAI's API, against a real stack. A test is skipped where its package is
missing: they are no dependencies of ours. docs/integrations.md has the versions that were tried, and how."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import DEMO_MODEL

KEY = "sk-clients"
QUESTION = "What is the capital of France?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
pytestmark = pytest.mark.filterwarnings("default")
"""Warnings of libraries that are not ours."""


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed (docs/integrations.md)")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("clients"), engines=1, more=[f"--api-key={KEY}"]) as stack:
        yield stack


@needs("langchain_openai")
def test_langchain_chats_streams_and_calls_tools(stack: RunningStack) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, model=stack.model, temperature=0, max_tokens=128)
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == answer.content
    called = chat.bind_tools([WEATHER], tool_choice="required").invoke("What is the weather in Oslo?")
    assert called.tool_calls[0]["name"] == "get_weather"
    assert isinstance(called.tool_calls[0]["args"]["city"], str)
    schema = {"title": "Answer", "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    shaped = chat.with_structured_output(schema, method="json_schema").invoke(QUESTION)
    assert isinstance(shaped["city"], str)


@pytest.mark.parametrize("api", ["responses", "anthropic", "cohere", "ollama"])
def test_langchain_speaks_every_api(stack: RunningStack, api: str) -> None:
    chat = langchain_chat(stack, api)
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.text
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == answer.text
    assert "Rome" in chat.invoke([("user", QUESTION), answer, ("user", "What is the capital of Italy?")]).text
    schema = {"title": "Answer", "description": "One.", "type": "object", "properties": {"city": {"type": "string"}}}
    shaped = chat.with_structured_output(schema | {"required": ["city"]}).invoke(QUESTION)
    assert isinstance(shaped["city"], str)


def langchain_chat(stack: RunningStack, api: str) -> Any:
    if api == "responses":
        openai = pytest.importorskip("langchain_openai")
        more: dict[str, Any] = {"use_responses_api": True, "reasoning": {"effort": "none", "summary": "auto"}}
        return openai.ChatOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, model=stack.model, temperature=0, **more)
    if api == "anthropic":
        anthropic = pytest.importorskip("langchain_anthropic")
        return anthropic.ChatAnthropic(
            base_url=stack.url, api_key=KEY, model=stack.model, temperature=0, max_tokens=128
        )
    if api == "cohere":
        cohere = pytest.importorskip("langchain_cohere")
        return cohere.ChatCohere(base_url=stack.url, cohere_api_key=KEY, model=stack.model, temperature=0)
    ollama = pytest.importorskip("langchain_ollama")
    headers = {"headers": {"Authorization": f"Bearer {KEY}"}}
    return ollama.ChatOllama(base_url=stack.url, model=stack.model, temperature=0, client_kwargs=headers)


@needs("agents")
def test_openais_agents_call_tools_and_keep_conversations(stack: RunningStack) -> None:
    import agents
    from openai import AsyncOpenAI

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
            model = agents.OpenAIResponsesModel(model=stack.model, openai_client=client)
            settings = agents.ModelSettings(temperature=0, max_tokens=128)
            agent = agents.Agent(name="Baton", model=model, model_settings=settings)
            session = agents.OpenAIConversationsSession(openai_client=client)
            for question, city in ((QUESTION, "Paris"), ("What is the capital of Italy?", "Rome")):
                answer = await agents.Runner.run(agent, question, session=session)
                assert city in answer.final_output
            forced = agents.ModelSettings(temperature=0, max_tokens=128, tool_choice="required")
            caller = agents.Agent(
                name="Caller", model=model, tools=[agents.function_tool(get_weather)], model_settings=forced
            )
            called = await agents.Runner.run(caller, "What is the weather in Oslo?", max_turns=2)
            [output] = [each.output for each in called.new_items if each.type == "tool_call_output_item"]
            assert output.startswith("sunny in ")

    agents.set_tracing_disabled(True)
    asyncio.run(run())


@needs("pydantic_ai")
@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_chats_and_shapes_its_output(stack: RunningStack, api: str) -> None:
    import pydantic_ai
    from pydantic import BaseModel
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    class Answer(BaseModel):
        city: str

    model = getattr(openai, api)(stack.model, provider=OpenAIProvider(base_url=f"{stack.url}/v1", api_key=KEY))
    settings: Any = {"temperature": 0.0, "max_tokens": 256}
    agent = pydantic_ai.Agent(model, model_settings=settings)
    first = agent.run_sync(QUESTION)
    assert "Paris" in first.output
    history = first.all_messages()
    assert "Rome" in agent.run_sync("What is the capital of Italy?", message_history=history).output
    shaped = pydantic_ai.Agent(model, output_type=Answer, model_settings=settings, retries=0).run_sync(QUESTION)
    assert isinstance(shaped.output.city, str)


@needs("litellm")
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_reaches_it_as_openai_and_as_vllm(stack: RunningStack, provider: str) -> None:
    import litellm

    asked: dict[str, Any] = {"model": f"{provider}/{stack.model}", "api_base": f"{stack.url}/v1", "api_key": KEY}
    asked |= {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 128}
    answer = litellm.completion(**asked)
    assert "Paris" in answer.choices[0].message.content
    streamed = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == answer.choices[0].message.content
    called = litellm.completion(**asked, tools=[WEATHER], tool_choice="required")
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments).keys() == {"city"}


@needs("llama_index")
def test_llamaindex_chats_completes_and_streams(stack: RunningStack) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=stack.model, api_base=f"{stack.url}/v1", api_key=KEY, is_chat_model=True, temperature=0, max_tokens=128
    )
    answer = llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content
    assert "Paris" in answer
    assert [*llm.stream_chat([ChatMessage(role="user", content=QUESTION)])][-1].message.content == answer
    plain = OpenAILike(model=stack.model, api_base=f"{stack.url}/v1", api_key=KEY, temperature=0, max_tokens=8)
    assert plain.complete("The capital of France is").text


TASK = """\
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc}
"""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo"}


@needs("lm_eval")
def test_lm_eval_scores_choices_by_prompt_log_probabilities(stack: RunningStack, tmp_path: Path) -> None:
    """`local-completions` echoes prompts with their log-probabilities, as token ids of the model's own tokenizer."""
    cities = [f" {city}" for city in CAPITALS.values()]
    rows = [
        {"question": f"The capital of {country} is", "choices": cities, "answer": place}
        for place, country in enumerate(CAPITALS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "capitals.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    arguments = f"model={stack.model},base_url={stack.url}/v1/completions,tokenizer={DEMO_MODEL},num_concurrent=4"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments),
            *("--tasks", "capitals", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
        ],
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(results.read_text())["results"]["capitals"]["acc,none"] >= 0.75


@needs("guidellm")
def test_guidellm_measures_a_stack(stack: RunningStack, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "guidellm",
                "run",
                "--disable-console-interactive",
                "--profile",
                "kind=synchronous",
            ),
            *("--backend", f"kind=openai_http,target={stack.url},model={stack.model},api_key={KEY}"),
            *("--tokenizer", f"kind=hf_auto,model={DEMO_MODEL}", "--constraint", "kind=max_requests,count=3"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", f"kind=json,path={report}"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 3


LLM_MODEL = """\
- model_id: baton
  model_name: MODEL
  api_base: URL
  api_key_name: baton
  supports_schema: true
"""


@needs("llm")
def test_the_llm_command_answers_streams_and_follows_a_schema(stack: RunningStack, tmp_path: Path) -> None:
    described = LLM_MODEL.replace("MODEL", stack.model).replace("URL", f"{stack.url}/v1")
    (tmp_path / "extra-openai-models.yaml").write_text(described)

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "baton", "--key", KEY, *arguments]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.strip()

    streamed = ask(QUESTION, "-o", "temperature", "0")
    assert "Paris" in streamed
    assert ask(QUESTION, "--no-stream", "-o", "temperature", "0") == streamed
    shaped = ask(QUESTION, "--schema", '{"type": "object", "properties": {"sum": {"enum": [4]}}, "required": ["sum"]}')
    assert json.loads(shaped) == {"sum": 4}
