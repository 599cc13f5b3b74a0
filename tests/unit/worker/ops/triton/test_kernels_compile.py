"""What Triton's compiler makes of our kernels for GPUs of compute capability 8.0 and 9.0: needs no GPU.

The launches are in tests/support/kernels/kernel_launches.py; they compile in a process of their own, as this one
interprets kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from tests.support.kernels.kernel_launches import SHARED_MEMORY, Compiled, Launch, launches

_SPILLED = 16
"""Bytes of a thread's stack that are no matter: four registers, by which versions of the compiler differ."""


def _compiled(*words: str) -> list[tuple[Launch, Compiled]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.kernels.kernel_launches", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [msgspec.json.decode(line, type=Compiled) for line in done.stdout.splitlines()]
    return [(launch, result) for (launch, _), result in zip(launches(*words), results, strict=True)]


def _check(*words: str) -> None:
    found = _compiled(*words)
    assert found
    kept = [result for launch, result in found if not launch.may_spill]
    assert [result for result in kept if result.stack > _SPILLED] == [], "spilled registers"
    assert [result for _, result in found if result.shared > SHARED_MEMORY[result.target]] == [], "shared memory"
    assert [result for launch, result in found if launch.loads_ahead and not result.ahead] == [], "loops that wait"
    for launch, result in found:
        must = launch.must | (launch.must_on_hopper if result.target >= 90 else frozenset())
        assert [word for word in must if not result.instructions[word]] == [], result
        assert [word for word in launch.must_not if result.instructions[word]] == [], result
        dependent = result.target >= 90 and "DEPENDENT" in launch.kernel.arg_names
        assert (result.before_inputs is not None) == dependent, result
        assert set(result.before_inputs or ()) <= ({"LDG"} if launch.reads_early else set()), result


@pytest.mark.timeout(900)
def test_kernels_fit_into_registers_and_shared_memory_and_use_the_instructions_that_they_should() -> None:
    _check("often")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_so_do_their_rarer_launches() -> None:
    _check("rare")
