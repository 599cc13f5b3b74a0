"""Launches of our Triton kernels as the worker makes them, and what the compiler makes of them for a GPU, without one.

`python -m tests.support.kernels.kernel_launches [WORDS]` prints a line for each launch whose name (with "often" or
"rare" and, say,
"sm_90" behind it) has all the words. It must run in a process that does not interpret kernels. Add a family's launches
to `FAMILIES`; what they must hold to is in tests/unit/worker/ops/triton/test_kernels_compile.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Bytes that a program may take, by compute capability."""


Instruction = Literal[
    "wgmma", "mma", "cp.async", "cp.async16", "load", "load16", "store", "store16", "local", "barrier"
]
"""Kinds of a GPU's instructions: "16" are those that move 16 bytes for each thread."""

PATTERNS: dict[Instruction, str] = {
    "wgmma": r"\b[HQI]GMMA\.",
    "mma": r"\b[HQI]MMA\.",
    "cp.async": r"\bLDGSTS\b",
    "cp.async16": r"\bLDGSTS\.\S*\b128\b",
    "load": r"\bLDG\.",
    "load16": r"\bLDG\.\S*\b128\b",
    "store": r"\bSTG\.",
    "store16": r"\bSTG\.\S*\b128\b",
    "local": r"\b(LDL|STL)\b",
    "barrier": r"\bBAR\.SYNC",
}


@dataclass(frozen=True)
class Launch:
    """One kernel with all that it is compiled by.

    `arguments`: Triton's words for the arguments that are not constants, in order: "*bf16" (a pointer, taken to be
    aligned to 16 bytes unless the kernel says otherwise), "i32", "fp32". `constants`: the rest, arguments that are None
    included.
    """

    name: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    """Registers of a thread at most; None: as the compiler likes."""
    targets: tuple[int, ...] = (80, 90)
    must: frozenset[Instruction] = frozenset()
    """What its code must have."""
    must_on_hopper: frozenset[Instruction] = frozenset()
    """And what else from compute capability 9.0 on."""
    must_not: frozenset[Instruction] = frozenset()
    loads_ahead: bool = False
    """Whether its loops must have more on its way from memory than what they wait for."""
    reads_early: bool = False
    """Whether it reads, before it has waited, what the kernel before it does not write."""
    may_spill: bool = False
    """Whether some of its registers may go to memory: only if it does not serve requests."""
    rare: bool = False
    """Compiled by the slow test only: each launch takes half a second and more for each target."""


class Compiled(msgspec.Struct):
    """What came out."""

    name: str
    target: int
    registers: int
    stack: int
    """Bytes of a thread's stack: spilled registers."""
    shared: int
    """Bytes of shared memory of a program."""
    ahead: int
    """Groups of asynchronous copies that may still be on their way when a loop goes on, of any loop the fewest."""
    instructions: dict[Instruction, int]
    """How often each of PATTERNS is in the machine's code."""
    before_inputs: list[str] | None
    """Kinds of accesses to global memory before the kernel has waited for those before it; None: it does not wait."""


def compiled(launch: Launch, target: int) -> Compiled:
    names = launch.kernel.arg_names
    constants = launch.constants | ({"DEPENDENT": target >= 90} if "DEPENDENT" in names else {})
    aligned = [p.name for p in launch.kernel.params if not (p.do_not_specialize or p.do_not_specialize_on_alignment)]
    source = ASTSource(
        launch.kernel,
        signature={name: launch.arguments.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in launch.arguments.items()
            if kind.startswith("*") and name in aligned
        },
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "maxnreg": launch.maxnreg}
    result = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    usage, code = _dumped(result.asm["cubin"])
    return Compiled(
        name=launch.name,
        target=target,
        registers=int(_number(r"REG:(\d+)", usage)),
        stack=int(_number(r"STACK:(\d+)", usage)),
        shared=int(result.metadata.shared),
        ahead=_ahead(result.asm["ttgir"]),
        instructions={word: len(re.findall(pattern, code)) for word, pattern in PATTERNS.items()},
        before_inputs=_before_inputs(code),
    )


def _before_inputs(code: str) -> list[str] | None:
    before, waited, _ = code.partition("ACQBULK")
    return sorted(set(re.findall(r"\b(LDG|STG|LDGSTS|RED|ATOMG?)\b", before))) if waited else None


def _dumped(cubin: bytes) -> tuple[str, str]:
    """(resource usage, machine code)."""
    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def run(tool: str, *options: str) -> str:
            command = [str(tools / tool), *options, str(path)]
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

        # -ndf: branches by a stack are not traced, a quarter of its time; the instructions are the same.
        return run("cuobjdump", "-res-usage"), run("nvdisasm", "-c", "-ndf")


def _ahead(layouts: str) -> int:
    """By what the compiler says just before it forgets about loops, whose bodies are indented."""
    return min(map(int, re.findall(r"^ {6,}.*\bttg\.async_wait\b.*\{num = (\d+)", layouts, re.MULTILINE)), default=0)


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text}"
    return found[1]


def _attention() -> Iterator[Launch]:
    from tests.support.kernels.attention_launches import attention

    return attention()


def _mixtures() -> Iterator[Launch]:
    from tests.support.kernels.mixture_launches import mixtures

    return mixtures()


def _rows() -> Iterator[Launch]:
    from tests.support.kernels.row_launches import rows

    return rows()


def _draws() -> Iterator[Launch]:
    from tests.support.kernels.sampling_launches import draws

    return draws()


def _quantized() -> Iterator[Launch]:
    from tests.support.kernels.quantized_launches import experts, products, rounded

    yield from products()
    yield from rounded()
    yield from experts()


def _products() -> Iterator[Launch]:
    from tests.support.kernels.few_row_launches import products

    return products()


def _low_rank() -> Iterator[Launch]:
    from tests.support.kernels.low_rank_launches import products

    return products()


def _graphs() -> Iterator[Launch]:
    from tests.support.kernels.graph_launches import graphs

    return graphs()


def _copies() -> Iterator[Launch]:
    from tests.support.kernels.copy_launches import copies

    return copies()


def _states() -> Iterator[Launch]:
    from tests.support.kernels.state_launches import states

    return states()


FAMILIES: tuple[Callable[[], Iterator[Launch]], ...] = (
    _attention,
    _mixtures,
    _rows,
    _draws,
    _copies,
    _graphs,
    _quantized,
    _low_rank,
    _products,
    _states,
)
"""A function for each family of kernels that gives its launches."""


def launches(*words: str) -> Iterator[tuple[Launch, int]]:
    """(launch, target) of all whose names have all `words`. Before compute capability 9.0 those without tensor cores
    are rare: they are compiled to what they are there, but for waiting."""
    for launch in (launch for family in FAMILIES for launch in family()):
        for target in launch.targets:
            rare = launch.rare or (target < 90 and "mma" not in launch.must)
            name = f"{launch.name} {'rare' if rare else 'often'} sm_{target}"
            if all(word in name for word in words):
                yield launch, target


def main() -> None:
    """Two at a time: the compiler lets go of Python's lock."""
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda job: compiled(*job), launches(*sys.argv[1:])):
            print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
