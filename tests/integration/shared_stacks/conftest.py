"""The stacks that all files here ask. Each file says by a fixture `stack` which of them it means."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import CHUNKED_AND_HANDED_OVER, PATIENT
from tests.support.models.tiny_adapters import ATTENTION, demo_reference, write_adapter
from tests.support.models.tiny_models import TinyModel
from tests.support.paths import DEMO_MODEL

INFILL = "After: {suffix} Before: {prefix}"
"""As no model of code has it: the demo model knows nothing of gaps."""
THOUGHTS = "{%- if thinking -%}{{- '<think>' -}}{%- endif -%}{#- </think> -#}"


@pytest.fixture(scope="package")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Two LoRA adapters of the demo model, each merged into a reference."""
    demo, folder = demo_reference(), tmp_path_factory.mktemp("adapters")
    return {
        "pirate": write_adapter(demo, folder / "pirate", seed=1, strength=0.07),
        "org/poet": write_adapter(demo, folder / "poet", modules=ATTENTION, r=16, seed=2, strength=0.1),
    }


@pytest.fixture(scope="package")
def ring(adapters: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """As `make up` starts it, but that prompts and decodes share their steps by rules, and embeddings are served."""
    with running_stack(
        tmp_path_factory.mktemp("ring"),
        gateways=2,
        more=[
            *("--itl-target-ms=100", "--long-prefill-token-threshold=64", "--pooling-type=last"),
            "--enable-prompt-embeds",
            f"--infill-template={INFILL}",
            *(f"--lora={name}={adapter.path}" for name, adapter in adapters.items()),
            f"--lora-registry={tmp_path_factory.mktemp('registry')}/loras.json",
        ],
    ) as stack:
        yield stack


@pytest.fixture(scope="package")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a template that opens thoughts where it is asked to."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + THOUGHTS)
    return folder


@pytest.fixture(scope="package")
def pools(
    thinking_model: Path, adapters: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningStack]:
    """An engine for prompts, in chunks, and one for what follows them: every request is handed over."""
    with running_stack(
        tmp_path_factory.mktemp("pools"),
        model=thinking_model,
        prefill=1,
        decode=1,
        kvstore="64MiB",
        settings=[PATIENT],
        more=[
            *CHUNKED_AND_HANDED_OVER,
            "--pooling-type=mean",
            "--enable-prompt-embeds",
            f"--lora=pirate={adapters['pirate'].path}",
        ],
    ) as stack:
        yield stack


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(stack.url) as client:
        yield client


@pytest.fixture
async def http(stack: RunningStack) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=stack.url, timeout=DEADLINE) as http:
        yield http
