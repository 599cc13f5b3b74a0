"""Memory policies are the kernel's own: they are set and asked for in threads of their own, which they end with."""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shared.machine.memory_policy import MemoryPolicy, set_memory_policy
from shared.machine.numa import read_nodes

MISSING = 900
"""A node that no machine of this test has."""


def memory_policy() -> tuple[MemoryPolicy, frozenset[int]]:
    """This thread's policy and its nodes, as get_mempolicy(2) says."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode, mask, zero = ctypes.c_int(), (ctypes.c_uint64 * 16)(), ctypes.c_long(0)
    bits = ctypes.c_long(8 * ctypes.sizeof(mask) + 1)
    assert ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.byref(mode), mask, bits, None, zero) == 0
    nodes = frozenset(64 * at + bit for at, word in enumerate(mask) for bit in range(64) if word >> bit & 1)
    return MemoryPolicy(mode.value), nodes


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(60)


@pytest.fixture(autouse=True)
def _may_be_set() -> None:
    def first_node() -> None:
        set_memory_policy(MemoryPolicy.PREFERRED, [node.number for node in read_nodes()[:1]])

    try:
        in_a_thread(first_node)
    except OSError as error:
        pytest.skip(f"this sandbox forbids it: {error}")


@pytest.mark.parametrize("policy", [MemoryPolicy.PREFERRED, MemoryPolicy.BIND, MemoryPolicy.INTERLEAVE])
def test_a_policy_holds_in_its_thread_and_in_no_other(policy: MemoryPolicy) -> None:
    (number, *_) = (node.number for node in read_nodes() if node.memory)

    def setting() -> Any:
        set_memory_policy(policy, [number])
        found = memory_policy(), in_a_thread(memory_policy)
        set_memory_policy(MemoryPolicy.DEFAULT, [])
        return *found, memory_policy()

    own, inherited, after = in_a_thread(setting)
    assert own == inherited == (policy, {number})
    assert after == (MemoryPolicy.DEFAULT, frozenset())
    assert memory_policy()[0] == MemoryPolicy.DEFAULT


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(OSError, match="set_mempolicy") as caught:
        in_a_thread(lambda: set_memory_policy(MemoryPolicy.BIND, [MISSING]))
    assert caught.value.errno == errno.EINVAL
