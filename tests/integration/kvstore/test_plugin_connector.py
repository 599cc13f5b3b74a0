"""Connectors that installed packages bring: the one in docs/kv_connectors.md, word for word, in a stack of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from deploy.cli.up.store import with_connector
from deploy.errors import CommandError
from kvstore.connectors.installed import ConnectorRefused, open_connector
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import PATIENT, ask, prompts
from tests.support.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "kv_connectors.md"
LENGTH = 400


def example() -> str:
    return PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with that connector, as pip would leave it."""
    packages = tmp_path_factory.mktemp("packages")
    (metadata := packages / "folder_connector-1.0.dist-info").mkdir()
    (packages / "folder_connector.py").write_text(example())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-connector\nVersion: 1.0\n")
    entry = PAGE.read_text(encoding="utf-8").split('"folder_connector:')[1].split('"')[0]
    named = {"folder": f"folder_connector:{entry}", "broken": "no_such_module:Connector", "none": "json:loads"}
    lines = ["[baton.kv_connectors]", *(f"{name} = {where}" for name, where in named.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return packages


def test_the_example_is_short() -> None:
    assert len(example().splitlines()) < 100


@pytest.mark.parametrize(
    ("name", "extra", "why"),
    [
        ("nosuch", "{}", "no installed package brings it; there are: shared-memory, broken, folder, none"),
        ("broken", "{}", "ModuleNotFoundError"),
        ("none", "{}", "TypeError"),
        ("folder", '{"path": "kv"}', "kv_connector = folder: path: an absolute path is expected"),
        ("folder", "secret", "kv_connector_extra_config: no JSON"),
        ("folder", "[]", "kv_connector_extra_config: a JSON object is expected"),
        ("shared-memory", '{"sise": "1GiB"}', "sise: not known; there are directory, layerwise, size"),
        ("shared-memory", '{"directory": "/d", "layerwise": 1}', "layerwise = 1: true or false is expected"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    installed: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str, why: str
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    with pytest.raises(ConnectorRefused) as refused:
        open_connector(name, extra, "kv_both", engine="e", rank=None, block_size=16)
    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.features("KV connector", "prefill/decode", refused=True)
def test_what_does_not_go_with_a_connector_is_refused() -> None:
    with pytest.raises(ValueError, match="takes the place of the KV store"):
        SchedulerConfig(kv_connector="shared-memory", node="n")
    with pytest.raises(ValueError, match="role = prefill hands requests over"):
        SchedulerConfig(kv_connector="shared-memory", role="prefill")
    with pytest.raises(ValueError, match="the simulated device has no KV memory"):
        WorkerConfig(engine="e", model="m", kv_connector="shared-memory", device="sim")
    assert not with_connector({}, "1GiB")
    assert with_connector({"kv_connector": "folder"}, None)
    with pytest.raises(CommandError, match="leave --kvstore-memory out"):
        with_connector({"kv_connector": "folder"}, "1GiB")
    with pytest.raises(CommandError, match="--kv-role is of a KV connector"):
        with_connector({"kv_role": "kv_producer"}, None)


@pytest.fixture
def stack(installed: Path, tmp_path: Path) -> Iterator[RunningStack]:
    more = ["--kv-connector=folder", f'--kv-connector-extra-config={{"path": "{tmp_path}/kv"}}']
    environment = {"PYTHONPATH": os.pathsep.join((str(installed), str(REPOSITORY)))}
    with running_stack(tmp_path, more=more, settings=[PATIENT], environment=environment) as stack:
        yield stack


@pytest.mark.features("KV connector", "re-dispatch")
async def test_what_an_engine_computed_before_it_died_its_successor_loads(stack: RunningStack, tmp_path: Path) -> None:
    async with client_of(stack.url) as client:
        torn, other = prompts(stack, [LENGTH, LENGTH], salt=1)
        before = [await ask(client, stack.model, prompt, max_tokens=100) for prompt in (torn, other)]
        assert [answer.cached for answer in before] == [0, 0]

        def saved() -> int:
            return len([path for path in (tmp_path / "kv").iterdir() if path.suffix != ".making"])

        stack.until(lambda _: saved() >= 2 * (LENGTH // 16), DEADLINE)
        (rank,) = stack.instances("worker")
        again = asyncio.create_task(ask(client, stack.model, torn, max_tokens=100))
        await asyncio.sleep(0.1)  # most likely it has begun; if not, it begins at the successor
        stack.replaced(rank, stack.kill(rank))
        assert (await again).text == before[0].text
        after = await ask(client, stack.model, other, max_tokens=100)
        assert (after.text, after.cached) == (before[1].text, (LENGTH - 1) // 16 * 16)
        assert await loaded_blocks(stack) >= (LENGTH - 1) // 16, "they came by the connector"


async def loaded_blocks(stack: RunningStack) -> float:
    (scheduler,) = stack.instances("scheduler")
    port = (await stack.heard())[scheduler].metrics_port
    async with httpx2.AsyncClient() as http:
        lines = (await http.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("baton_scheduler_kv_blocks_loaded_total"))
