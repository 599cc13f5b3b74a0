"""The example of a connector for another store, docs/examples/mooncake-connector, with a real Mooncake master.

Left out where Mooncake is not installed: `pip install mooncake-transfer-engine-non-cuda`, and Debian's libibverbs1.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.connectors.installed import ConnectorRefused, open_connector
from kvstore.connectors.interface import KVRole
from tests.support.cluster.ports import free_port
from tests.support.engines.connector_engine import COUNT, PROMPT, Make, ask, at_rest, connector_engine, saved
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.paths import REPOSITORY

PACKAGE = REPOSITORY / "docs" / "examples" / "mooncake-connector"
STARTED_WITHIN = 60.0
SEGMENT = 64 << 20


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example among the installed packages, as pip would leave it."""
    metadata = tmp_path_factory.mktemp("packages") / "baton_mooncake_connector-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-mooncake-connector\nVersion: 1.0\n")
    project = (PACKAGE / "pyproject.toml").read_text(encoding="utf-8")
    entry = project.split('entry-points."baton.kv_connectors"]\n')[1].split("\n")[0].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[baton.kv_connectors]\n{entry}\n")
    monkeypatch.syspath_prepend(str(metadata.parent))
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The address of a master whose store has memory in this process."""
    library = pytest.importorskip("mooncake.store", exc_type=ImportError)
    port, program = free_port(), Path(library.__file__).parent / "mooncake_master"
    program.chmod(0o755)
    with (tmp_path / "master.log").open("w") as log:
        process = subprocess.Popen(
            [program, "--port", str(port), "--metrics_port", str(free_port())], stdout=log, stderr=log
        )
    holder = library.MooncakeDistributedStore()
    try:
        _listens(port)
        address = f"127.0.0.1:{port}"
        assert holder.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, SEGMENT, "tcp", "", address) == 0
        yield address
    finally:
        holder.close()
        process.kill()
        process.wait()


def _listens(port: int) -> None:
    deadline = time.monotonic() + STARTED_WITHIN
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            assert time.monotonic() < deadline, "mooncake_master does not listen"
            time.sleep(0.05)


def mooncake(master: str, role: KVRole) -> Make:
    extra = f'{{"master": "{master}"}}'
    return lambda rank: open_connector("mooncake", extra, role, engine="e", rank=rank, block_size=16)


def test_it_is_short_and_says_what_it_does_not_know() -> None:
    assert len((PACKAGE / "baton_mooncake.py").read_text(encoding="utf-8").splitlines()) < 150
    for extra, why in [
        ("{}", "master = '': an address is expected"),
        ('{"master": "127.0.0.1:1"}', "Connection refused"),
        ('{"segment": "1GiB"}', "segment = '1GiB': a int is expected"),
        ('{"size": 1}', "size: not known"),
    ]:
        with pytest.raises(ConnectorRefused, match="mooncake") as refused:
            open_connector("mooncake", extra, "kv_both", engine="e", rank=None, block_size=16)
        assert why in str(refused.value)


async def test_what_one_engine_saved_in_mooncake_another_one_loads(
    tmp_path_factory: pytest.TempPathFactory, master: str
) -> None:
    model: TinyModel = make_model("llama", tmp_path_factory.mktemp("tiny"))
    expected = model.greedy(PROMPT, COUNT)
    async with connector_engine(model, mooncake(master, "kv_producer"), "kv_producer") as (a, _):
        assert await ask(a, "first") == (expected, 0)
        await saved(a, len(PROMPT) // 16)
        await at_rest(a)
    async with connector_engine(model, mooncake(master, "kv_consumer"), "kv_consumer") as (b, _):
        assert await ask(b, "second") == (expected, 128)
        assert b.scheduler.core.counters.blocks_loaded == 8
        await at_rest(b)
