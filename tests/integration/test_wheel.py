"""What is installed: one name on top, and everything works below it, far from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from deploy.supervisor.state_file import read_state
from tests.support.paths import REPOSITORY

BUILD = """
import sys
sys.path.insert(0, "")
from deploy.wheel import backend
print(backend.build_wheel(sys.argv[1]))
"""
GENERATE = """
import sys
import baton
assert "torch" not in sys.modules and not any(name.startswith("baton.") for name in sys.modules)
from baton import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(sys.argv[1]) as llm:
        output = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
    print(repr(output[0].outputs[0].text))
    print(sorted({name.split(".")[0] for name in sys.modules} & {"shared", "services", "kvstore", "deploy"}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("shared", "services", "kvstore", "deploy"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPOSITORY / name, folder / name)
    done = subprocess.run([sys.executable, "-c", BUILD, "."], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.split()[-1])


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `pip install --no-deps` unpacks it."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def run(installed: Path, *arguments: str, seconds: float) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=installed.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_only_name_on_top_is_baton(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    metadata = next(name for name in names if name.endswith("/entry_points.txt"))
    assert {name.split("/")[0] for name in names} == {"baton", metadata.split("/")[0]}
    assert "baton = baton.deploy.cli:main" in wheel.read(metadata).decode()
    assert wheel.testzip() is None


def test_every_file_is_recorded(wheel: zipfile.ZipFile) -> None:
    record = next(name for name in wheel.namelist() if name.endswith("/RECORD"))
    lines = wheel.read(record).decode().splitlines()
    assert sorted(line.split(",")[0] for line in lines) == sorted(wheel.namelist())


def test_what_trains_and_compares_is_not_in_it_but_the_demo_model_is(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert not [name for name in names if "tests/" in name or "demo_training" in name or "campaign" in name]
    assert "baton/deploy/demo/model/model.safetensors" in names
    assert {"baton/deploy/demo/prompts.jsonl", "baton/deploy/demo/held_out.jsonl"} <= set(names)


def test_the_pages_for_people_find_their_files(wheel: zipfile.ZipFile, installed: Path) -> None:
    asked = "from baton.services.gateway.http.pages import console, documentation as docs; "
    asked += "print(sum(len(page.PAGE.file(name).content) > 0 for page in (console, docs) for name in page.ASSETS))"
    found = int(run(installed, "-c", asked, seconds=60))
    folders = ("baton/services/gateway/http/console_page/", "baton/services/gateway/http/swagger_ui/")
    kinds = (".js", ".css", ".svg", ".gz")
    assert found == sum(name.startswith(folders) and name.endswith(kinds) for name in wheel.namelist())
    assert f"{folders[0]}preact.js.LICENSE.txt" in wheel.namelist()


def test_a_model_generates_in_the_process_that_imports_baton(installed: Path) -> None:
    model = str(installed / "baton" / "deploy" / "demo" / "model")
    text, others = run(installed, "-c", GENERATE, model, seconds=100).splitlines()[-2:]
    assert "Paris" in text
    assert others == "[]", "imported without the prefix"


def test_a_campaign_says_that_it_needs_the_repository(installed: Path) -> None:
    command = [sys.executable, "-P", "-m", "baton.deploy.cli", "bench", "gpu", "--out", "x"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "needs Baton's repository" in done.stderr


@pytest.mark.slow
def test_a_stack_starts_and_answers(installed: Path, tmp_path: Path) -> None:
    where = ("--run-dir", str(tmp_path / "run"))
    run(installed, "-m", "baton.deploy.cli", "up", "--detach", "--port=0", *where, seconds=200)
    try:
        state = read_state(tmp_path / "run")
        assert state is not None
        body = {"model": state.model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        request = urllib.request.Request(
            f"{state.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["message"]["content"]
    finally:
        run(installed, "-m", "baton.deploy.cli", "down", *where, seconds=60)
