"""A model goes from host to host: real servers, real TLS; hosts that die, lie or have another model."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.supervisor.checkpoints.download import CheckpointDownload, DownloadFailed
from deploy.supervisor.checkpoints.fetch import FetchedModel
from deploy.supervisor.checkpoints.manifest import CHUNK_BYTES
from deploy.supervisor.servers.model_server import server_command
from deploy.supervisor.spec import TlsFiles
from tests.support.cluster.ports import free_port
from tests.support.cluster.tls_authority import HERE, Authority

CHUNKS = 16
DEADLINE = 60.0


class Peer:
    """A host that sends its copy of a model."""

    def __init__(self, folder: Path, files: tuple[str, str, str], original: Path) -> None:
        self.model = folder / "model"
        shutil.copytree(original, self.model)
        self.port = free_port()
        self.address = f"{HERE}:{self.port}"
        self._tls = files
        self.process = subprocess.Popen(
            server_command(self.model, folder / "stamps", HERE, self.port, files, weights=True)
        )
        deadline = time.monotonic() + DEADLINE
        while True:
            with contextlib.suppress(OSError):
                self._answered("/manifest")
                return
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _answered(self, path: str) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=self._tls[2])
        context.load_cert_chain(*self._tls[:2])
        connection = http.client.HTTPSConnection(HERE, self.port, timeout=DEADLINE, context=context)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def until_read(self) -> None:
        deadline = time.monotonic() + DEADLINE
        while self._answered("/manifest")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Peers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority(folder / "authority")
        self._made: list[Peer] = []
        self.original = folder / "original"
        self.original.mkdir()
        (self.original / "config.json").write_text("{}")
        (self.original / "model.safetensors").write_bytes(os.urandom(CHUNKS * CHUNK_BYTES - 1000))
        files = self._authority.files("joining")
        self.tls = TlsFiles(certificate=files[0], key=files[1], authority=files[2])

    def make(self, original: Path | None = None) -> Peer:
        folder = self.folder / f"peer-{len(self._made)}"
        folder.mkdir()
        self._made.append(Peer(folder, self._authority.files(folder.name), original or self.original))
        return self._made[-1]

    def check(self, fetched: FetchedModel) -> None:
        assert {path.name for path in fetched.folder.iterdir()} == {"config.json", "model.safetensors"}
        for path in self.original.iterdir():
            assert (fetched.folder / path.name).read_bytes() == path.read_bytes()
        assert fetched.is_complete

    def end(self) -> None:
        for each in self._made:
            each.end()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    made = Peers(tmp_path_factory.mktemp("peers"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def good(peers: Peers) -> Peer:
    return peers.make()


def quiet(words: str) -> None:
    pass


def test_a_model_comes_from_several_hosts_and_only_once(peers: Peers, good: Peer, tmp_path: Path) -> None:
    other, fetched = peers.make(), FetchedModel(tmp_path)
    other.until_read()
    assert not fetched.is_complete
    done = fetched.fetch([good.address, other.address], peers.tls, quiet)
    assert done is not None
    assert done.found == 0
    assert all(done.bytes_from[each.address] > 0 for each in (good, other))
    assert sum(done.bytes_from.values()) == done.fetched == CHUNKS * CHUNK_BYTES - 1000 + 2
    peers.check(fetched)
    assert fetched.fetch([], peers.tls, quiet) is None


def test_who_shows_no_certificate_of_the_stack_gets_nothing(good: Peer) -> None:
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(HERE, good.port, timeout=DEADLINE, context=unchecked)

    def ask() -> None:
        connection.request("GET", "/manifest")
        connection.getresponse()

    with contextlib.closing(connection), pytest.raises((ssl.SSLError, ConnectionError)):
        ask()


def test_a_host_that_is_killed_midway_is_made_up_for_by_another(
    peers: Peers, good: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, fetched = peers.make(), FetchedModel(tmp_path)
    dying.until_read()
    record = CheckpointDownload._record_chunk

    def kill_after_a_chunk(download: CheckpointDownload, peer: object, size: int) -> None:
        record(download, peer, size)  # type: ignore[arg-type]
        if str(peer.address) == dying.address:  # type: ignore[attr-defined]
            dying.end()

    monkeypatch.setattr(CheckpointDownload, "_record_chunk", kill_after_a_chunk)
    done = fetched.fetch([good.address, dying.address], peers.tls, quiet)
    assert done is not None
    assert 0 < done.bytes_from[dying.address] < done.bytes_from[good.address]
    peers.check(fetched)


def test_a_wrong_chunk_never_counts_and_what_came_before_is_kept(peers: Peers, good: Peer, tmp_path: Path) -> None:
    lying, fetched = peers.make(), FetchedModel(tmp_path)
    lying.until_read()
    with (lying.model / "model.safetensors").open("r+b") as file:
        file.seek(7 * CHUNK_BYTES + 100)
        file.write(b"spoilt")
    with pytest.raises(DownloadFailed, match=r"no host sends the rest \(.*chunk 7 of model.safetensors is not sound"):
        fetched.fetch([lying.address], peers.tls, quiet)
    assert not fetched.is_complete
    done = fetched.fetch([lying.address, good.address], peers.tls, quiet)
    assert done is not None
    assert done.found > 0, "what was sound is not fetched again"
    assert done.found + done.fetched == CHUNKS * CHUNK_BYTES - 1000 + 2
    peers.check(fetched)


def test_a_host_with_another_model_is_asked_no_more(peers: Peers, good: Peer, tmp_path: Path) -> None:
    other_model = tmp_path / "other"
    other_model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other_model / name).write_bytes(os.urandom(CHUNK_BYTES))
    other, fetched = peers.make(other_model), FetchedModel(tmp_path / "run")
    other.until_read()
    done = fetched.fetch([good.address, other.address], peers.tls, quiet)
    assert done is not None
    assert done.bytes_from[other.address] == 0
    peers.check(fetched)
    good_only = FetchedModel(tmp_path / "again")
    with pytest.raises(DownloadFailed, match="no host says what its model is"):
        good_only.fetch([f"{HERE}:{free_port()}"], peers.tls, quiet)


def test_a_model_that_changed_over_there_replaces_the_old_one(peers: Peers, good: Peer, tmp_path: Path) -> None:
    fetched = FetchedModel(tmp_path)
    fetched.folder.mkdir(parents=True)
    (fetched.folder / "old.safetensors").write_bytes(b"old")
    shutil.copyfile(peers.original / "config.json", fetched.folder / "config.json")
    (fetched.folder / "model.safetensors").write_bytes(bytes(100 * CHUNK_BYTES))
    done = fetched.fetch([good.address], peers.tls, quiet)
    assert done is not None
    assert done.found == 2
    peers.check(fetched)
