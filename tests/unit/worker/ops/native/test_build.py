"""Building the native kernels, and what happens where they cannot be built."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.native import build, library
from services.worker.ops.native.build import BuildError, Level, best_level, library_path, runnable_levels
from services.worker.ops.native.kernels import NativeKernels
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.selector import OpsChoice, create_ops
from services.worker.ops.torch_ops import TorchOps
from tests.support.worker.native_batches import CPU, native, random

COMPILER = """#!/bin/sh
echo called >> {calls}
while [ "$1" != -o ]; do shift; done
sleep 0.1
touch "$2"
"""
"""Makes an empty file of what it is asked for, and takes its time."""


@pytest.mark.parametrize("level", runnable_levels())
def test_the_library_says_which_instructions_it_uses(level: Level) -> None:
    """One by one: where none is compiled yet, all of them take a busy machine longer than one test may."""
    assert NativeKernels(1, level).instructions == level


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_threads_have_no_memory_of_the_library_that_they_do_not_use() -> None:
    assert thread_image_bytes(library_path(best_level())) < 16 << 10


def thread_image_bytes(path: Path) -> int:
    """What each thread has of a library's thread_local variables once it calls it, zeros included (elf(5))."""
    content = path.read_bytes()
    (offset,), (size, count) = struct.unpack_from("<Q", content, 32), struct.unpack_from("<HH", content, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", content, offset + index * size) for index in range(count)]
    thread_local = 7
    return sum(header[6] for header in headers if header[0] == thread_local)


def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_path(best_level())
    monkeypatch.setattr(build, "_compilers", lambda level: [])
    assert library_path(best_level()) == path


def test_processes_that_need_a_library_at_once_compile_it_once(tmp_path: Path) -> None:
    script = "from services.worker.ops.native import build; print(build.library_path('portable'))"
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(calls=tmp_path / "calls"))
    compiler.chmod(0o700)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(paths) == 1
    assert Path(paths.pop()).exists()
    sources = len(list(Path(build.__file__).parent.glob("*.cpp")))
    assert (tmp_path / "calls").read_text().count("called") == sources + 1  # and the linker's


def test_all_levels_share_what_a_level_adds_nothing_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sources that ask for VNNI, or include what does, are compiled with it; the others once for both levels."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{COMPILER.format(calls=os.devnull)}')
    compiler.chmod(0o700)
    files = {
        "shares.cpp": '#include "lanes.h"\n',
        "asks.cpp": "#if defined(BATON_VNNI)\n",
        "includes.cpp": '#include "lanes.h"\n#include "between.h"\n',
        "between.h": '#include "quad.h"\n',
        "quad.h": "#if defined(BATON_VNNI)\n",
        "lanes.h": "#define BATON_VNNI 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "best_level", lambda: "portable")
    assert build.main(["--all"]) == 0
    calls = [call.split() for call in (tmp_path / "calls").read_text().splitlines()]
    compiled = Counter(("-mavx512vnni" in call, Path(call[-1]).name) for call in calls if call[-1].endswith(".cpp"))
    others = {(False, name): 3 for name in ("asks.cpp", "includes.cpp", "shares.cpp")}
    assert compiled == others | {(True, "asks.cpp"): 2, (True, "includes.cpp"): 2, (True, "shares.cpp"): 1}


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compilers", lambda level: [])
    with pytest.raises(OpsUnavailable, match=r"no C\+\+ compiler"):
        NativeOps(CPU, torch.float32)


def test_for_a_user_without_a_home_libraries_lie_in_a_folder_that_nobody_else_may_enter(
    homeless: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(build, "_compilers", lambda level: [["false"]])
    with pytest.raises(BuildError, match="false exited with 1"):
        library_path("portable")
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_a_compiler_complains_of_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compilers", lambda level: [["false"], ["/nonexistent/c++"]])
    with pytest.raises(BuildError, match=r"false exited with 1.*nonexistent"):
        library_path("portable")
    assert list((tmp_path / "baton" / "native").iterdir()) == []


def test_a_compiler_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(build, "_compilers", lambda level: [["sh", "-c", "sleep 30"]])
    with pytest.raises(BuildError, match="timed out"):
        library_path("portable")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of others' processors' time are Linux's only")
def test_a_compiler_has_so_much_processor_time_and_not_so_much_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nwhile :; do :; done\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "COMPILE_CPU_SECONDS", 1)
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "_longest_first", lambda: [tmp_path / "one.cpp"])
    with pytest.raises(BuildError, match=r"exited with -(9|24)"):
        library_path("portable")


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(OSError, match=r"kernels\.so"):
        library.load(broken)


def test_other_devices_and_types_are_refused() -> None:
    with pytest.raises(OpsUnavailable, match="CPUs"):
        NativeOps(torch.device("cuda"), torch.float32)
    with pytest.raises(OpsUnavailable, match="int8"):
        NativeOps(CPU, torch.int8)


def test_pools_of_several_threads_work_side_by_side() -> None:
    """Two pools of three threads on few cores, thousands of small jobs: every job is complete when it returns."""
    weight = random(130, 40, seed=1)
    wrong: list[int] = []

    def work(seed: int) -> None:
        ops = NativeOps(CPU, torch.float32, threads=3)
        packed, x = ops.pack_linear(weight, None), random(9, 40, seed=seed)
        expected = native(torch.float32, 1).linear(x, native(torch.float32, 1).pack_linear(weight, None))
        wrong.extend(seed for _ in range(3000) if not torch.equal(ops.linear(x, packed), expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_sleeping_pool_wakes_for_its_next_job() -> None:
    ops = NativeOps(CPU, torch.float32, threads=4)
    packed, x = ops.pack_linear(random(640, 64, seed=1), None), random(50, 64)
    expected, pause = ops.linear(x, packed), threading.Event()
    for _ in range(50):
        pause.wait(0.002)
        assert torch.equal(ops.linear(x, packed), expected)


def test_operations_that_stand_in_for_native_ones_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "_compilers", lambda level: [["false"]])
    ops = create_ops(OpsChoice("auto", CPU, torch.float32), best="native")
    assert isinstance(ops, TorchOps)
    assert ops.stands_in_because == "false exited with 1: "
    asked = create_ops(OpsChoice("torch", CPU, torch.float32), best="native")
    assert isinstance(asked, TorchOps)
    assert asked.stands_in_because == "", "they were asked for"
