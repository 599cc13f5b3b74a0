"""README.md as a new user follows it: its commands and snippets as they stand there, on one stack."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.readme_claims import blocks, commands, layouts
from tests.support.cluster.stack import CHANGE_DEADLINE, LOOK_EVERY, START_DEADLINE, RunningStack, running_stack
from tests.support.paths import REPOSITORY

ADDRESS = "http://127.0.0.1:8000"
"""Where README's stack is."""
REQUEST = "README-1"
REQUESTS = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "baton-demo", "prompt": "1"}}\n'
)
OPERATE: Mapping[str, tuple[str, str]] = {
    "baton chat": ("--temperature 0", "Paris"),
    "baton batch": ("", ""),
    "baton ps": ("", "engine-2"),
    "baton logs": ("", REQUEST),
    "baton top": ("--once", "engine-1"),
    "baton drain": ("", "engine-1"),
    "baton undrain": ("", "engine-1"),
    "baton scale": ("", "tokenizer"),
    "baton bench": ("--num-prompts 4 --max-concurrency 2", "TTFT"),
    "baton doctor": ("", "nats"),
}
"""What is added to each command, so that it ends, ends sooner or says the same each time, and what it says."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """As the second `make up` of the page, on a free port."""
    assert layouts()[0] == "--port 9000 --engines 2"
    with running_stack(tmp_path_factory.mktemp("readme"), engines=2, gateways=2, threads=None) as running:
        yield running


@pytest.fixture(scope="module")
def names(stack: RunningStack) -> dict[str, Any]:
    """Those of the snippets, which go on in one another."""
    return {}


def executed(snippet: str, names: dict[str, Any]) -> Any:
    """The value of a snippet's last expression; what it prints goes to standard output."""
    tree = ast.parse(snippet)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "README.md", "exec"), names)
    return eval(compile(ast.Expression(last.value), "README.md", "eval"), names) if isinstance(last, ast.Expr) else None


def test_the_start_says_where_to_look(stack: RunningStack) -> None:
    wanted, end = [f"{stack.url}{path}" for path in ("", "/docs", "/console")], time.monotonic() + CHANGE_DEADLINE
    while missing := [each for each in wanted if each not in (stack.run_dir / "up.out").read_text()]:
        assert time.monotonic() < end, missing
        time.sleep(LOOK_EVERY)


def test_curl_is_answered(stack: RunningStack) -> None:
    (command,) = (each for each in commands() if each.startswith("curl "))
    assert ADDRESS in command
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, stack.url)], capture_output=True, timeout=60, check=True
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_snippets_do_what_they_say(
    stack: RunningStack, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    story, tools, offline = blocks("python")
    told = io.StringIO()
    with redirect_stdout(told):
        executed(story.replace(ADDRESS, stack.url), names)
    assert "fox" in told.getvalue()
    (call,) = executed(tools, names).choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    names["client"].close()
    # In a process of its own: an engine sets how many threads torch has.
    done = subprocess.run(
        [sys.executable, "-c", offline], cwd=REPOSITORY, capture_output=True, text=True, timeout=START_DEADLINE
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("line", [each for each in commands() if each.startswith(".venv/bin/")])
def test_a_command_does_what_it_says(stack: RunningStack, line: str, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(REQUESTS)
    words = shlex.split(line.removeprefix(".venv/bin/").replace("--request ID", f"--request {REQUEST}"))
    more, said = OPERATE[" ".join(words[:2])]
    if words[1] == "logs":
        asked_with_an_id(stack)
    program = [sys.executable, "-m", "deploy.cli", *words[1:], "--run-dir", str(stack.run_dir), *more.split()]
    done = subprocess.run(
        program,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=START_DEADLINE,
        stdin=subprocess.DEVNULL,
    )
    assert words[1] == "doctor" or done.returncode == 0, done.stderr
    assert said in done.stdout
    if words[1] == "batch":
        assert json.loads((tmp_path / "answers.jsonl").read_text())["custom_id"] == "1"


def asked_with_an_id(stack: RunningStack) -> None:
    """A request that the logs then name."""
    (command,) = (each for each in commands() if each.startswith("curl "))
    command = command.replace(ADDRESS, stack.url).replace("curl ", f"curl -H 'X-Request-Id: {REQUEST}' ")
    subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=True)


def test_no_command_is_left_out() -> None:
    """Whoever adds one says how it is tried."""
    run = [each for each in commands() if not each.startswith(("make up", "curl "))]
    assert {re.sub(r"^\.venv/bin/(baton \S+).*", r"\1", each) for each in run} == OPERATE.keys()
