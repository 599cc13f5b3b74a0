"""Processes that serve the same model have its packed weights in memory once, compute what each would alone, and load
them themselves where nobody has them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.models.weight_sharing import holders, shared_arena, sharing
from services.worker.models.weight_sharing.holders import holders_of
from services.worker.models.weight_sharing.shared_arena import NotShared, SharedArena, open_sealed
from services.worker.models.weight_sharing.tensor_tree import dump_tree, load_tree
from services.worker.ops.native.native_ops import NativeOps
from tests.support.models.tiny_models import make_model
from tests.support.paths import REPOSITORY
from tests.support.worker.recorded_logits import last_logits, record_logits
from tests.support.worker.tiny_backend import tiny_backend

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared on Linux")
PROMPT = list(range(3, 40))
KEY = "a" * 32
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
"""Some MiB of weights, of which huge pages are told from others."""


@pytest.fixture(autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("holders")
    monkeypatch.setattr(holders, "holders_folder", lambda: folder)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """How weights were had, from here on."""
    found = [
        record.message + (f": {record.__dict__['reason']}" if "reason" in record.__dict__ else "")
        for record in caplog.records
        if record.name == sharing.__name__
    ]
    caplog.clear()
    return found


@contextmanager
def holder(folder: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the model; see `weight_holder`."""
    native = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "baton" / "native"
    (cache / "baton").mkdir(parents=True, exist_ok=True)
    if native.exists() and not (cache / "baton" / "native").exists():
        (cache / "baton" / "native").symlink_to(native)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.worker.weight_holder", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    ) as process:
        yield process
        process.kill()


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def again(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return heard(process)


def test_two_processes_have_one_copy_that_outlives_the_one_that_loaded_it(tmp_path: Path) -> None:
    folder, cache = Path(make_model("llama", tmp_path / "model", **LARGE).path), tmp_path / "cache"
    with holder(folder, cache) as second:
        with holder(folder, cache) as first:
            own, other = heard(first), heard(second)
            assert own["tokens"] == other["tokens"]
            whole = other["memory"]
            assert whole["Rss"] > 8 << 10
            assert whole["ShmemPmdMapped"] > whole["Rss"] / 2, "not on huge pages"
            assert whole["Anonymous"] == 0, "a page was written to, so it is there twice"
            assert again(first)["memory"]["Pss"] < own["memory"]["Rss"] * 0.6
        alone = again(second)["memory"]
        assert alone["Pss"] == alone["Rss"] == whole["Rss"], "the other one ended"
        with holder(folder, cache) as third:
            assert heard(third)["memory"]["Pss"] < whole["Rss"] * 0.6, "it could not be found"


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("llama", {"quantization": "int4"}),
        ("mixtral", {"quantization": "int8"}),
        ("gpt-oss", {}),
        ("deepseek-v3", {}),
        ("qwen3-next", {}),
        ("falcon-h1", {}),
        ("jamba", {}),
        ("gemma3", {"dtype": "bfloat16"}),
    ],
)
def test_logits_are_those_of_private_weights(
    tmp_path: Path, family: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", sharing.__name__)
    make_model(family, tmp_path)
    recorded, how = record_logits(monkeypatch), {"ops": "native", "dtype": "float32", **how}
    expected = last_logits(tiny_backend(tmp_path, **how), PROMPT, recorded).clone()
    assert said(caplog) == []
    loaded = tiny_backend(tmp_path, **how, share_weights=True)
    assert said(caplog) == []
    found = tiny_backend(tmp_path, **how, share_weights=True)
    assert said(caplog) == ["weights are shared"]
    for backend in (loaded, found):
        assert torch.equal(last_logits(backend, PROMPT, recorded), expected)


def changed_file(folder: Path) -> dict[str, Any]:
    """As it is where a checkpoint is written anew, though what the digest reads of it is the same."""
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    return {}


@pytest.mark.parametrize(
    "differ",
    [
        changed_file,
        lambda _: {"dtype": "bfloat16"},
        lambda _: {"quantization": "int8"},
        lambda _: {"max_model_len": 64},
    ],
)
def test_other_weights_are_not_taken_for_these(
    tmp_path: Path, differ: Callable[[Path], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", sharing.__name__)
    make_model("llama", tmp_path)
    how = {"ops": "native", "dtype": "float32", "share_weights": True}
    kept = tiny_backend(tmp_path, **how)
    other = tiny_backend(tmp_path, **{**how, **differ(tmp_path)})
    assert said(caplog) == [], "both are loaded"
    del kept, other


@pytest.mark.parametrize("name", ["_MADV_COLLAPSE", "_MADV_POPULATE_READ"])
def test_where_the_kernel_has_no_such_memory_weights_are_private(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", sharing.__name__)
    make_model("llama", tmp_path)
    recorded, how = record_logits(monkeypatch), {"ops": "native", "dtype": "float32"}
    expected = last_logits(tiny_backend(tmp_path, **how), PROMPT, recorded).clone()
    monkeypatch.setattr(shared_arena, name, 9999)  # which no kernel knows
    backends = [tiny_backend(tmp_path, **how, share_weights=True) for _ in range(2)]
    assert [each.partition(":")[0] for each in said(caplog)] == ["weights are not shared"] * 2
    for backend in backends:
        assert torch.equal(last_logits(backend, PROMPT, recorded), expected)


def sealed(content: bytes = b"content") -> SharedArena:
    arena = SharedArena()
    arena.take(3 << 20).fill_(7)
    arena.seal(content)
    return arena


def test_what_one_process_writes_to_another_does_not_see() -> None:
    arena = sealed()
    path = f"/proc/self/fd/{arena.file}"
    _, memory, content = open_sealed(path)
    memory[5] = 1
    arena.memory[6] = 2
    _, third, _ = open_sealed(path)
    assert content == b"content"
    assert [arena.memory[5], memory[6], third[5], third[6]] == [7, 7, 7, 7]
    with pytest.raises(PermissionError):
        os.pwrite(arena.file, b"x", 0)


def test_memory_is_found_where_the_machine_has_none_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `vm.memfd_noexec` asks for it, with a seal more."""
    never_executed = 8  # MFD_NOEXEC_SEAL, Linux 6.3
    monkeypatch.setattr(os, "MFD_CLOEXEC", os.MFD_CLOEXEC | never_executed)
    try:
        arena = sealed()
    except NotShared as refusal:
        pytest.skip(f"Linux is older: {refusal}")
    assert open_sealed(f"/proc/self/fd/{arena.file}")[2] == b"content"


def test_memory_is_free_once_nobody_has_the_weights() -> None:
    arena = sealed()
    piece, file = arena.memory[:100], arena.file
    del arena
    assert os.fstat(file).st_size > 3 << 20
    del piece
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_table_of_several_layers_is_there_once() -> None:
    arena, table, norm = SharedArena(), torch.arange(1 << 16), torch.arange(4.0)
    first, second, own = load_tree(dump_tree((table, table, norm), arena), arena.memory)
    assert first.data_ptr() == second.data_ptr() == arena.memory.data_ptr()
    assert torch.equal(second, table)
    assert torch.equal(own, norm)


@pytest.mark.parametrize("what", ["unsealed", "gone", "regular", "pipe", "others"])
def test_a_file_that_is_no_sealed_memory_is_not_taken(tmp_path: Path, what: str) -> None:
    arena, others = SharedArena(), sealed_file(b"\xff" * 100)
    (tmp_path / "regular").write_bytes(b"x" * 100)
    os.mkfifo(tmp_path / "pipe")
    descriptors = {"unsealed": arena.file, "others": others}
    paths = {"gone": "/proc/1/fd/99999"} | {name: f"/proc/self/fd/{file}" for name, file in descriptors.items()}
    with pytest.raises(NotShared):
        open_sealed(paths.get(what, str(tmp_path / what)))
    os.close(others)


def sealed_file(content: bytes) -> int:
    """Another program's memory, sealed as weights are."""
    file = os.memfd_create("others", os.MFD_ALLOW_SEALING)
    os.write(file, content)
    fcntl.fcntl(file, shared_arena._F_ADD_SEALS, shared_arena._SEALED)
    return file


def test_weights_are_private_where_processes_cannot_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system of a network without locks, on which a home may lie."""

    def without_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(NotShared, match="No locks available"), holders_of(KEY):
        raise AssertionError("it went on without a lock")


def test_processes_of_another_host_with_the_same_home_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "model").mkdir()
    ops = NativeOps(torch.device("cpu"), torch.float32, threads=1)
    (tmp_path / "boot_id").write_text("another one")
    here = sharing.sharing_key(folder, ops)
    assert sharing.sharing_key(folder, ops) == here
    monkeypatch.setattr(sharing, "_BOOT", tmp_path / "boot_id")
    assert sharing.sharing_key(folder, ops) != here


def test_whoever_waits_loads_when_the_one_that_loads_is_killed() -> None:
    with holders_of(KEY) as own:
        own.add(SharedArena().file)
    (file,) = holders.holders_folder().iterdir()
    locking = f"import fcntl; file = open({str(file)!r}); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", locking]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as loading, open(file) as other:
        assert loading.stdout is not None
        loading.stdout.readline()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        loading.kill()
        with holders_of(KEY) as found:
            assert len(found.paths) == 1


def test_nobody_waits_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "STALL_TIMEOUT", 0.1)
    with (
        holders_of(KEY),
        pytest.raises(NotShared, match=r"another process has loaded nothing for 0\.1 s"),
        holders_of(KEY),
    ):
        raise AssertionError("two processes load at the same time")


def test_one_that_gets_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory grows each time that somebody looks; after ten times it is done."""
    monkeypatch.setattr(holders, "STALL_TIMEOUT", 0.0)
    looked: list[str] = []

    def progress(path: str) -> int:
        looked.append(path)
        return len(looked)

    with holders_of(KEY) as loading:
        loading.add(SharedArena().file)
        monkeypatch.setattr(holders, "progress_of", progress)
        monkeypatch.setattr(holders, "_locked", lambda file: len(looked) == 10)
        with holders_of(KEY):
            assert len(looked) == 10


def test_files_of_old_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "MAX_KEYS", 3)
    for number in range(5):
        with holders_of(f"{number}"):
            pass
        os.utime(holders.holders_folder() / f"{number}", ns=(number, number))
    with holders_of("5"):
        pass
    assert sorted(each.name for each in holders.holders_folder().iterdir()) == ["3", "4", "5"]
